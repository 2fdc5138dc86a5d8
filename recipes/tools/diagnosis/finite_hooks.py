"""Where a step stops being finite: the first module of its forward or, where that is finite, of its backward.

Hooks look at what every module takes and gives, at the gradients of both, and at each gathered parameter's gradient
before it is reduced over ranks: FSDP2 has put the gathered parameters into a module by the time its forward begins.
Each look makes the CPU wait for the device, so this is for a step that is run again.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from training.optimizer import local


@dataclass
class Finding:
    """What one rank met first, in words."""

    what: str
    call: int = -1  # which forward of the whole model it was in this step; -1: not known
    rows: list[int] = field(default_factory=list)  # which rows of that batch; empty: not known
    is_local: bool = True  # seen before ranks were reduced, so that the rank means something


def find_non_finite(model: nn.Module, whole_step: Callable[[], torch.Tensor]) -> tuple[Finding | None, list[int]]:
    """Run a step (forwards and backwards, returning its loss) under hooks.

    Returns (what was first not finite on this rank, the number of rows of each forward of the model). The gradients
    stay, for the caller to clear; in their last bits they are added up in another order than without hooks. A
    collective where the step is one.
    """
    watch = FiniteWatch(model)
    try:
        loss = whole_step()
    finally:
        for handle in watch.handles:
            handle.remove()
    watch.conclude()
    finding = watch.finding
    if not loss.isfinite() and (finding is None or not watch.is_of_forward):
        call = finding.call if finding else -1
        finding = Finding(f"the loss is {loss.item()}, and every module's output is finite", call)
    return finding or reduced_gradients(model), watch.batch_rows


class FiniteWatch:
    """Notes what is first not finite while a model runs forwards, each followed by its backward."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.names = model, {module: name for name, module in model.named_modules()}
        self.finding: Finding | None = None
        self.is_of_forward = False  # the finding
        self.negative = ""  # the first module that gave -inf and nothing worse, which may be a mask
        self.batch_rows: list[int] = []
        self.running: list[nn.Module] = []  # whose forward has begun, outermost first; empty in backward
        self.gradients: list[tuple[str, str, list[int] | None]] = []  # of an output, input, parameter; name; bad rows
        self.hooked: set[int] = set()
        self.handles = []
        for module in self.names:
            self.handles.append(module.register_forward_pre_hook(self.enter, with_kwargs=True))
            self.handles.append(module.register_forward_hook(self.leave, with_kwargs=True))

    @torch.no_grad()
    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Before a module's forward. Hands it views of its inputs, whose gradients are those of this module alone."""
        if module is self.model:
            self.conclude()  # the backward of the forward before
            self.running = []
            self.batch_rows.append(next(len(value) for value in (*args, *kwargs.values()) if value is not None))
        elif not self.running:  # a block that is computed again in backward
            return None
        if self.finding is not None:
            self.running = []
            return None
        bad = next((tensor for tensor in tensors_in((args, kwargs)) if is_spoiled(tensor)), None)
        if bad is not None and self.running:
            parent = self.names[self.running[-1]] or "the model"
            self.found(f"forward of {parent}, its own code before {self.names[module]}: {numbers(bad)}", bad)
            return None
        self.running.append(module)
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in self.hooked and not isinstance(parameter, DTensor):
                self.hooked.add(id(parameter))
                self.watch(parameter, "parameter", f"{self.names[module]}.{name}".removeprefix("."))
        return self.watched_view(args, module), {key: self.watched_view(kwargs[key], module) for key in kwargs}

    @torch.no_grad()
    def leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """After a module's forward."""
        if not self.running:
            return
        while self.running and self.running.pop() is not module:
            pass  # one whose forward raised, and whose caller went on
        name, outputs = self.names[module], list(tensors_in(output))
        bad = next((tensor for tensor in outputs if is_spoiled(tensor)), None)
        if bad is not None:
            what = f"forward of {name or 'the model'}: {numbers(bad)}"
            self.found(what + self.circumstances(module, args, kwargs), bad)
            return
        if not self.negative and any(tensor.isneginf().any() for tensor in outputs):
            self.negative = name or "the model"
        for tensor in outputs:
            self.watch(tensor, "output", name)

    def found(self, what: str, bad: torch.Tensor) -> None:
        """Keep the first module of a forward whose values are not finite."""
        if self.negative:
            what += f"; before it {self.negative} gave -inf"
        call = len(self.batch_rows) - 1
        self.finding, self.is_of_forward = Finding(what, call, bad_rows(bad, self.batch_rows[-1])), True
        self.running = []

    def circumstances(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> str:
        """What the module was given, and whether its own parameters are finite."""
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.numel()]
        largest = max((tensor.abs().max().item() for tensor in inputs), default=0.0)
        text = "; its inputs are finite" + (f", the largest {largest:.1e}" if inputs else "")
        if math.isinf(largest):
            text = "; among its inputs is -inf"
        for name, parameter in module.named_parameters(recurse=False):
            if not local(parameter).isfinite().all():
                text += f"; its own {name} is not finite, as loaded or since an earlier step"
        return text

    def watched_view(self, value: Any, module: nn.Module) -> Any:
        """The same value, its tensors that have a gradient as views that are watched."""
        if isinstance(value, torch.Tensor) and value.requires_grad:
            with torch.enable_grad():
                view = value.view_as(value)
            self.watch(view, "input", self.names[module])
            return view
        if type(value) in (tuple, list):
            return type(value)(self.watched_view(item, module) for item in value)
        return value

    def watch(self, tensor: torch.Tensor, kind: str, name: str) -> None:
        """Look at a tensor's gradient when it is there."""
        if tensor.requires_grad:
            self.handles.append(tensor.register_hook(partial(self.note_gradient, kind, name)))

    @torch.no_grad()
    def note_gradient(self, kind: str, name: str, gradient: torch.Tensor) -> None:
        """One gradient, in the order of the backward."""
        if self.finding is None:
            is_bad = not gradient.isfinite().all()
            rows = [] if kind == "parameter" else bad_rows(gradient, self.batch_rows[-1])
            self.gradients.append((kind, name, rows if is_bad else None))

    def conclude(self) -> None:
        """Look for the origin among the gradients of a backward that has ended."""
        gradients, self.gradients = self.gradients, []
        bad = [entry for entry in gradients if entry[2] is not None]
        if self.finding is not None or not bad:
            return
        spoiled = {name for kind, name, _ in bad if kind == "output"}
        healthy = {name for kind, name, _ in gradients if kind == "output"} - spoiled
        origins = [name for kind, name, _ in bad if kind == "input" and name in healthy]
        innermost = {name for name in origins if not any(other.startswith(f"{name}.") for other in origins)}
        first = next((name for kind, name, _ in bad if kind == "parameter"), "")
        call = len(self.batch_rows) - 1
        (kind, name, rows), what = bad[0], ""
        for entry in bad:
            owner = entry[1].rpartition(".")[0] if entry[0] == "parameter" else entry[1]
            if (entry[0] == "input" and owner in innermost) or (entry[0] == "parameter" and owner in healthy):
                rows, what = entry[2], f"backward of {owner or 'the model'}: the gradient of its output is finite"
                what += ", that of its input is not" if entry[0] == "input" else ""
                break
        what = what or f"backward: the gradient of the {kind} of {name or 'the model'} is the first that is not finite"
        what += f"; the first parameter whose gradient is not finite: {first}" if first else ""
        self.finding = Finding(what, call, rows)


def reduced_gradients(model: nn.Module) -> Finding | None:
    """What the sharded gradients tell where every rank's own were finite."""
    largest, where, squares = 0.0, "", 0.0
    for name, parameter in reversed(list(model.named_parameters())):  # about the order of the backward
        if parameter.grad is None or not local(parameter.grad).numel():
            continue
        gradient = local(parameter.grad)
        if not gradient.isfinite().all():
            what = f"gradient of {name}: finite on each rank alone, not after they were added up"
            return Finding(f"{what} (hook_reduce_dtype: fp32)", is_local=False)
        size = gradient.abs().max().item()
        largest, where = (size, name) if size > largest else (largest, where)
        squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).item() ** 2
    if squares * dist.get_world_size() <= torch.finfo(torch.float32).max:
        return None
    what = f"every gradient is finite, but the norm of all overflows: {where} holds {largest:.1e}"
    return Finding(what, is_local=False)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors in what a module takes or gives."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def is_spoiled(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds nan or inf. -inf alone is how attention and routers mask."""
    return bool((tensor.isnan() | tensor.isposinf()).any())


def bad_rows(tensor: torch.Tensor, rows: int) -> list[int]:
    """Which rows of a batch hold what is not finite; [] for a tensor that is not of so many rows."""
    if tensor.ndim < 2 or tensor.shape[0] != rows:
        return []
    return (~tensor.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()


def numbers(tensor: torch.Tensor) -> str:
    """How much of a tensor is not finite."""
    nan, infinite = tensor.isnan().sum().item(), tensor.isinf().sum().item()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{nan:,} nan and {infinite:,} inf among its {tensor.numel():,} values ({dtype})"
