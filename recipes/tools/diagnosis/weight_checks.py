"""Do the weights move? Low precision is said at the start; each trained tensor is looked at in the first step."""

import math
from typing import Any

import torch
from accelerate import Accelerator
from hooks.wrap import local
from torch import nn
from tqdm import tqdm

SAMPLE = 4096  # values of a shard, from its largest gradient on: a copy of them all would be one more copy of the model
NAMED = 5


def watch_first_step(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Print what is kept in too few bits to be trained, and have the first step checked."""
    if line := low_precision_line(model, optimizer):
        accelerator.print(line)
    if accelerator.is_main_process:
        FirstStepCheck(model, optimizer)


def low_precision_line(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A line on trained weights that rounding keeps where they are, empty if there are none.

    AdamW moves a weight by about the learning rate. It stays what it was where that is less than half of the distance
    to the next number of its dtype: in bf16 2**-9 of it, in fp32 2**-25.
    """
    trained = [(name, parameter.dtype) for name, parameter in model.named_parameters() if parameter.requires_grad]
    low = [(name, dtype) for name, dtype in trained if dtype.itemsize < 4]
    if not low:
        return ""
    name, dtype = low[0]
    rate = highest_rates(optimizer)[1]
    return (
        f"note: {len(low)} of {len(trained)} trained tensors are kept in {str(dtype).removeprefix('torch.')}, such as "
        f"{name}. At learning rate {rate:.1e} their values above {rate / (torch.finfo(dtype).eps / 4):.1e} are rounded "
        "back to what they were, and the loss does not fall. Train fp32 masters: cast_stored_parameters after wrapping"
    )


def highest_rates(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """(the learning rate of now, the one at the top of the schedule)."""
    groups = optimizer.param_groups
    return max(float(g["lr"]) for g in groups), max(float(g.get("initial_lr", g["lr"])) for g in groups)


class FirstStepCheck:
    """Says once which trained tensors the optimizer does not move though they have a gradient.

    It looks at the first step that has gradients and a learning rate. A tensor that stays is looked at again until the
    rate is at its top, because a warm-up begins with steps that rounding swallows. Then it does nothing more: a hook
    that takes itself off breaks the loop over the hooks behind it. For one rank, whose shards tell: a collective inside
    a step would leave the others waiting where it fails on one.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.waiting = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.samples: dict[str, Sample] = {}
        self.is_done = False
        optimizer.register_step_pre_hook(self.before_step)
        optimizer.register_step_post_hook(self.after_step)

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        """Copy a few values of each tensor."""
        if not self.is_done:
            with_gradient = {name: p for name, p in self.waiting.items() if p.grad is not None}
            self.samples = {name: Sample(p) for name, p in with_gradient.items() if local(p.grad).numel()}

    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        """Compare them, and say what did not move."""
        if self.is_done:
            return
        seen = {name: sample.read(self.waiting[name]) for name, sample in self.samples.items()}
        self.samples = {}
        rate, top_rate = highest_rates(optimizer)
        if rate == 0 or not any(seen.values()):
            return  # a warm-up may begin so; and so does torch make the state of an optimizer before it is loaded
        stuck = {name: values[1:] for name, values in seen.items() if values and not values[0]}
        self.waiting = {name: self.waiting[name] for name in stuck}
        if stuck and rate < 0.99 * top_rate:
            return
        self.is_done = True
        if stuck:
            epsilon = optimizer.param_groups[0].get("eps", 0.0)
            dtypes = {name: parameter.dtype for name, parameter in self.waiting.items()}
            tqdm.write(describe_stuck(stuck, dtypes, rate, epsilon))


class Sample:
    """Some values of this rank's shard before a step, where they have a gradient. Nothing waits for the device."""

    def __init__(self, parameter: nn.Parameter) -> None:
        gradient = local(parameter.grad).flatten()
        ends = torch.stack([gradient.argmax(), gradient.argmin()])
        first = ends.gather(0, gradient[ends].abs().argmax(0, keepdim=True))
        count = min(SAMPLE, gradient.numel())
        self.places = (first + torch.arange(count, device=gradient.device)) % gradient.numel()
        self.before, self.gradient = local(parameter).flatten()[self.places], gradient[self.places]

    def read(self, parameter: nn.Parameter) -> tuple[bool, float, float] | None:
        """(whether a value moved, the smallest value, the largest gradient), None without a gradient."""
        counts = self.gradient != 0
        moved = ((local(parameter).flatten()[self.places] != self.before) & counts).any()
        smallest = torch.where(counts, self.before.abs().float(), math.inf).min()
        moved, smallest, largest = torch.stack([moved.float(), smallest, self.gradient.abs().max().float()]).tolist()
        return (bool(moved), smallest, largest) if largest else None


def describe_stuck(
    stuck: dict[str, tuple[float, float]], dtypes: dict[str, torch.dtype], rate: float, epsilon: float
) -> str:
    """Which tensors (of this smallest value, this largest gradient) did not move, apart by what keeps them."""
    rounded, unreached = [], []
    for name, (smallest, gradient) in stuck.items():
        move = rate * gradient / (gradient + epsilon)  # of AdamW's first step
        is_rounded = move < torch.finfo(dtypes[name]).eps / 2 * smallest
        dtype = str(dtypes[name]).removeprefix("torch.")
        (rounded if is_rounded else unreached).append(f"{name} ({dtype}, values from {smallest:.1e})")
    lines = []
    for names, meaning in (
        (rounded, f"a step of {rate:.1e} is rounded away: raise --learning_rate, or train them in fp32"),
        (unreached, "the optimizer does not reach them: make it after wrapping and before any forward"),
    ):
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        if names:
            listed = ", ".join(names[:NAMED]) + more
            lines.append(
                f"note: {len(names)} trained tensor(s) have a gradient and did not change in the optimizer's step; "
                f"{meaning}. {listed}"
            )
    return "\n".join(lines)
