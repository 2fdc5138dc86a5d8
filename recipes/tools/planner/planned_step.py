"""A plan: what to trace, the process that traces it, and what comes of it beside the memory that there is.

trace_step.py runs the step, since some of torch's tools end the process that they run in.
"""

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hooks.config import HookConfig, check_combinations
from hooks.live import GPUS_PER_MACHINE
from hooks.yaml_of_run import load_yaml
from training.arguments import KINDS, FinetuneArguments, check_arguments
from training.run_files import read_object

from .roofline import DEFAULT_GPU, GPUS, step_seconds

GIB = 2**30
OUTSIDE_GIB = 2.0  # CUDA context and modules 0.3-1, NCCL's first communicator 0.5-1: measure it once on your cluster


@dataclass
class Request:
    """What to run. `kind`: the script of ours that `script` is, or is a copy of under another name; `equal_lengths`: no
    row is padded; `is_fake`: no memory behind tensors."""

    script: str
    kind: str
    arguments: dict[str, Any]
    hook_config: dict[str, Any]
    num_processes: int
    equal_lengths: bool = False
    is_fake: bool = True
    round_to: int = 512

    def is_padded(self, rows: int) -> bool:
        """Whether a micro-batch of so many rows is padded, so that attention is handed a mask."""
        uses_flash = (self.arguments["attn_implementation"] or "").startswith("flash")
        return rows > 1 and not (uses_flash or self.arguments["packing"] or self.equal_lengths)

    def config(self) -> HookConfig:
        """The YAML's keys."""
        as_tuples = {name: tuple(value) for name, value in self.hook_config.items() if isinstance(value, list)}
        return HookConfig(**{**self.hook_config, **as_tuples})

    def is_allowed(self) -> bool:
        """Whether the YAML's parser takes these keys together, and the script's these arguments."""
        return not check_combinations(self.config()) and not check_arguments(self.script_arguments())

    def script_arguments(self) -> FinetuneArguments:
        """The script's arguments."""
        kind = KINDS[self.kind]
        names = {one.name for one in dataclasses.fields(kind)}
        return kind(**{name: value for name, value in self.arguments.items() if name in names})


@dataclass
class PlannedStep:
    """What a step of one rank holds and sends. Bytes, unless it says otherwise."""

    peak: int = 0
    peak_at: str = ""
    parts: dict[str, int] = field(default_factory=dict)  # at the peak
    phase_peaks: dict[str, int] = field(default_factory=dict)  # forward, backward, clip, optimizer step, evaluation
    reserved: int = 0  # what CUDA's allocator would ask of the driver
    host: int = 0  # peak of what is offloaded to host memory
    peak_with_host: int = 0  # what a CPU run, whose device is the host, has at once
    counts: dict[str, int] = field(default_factory=dict)  # MemoryTrace.counts, of a whole optimizer step
    timeline: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    parameters: int = 0
    trainable: int = 0
    loaded: int = 0  # the model as it lies on disk
    exported: int = 0  # of it, what rank 0 holds in host memory while it writes it at the end
    length: int = 0  # tokens of a row
    state: int = 0  # parameter, gradient and optimizer shards, wherever they lie
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0  # that planning took


@dataclass
class Plan:
    """A planned step beside the memory that there is. GiB."""

    name: str
    step: PlannedStep
    outside: float  # CUDA context, communicator: what no allocator sees
    capacity: float | None
    seconds: dict[str, float]  # roofline.step_seconds
    tokens: int  # per optimizer step and GPU
    host: dict[str, float] = field(default_factory=dict)  # on one machine, by what needs it

    @property
    def needs(self) -> float:
        """GiB below which it cannot run: what is live at once, and what no allocator sees."""
        return self.step.peak / GIB + self.outside

    @property
    def comfortable(self) -> float:
        """GiB that the allocator would take if it could: below, it has to give memory back and ask again."""
        return self.step.reserved / GIB + self.outside

    @property
    def headroom(self) -> float:
        """GiB left of the capacity beside what is comfortable."""
        return (self.capacity or 0.0) - self.comfortable

    @property
    def verdict(self) -> str:
        """fits, tight (runs, but the allocator gives memory back and asks again), or does not fit."""
        if self.capacity is None:
            return "no --gpu_memory given"
        return "fits" if self.headroom >= 0 else "tight" if self.needs <= self.capacity else "does not fit"

    @property
    def evaluation(self) -> float:
        """GiB that a batch of evaluation needs, whose rows are all of full length."""
        return self.step.phase_peaks.get("evaluation", 0) / GIB + self.outside

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and GPU, by the roofline."""
        return self.tokens / self.seconds["step"]


def make_request(
    arguments: FinetuneArguments,
    config: HookConfig,
    script: str,
    num_processes: int | None,
    equal_lengths: bool = False,
) -> Request:
    """What to trace of a script of ours. Rows of a micro-batch of several are padded unless it is said that they are of
    equal length."""
    ranks = num_processes or config.num_processes or int(load_yaml(config.path).get("num_processes") or 1)
    return Request(script, script, dataclasses.asdict(arguments), dataclasses.asdict(config), ranks, equal_lengths)


def request_of_run(folder: Path) -> Request:
    """What to trace of a run, from the run.json in its folder. Raises ValueError where that is not there or whole."""
    facts = read_object(folder / "run.json")
    try:
        script, arguments = Path(facts["command"][0]).name, facts["arguments"]
        kinds = {name: {one.name for one in dataclasses.fields(kind)} for name, kind in reversed(KINDS.items())}
        kind = next(name for name, names in kinds.items() if names <= arguments.keys())  # the base comes last
        keys = {name: entry["value"] for name, entry in facts["yaml"].items() if isinstance(entry, dict)}
        ranks, path = facts["num_processes"], facts["yaml"]["path"]
    except (KeyError, IndexError, StopIteration) as error:
        raise ValueError(f"{folder / 'run.json'} does not say what was run ({error!r}).") from error
    config = {"path": path, "found_by": "run.json", "origins": {}, "num_processes": ranks, **keys}
    return Request(script, kind, arguments, config, ranks)


def plan_step(request: Request) -> PlannedStep:
    """Run a step in a process of its own.

    Raises:
        ValueError: the model or these arguments cannot be planned, with the reason.
    """
    text = json.dumps(dataclasses.asdict(request), default=str)
    command = [sys.executable, "-m", f"{__package__}.trace_step"]
    found_on = [*filter(None, sys.path), os.environ.get("PYTHONPATH", "")]  # where this process finds it
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(found_on)}
    done = subprocess.run(command, env=environment, input=text, capture_output=True, text=True)
    line = done.stdout.strip().splitlines()[-1:]
    with contextlib.suppress(json.JSONDecodeError, IndexError):
        answer = json.loads(line[0])
        if "error" not in answer:
            return PlannedStep(**answer)
        raise ValueError(f"This cannot be planned: {answer['error']}")
    last = (done.stderr.strip().splitlines() or [f"its process ended with status {done.returncode}"])[-1]
    raise ValueError(f"This cannot be planned: {last}")


def named(request: Request) -> str:
    """The plan's title."""
    a = request.arguments
    return (
        f"{a['model_name_or_path']} | {Path(request.hook_config['path']).name}, {request.script}"
        f"{', LoRA' if a['use_peft'] else ''} | {request.num_processes} ranks | "
        f"{a['per_device_train_batch_size']} x {a['max_length']} tokens x {a['gradient_accumulation_steps']}"
    )


def make_plan(
    request: Request, name: str, capacity: float | None = None, gpu: str = DEFAULT_GPU, outside: float = OUTSIDE_GIB
) -> Plan:
    """Trace a step and set it beside the memory that there is.

    Raises:
        ValueError: it cannot be planned, with the reason.
    """
    step, config, arguments = plan_step(request), request.hook_config, request.arguments
    offloads_all, offloads = config["fsdp_offload_params"], config["hook_offload_optimizer"]
    moments = step.trainable * 8 // request.num_processes
    copied = 2 * step.counts.get("host copied", 0) + (2 * moments if offloads and not offloads_all else 0)
    if offloads_all:  # each micro-batch takes the shards in twice and gives gradients back; the host computes the step
        shards = (4 * step.trainable + 2 * (step.parameters - step.trainable)) // request.num_processes
        copied += arguments["gradient_accumulation_steps"] * (2 * shards + 4 * step.trainable // request.num_processes)
        copied += step.state
    is_fp32 = config["hook_param_dtype"] == "fp32"
    seconds = step_seconds(step.counts, GPUS[gpu], request.num_processes, is_fp32, step.state, copied)
    rows = arguments["per_device_train_batch_size"] * arguments["gradient_accumulation_steps"]
    ranks = min(request.num_processes, GPUS_PER_MACHINE)
    host = {"weights mapped while loading (page cache)": step.loaded / GIB}
    if step.host:
        host["offloaded, pinned (in powers of two)"] = ranks * step.host / GIB
    if not arguments["use_peft"]:  # an adapter is small
        host["a file and blocks of the model while it is exported"] = step.exported / GIB
    if arguments["async_save"]:  # masters and moments, fp32
        host["copy of the state while it is saved"] = ranks * 12 * step.trainable / request.num_processes / GIB
    return Plan(name, step, outside, capacity, seconds, rows * step.length, host)


def plan_run(folder: Path) -> Plan:
    """The plan of a run from its folder, on this machine's GPU. Raises ValueError as make_plan does."""
    request = request_of_run(folder)
    return make_plan(request, named(request), capacity_gib())


def capacity_gib(gpu_memory: str | None = None, gpu: str | None = None) -> float | None:
    """GiB of a GPU, None where nothing says it."""
    if gpu_memory is not None:
        size = float(re.match(r"[\d.]+", gpu_memory)[0])
        return size * 1e9 / GIB if gpu_memory.endswith("GB") else size
    if gpu is not None:
        return GPUS[gpu].memory_gib
    return torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else None
