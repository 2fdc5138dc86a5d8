"""A plan: a traced step beside the memory that there is, and an estimate of its time."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from .planned_step import PlannedStep, Request, plan_step, request_of_run
from .roofline import DEFAULT_GPU, GPUS, GPUS_PER_MACHINE, step_seconds

GIB = 2**30
OUTSIDE_GIB = 2.0  # CUDA context and modules 0.3-1, NCCL's first communicator 0.5-1: measure it once on your cluster


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
        host["offloaded, pinned"] = ranks * step.host / GIB
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
    import torch  # here: a plan for another machine needs it in its process alone

    return torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else None
