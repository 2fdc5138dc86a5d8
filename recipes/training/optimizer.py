"""AdamW over the sharded parameters: parameter groups, the proof that it holds them, state offload."""

import contextlib
import inspect
import math
from collections.abc import Iterator
from itertools import zip_longest

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from hooks.config import HookConfig
from hooks.private_torch import set_shard
from hooks.wrap import local
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import get_scheduler
from transformers.utils import is_torchao_available

from .arguments import FinetuneArguments
from .on_demand import tool

Visiting = list[tuple[dict[str, torch.Tensor], str, torch.Tensor]]  # state, name, where the tensor lies at home


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: decay for matrices, none for norms and biases (all parameters of one dimension)."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if parameter.ndim >= 2]
    others = [parameter for parameter in trainable if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(
    model: nn.Module, arguments: FinetuneArguments, config: HookConfig, optim: str = "adamw_torch_fused"
) -> torch.optim.Optimizer:
    """AdamW on the shards. Make it after wrapping and before any forward.

    `adamw_torch_8bit` is torchao's: state of one byte per value, with a scale per 256 of them, for tensors whose shard
    has 4096 values or more. Its update is compiled, once per shape.

    Fused, except under fp16's loss scaler: a fused step handles an overflow inside the kernel, and Accelerate would not
    see that it was skipped.

    Raises:
        ValueError: nothing is trainable; torchao is not installed, or would be offloaded as well.
    """
    is_offloaded = config.hook_offload_optimizer and not config.fsdp_offload_params
    uses_scaler = config.mixed_precision == "fp16"
    check_optim(optim, is_offloaded)
    groups = parameter_groups(model, arguments.weight_decay)
    if not groups:
        raise ValueError("No parameter is trainable (all are frozen); nothing to optimize.")
    betas = (arguments.adam_beta1, arguments.adam_beta2)
    options = {"lr": arguments.learning_rate, "betas": betas, "eps": arguments.adam_epsilon}
    if optim == "adamw_torch_8bit":
        from torchao.optim import AdamW8bit

        return AdamW8bit(groups, **options)
    kind = OffloadedAdamW if is_offloaded else torch.optim.AdamW
    return kind(groups, **options, fused=not uses_scaler)


def check_optim(optim: str, is_offloaded: bool) -> None:
    """Raise ValueError for an optimizer that is not known, not installed, or that cannot be offloaded."""
    if optim not in ("adamw_torch_fused", "adamw_torch_8bit"):
        raise ValueError(f"--optim: found {optim}, allowed: adamw_torch_fused, adamw_torch_8bit.")
    if optim == "adamw_torch_8bit" and not is_torchao_available():
        raise ValueError("--optim adamw_torch_8bit: torchao is not installed (pip install torchao).")
    if optim == "adamw_torch_8bit" and is_offloaded:
        raise ValueError("--optim adamw_torch_8bit keeps its state on the device: set hook_offload_optimizer: false.")


def make_scheduler(
    optimizer: torch.optim.Optimizer, kind: str, warmup_steps: float, total_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """transformers' schedule over optimizer steps. `warmup_steps` below 1 is a share of all steps."""
    warmup_steps = warmup_steps if warmup_steps >= 1 else warmup_steps * total_steps
    return get_scheduler(kind, optimizer, math.ceil(warmup_steps), total_steps)


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """`accelerator.prepare`, between two proofs that the optimizer holds every parameter; its first step is watched.

    Accelerate matches parameters before and after by their memory address; empty shards (a LoRA matrix of fewer rows
    than ranks) all have address 0 and would be taken for one another, so the parameters are put back.
    """
    check_optimizer(model, optimizer)
    held = [list(group["params"]) for group in optimizer.param_groups]
    model, prepared = accelerator.prepare(model, optimizer)
    for group, parameters in zip(optimizer.param_groups, held):
        group["params"] = parameters
    check_optimizer(model, optimizer)
    checks = tool("diagnosis.weight_checks", "note on weights that do not move", accelerator.print)
    if checks is not None:
        checks.watch_first_step(accelerator, model, optimizer)
    return model, prepared


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless each trainable parameter is sharded and in the optimizer exactly once.

    An optimizer made before wrapping, or after a forward that left units gathered, updates tensors that nothing reads:
    the loss still falls for a while, silently wrong.
    """
    counts: dict[int, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    problems = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        count = counts.pop(id(parameter), 0)
        if count != 1:
            problems.append(f"{name} is in the optimizer {count} times")
        if not isinstance(parameter, DTensor):
            problems.append(f"{name} is not sharded")
    if counts:
        problems.append(f"{len(counts)} tensor(s) of the optimizer are not parameters of this model")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        fix = "make the optimizer after wrapping and before any forward"
        raise ValueError(f"The optimizer would not train this model ({'; '.join(problems[:3])}{more}): {fix}.")


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose state lies in host memory between steps (pinned, where there is a device: torch takes the next power
    of two of bytes for each tensor, up to twice as many; PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1 in the
    environment, a setting of torch's that was not tried here, is to end that above 1 MB).

    In the step it visits the parameters' device in slices of about `slice_bytes`, the next one on its way while one is
    used, so that two slices are there at most. Bit-equal to AdamW; costs a copy of the state each way per step. On a
    CPU it does the same and saves nothing.
    """

    slice_bytes = 2**28  # large enough to copy at full speed

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step over all slices."""
        one_slice = inspect.unwrap(torch.optim.AdamW.step)  # without the hooks, which are for the whole
        groups, slices = self.param_groups, list(self.slices())
        device = slices[0][0]["params"][0].device
        copies = None if device.type == "cpu" else torch.Stream(device=device)
        visiting, left = self.send(slices[0], device, copies), None
        try:
            for current, following in zip_longest(slices, slices[1:]):
                if copies is not None:
                    arrive(visiting, copies)
                if left is not None:
                    left.synchronize()  # the slice before is home: else the host would soon ask for memory for all
                upcoming = self.send(following, device, copies) if following else []
                self.param_groups = current
                one_slice(self)
                self.take_back(current, visiting)
                visiting, left = upcoming, copies and torch.accelerator.current_stream().record_event()
        finally:
            self.param_groups = groups
        if copies is not None:
            torch.accelerator.synchronize(device)  # whoever reads the state next may do so on the host

    def slices(self) -> Iterator[list[dict]]:
        """The parameter groups, cut where a slice's state (two values per parameter) is large enough."""
        current, size = [], 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if size >= self.slice_bytes:
                    yield current
                    current, size = [], 0
                if not current or current[-1]["group"] is not group:
                    current.append({**group, "params": [], "group": group})
                current[-1]["params"].append(parameter)
                size += 2 * local(parameter).nbytes
        yield current

    def send(self, groups: list[dict], device: torch.device, copies: torch.Stream | None) -> Visiting:
        """Put a slice's state on the device; returns where each tensor of it lies in host memory."""
        with copies if copies is not None else contextlib.nullcontext():
            return [
                (state, name, place(state, name, device))
                for group in groups
                for state in (self.state.get(parameter, {}) for parameter in group["params"])
                for name in moving(state)
            ]

    def take_back(self, groups: list[dict], visiting: Visiting) -> None:
        """Write a slice's state back to where it lay; one that the step has just made gets a place there."""
        homes = {(id(state), name): home for state, name, home in visiting}
        for state in (self.state.get(parameter, {}) for group in groups for parameter in group["params"]):
            for name in moving(state):
                home = homes.get((id(state), name))
                if home is None or home.device.type != "cpu":  # new, or just loaded
                    place(state, name, torch.device("cpu"))
                else:
                    home.copy_(local(state[name]), non_blocking=True)
                    put(state, name, home)


def moving(state: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors worth moving: not the step counts."""
    return [name for name, value in state.items() if value.ndim]


def place(state: dict[str, torch.Tensor], name: str, device: torch.device) -> torch.Tensor:
    """Replace a state tensor by its copy on another device; returns the one that it was."""
    home = local(state[name])
    is_pinned = device.type == "cpu" and home.device.type != "cpu"
    put(state, name, torch.empty_like(home, device=device, pin_memory=is_pinned).copy_(home, non_blocking=True))
    return home


def put(state: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
    """Make a tensor the state's: the shard of a DTensor, anything else itself."""
    if isinstance(state[name], DTensor):
        set_shard(state[name], value)
    else:
        state[name] = value


def arrive(visiting: Visiting, copies: torch.Stream) -> None:
    """Let the step wait for a slice, and keep its memory until the step has used it."""
    current = torch.accelerator.current_stream()
    current.wait_stream(copies)
    for state, name, _ in visiting:
        local(state[name]).record_stream(current)
