"""What to plan, what comes of it, and the process that finds out: trace_step.py runs the step, since some of torch's
tools end the process that they run in.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hooks.config import HookConfig, check_combinations
from training.arguments import KINDS, FinetuneArguments, check_arguments
from training.run_files import read_object


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
    length: int = 0  # tokens of a row
    state: int = 0  # parameter, gradient and optimizer shards, wherever they lie
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0  # that planning took


def make_request(
    arguments: FinetuneArguments,
    config: HookConfig,
    script: str,
    num_processes: int | None,
    equal_lengths: bool = False,
) -> Request:
    """What to trace. Rows of a micro-batch of several are padded unless it is said that they are of equal length."""
    ranks = num_processes or config.num_processes or yaml_processes(config)
    kind = next(name for name, kind in reversed(KINDS.items()) if isinstance(arguments, kind))  # the base comes last
    return Request(script, kind, dataclasses.asdict(arguments), dataclasses.asdict(config), ranks, equal_lengths)


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


def yaml_processes(config: HookConfig) -> int:
    """num_processes of the YAML."""
    return int(yaml.safe_load(Path(config.path).read_text(encoding="utf-8")).get("num_processes") or 1)


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
