"""Model FLOPs: what training a row asks of the model, counted operator by operator, and a device's peak.

B rows of T tokens.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from hooks.structure import base_model
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ..planner.roofline import GPUS
from ..private_torch import ATTENTION, GROUPED_MATMUL, OperatorMode
from ..private_transformers import attention_of, supports_attention

CONVENTION = (
    "model FLOPs: matmuls and attention (the whole square, padding too) of one forward, and of the gradients that the "
    "trained weights need; neither recompute nor the weight gradients of frozen matrices"
)
# FLOP/s in bf16 without sparsity, from the vendor's data sheets; matched as whole words, the longest name first.
PEAK_FLOPS = {name.partition("-")[0].upper(): gpu.bf16 for name, gpu in GPUS.items()}
PEAK_FLOPS |= {"H100 NVL": 835e12, "H100 PCIe": 756e12, "H200 NVL": 836e12}


def peak_flops(device_name: str) -> float | None:
    """The bf16 peak of a device in FLOP/s, None for one that is not in the table."""
    names = sorted(PEAK_FLOPS, key=len, reverse=True)
    found = next((name for name in names if re.search(rf"\b{name}\b", device_name)), None)
    return PEAK_FLOPS[found] if found else None


def count_flops(
    model: nn.Module, micro_batch_loss: Callable[..., Any], batch: dict[str, torch.Tensor], device: torch.device
) -> tuple[float, float]:
    """Return (a, b): training a row of T tokens costs a T + b T^2 FLOPs, exactly at this batch's length and close to it
    for shorter rows, whatever the loss does with a row's last token. Every rank must call it.

    Runs two forwards of one row, whole and half, and no backward. Gradients, random state, attention and mode are left
    as they were, so call it between two steps. `micro_batch_loss` is the one trained on.
    """
    length = batch["labels"].shape[1]
    half = max(1, length // 2)
    with without_frozen_embedding_gradients(model), countable_attention(base_model(model)):
        per_token = [
            row_flops(model, micro_batch_loss, {name: values[:1, :size] for name, values in batch.items()}, device)
            / size
            for size in (length, half)
        ]
    squared = (per_token[0] - per_token[1]) / (length - half) if length > half else 0.0
    return per_token[0] - squared * length, squared


@torch.compiler.set_stance("force_eager")  # a compiled block is one operator, of which nothing can be counted
def row_flops(
    model: nn.Module, micro_batch_loss: Callable[..., Any], row: dict[str, torch.Tensor], device: torch.device
) -> float:
    """FLOPs of a forward of this row and of the backward that training it would need."""
    row = {name: values.to(device) for name, values in row.items()}
    devices = [] if device.type == "cpu" else [device]
    known = FlopCounterMode(display=False, custom_mapping=UNKNOWN_TO_TORCH)
    try:
        with torch.random.fork_rng(devices, device_type=device.type), known, NeededFlops(known) as needed:
            micro_batch_loss(model, row, 1, 1)
    finally:
        if isinstance(model, FSDPModule):
            model.reset_iter_state()  # a forward without a backward leaves gathered parameters behind
    return needed.total


class NeededFlops(OperatorMode):
    """Adds up each operator's FLOPs, once for its forward and once for each gradient that its backward will compute.

    Autograd has marked what needs a gradient by the time an operator runs, so nothing is assumed about the model. Enter
    it inside the counter whose formulas it uses.
    """

    def __init__(self, forward: FlopCounterMode) -> None:
        super().__init__()
        self.forward, self.total = forward, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        before = self.forward.get_total_flops()
        output = func(*args, **(kwargs or {}))
        flops = self.forward.get_total_flops() - before
        if flops:
            self.total += flops * (1 + gradients_needed(func.name(), args))
        return output


def gradients_needed(name: str, args: tuple) -> float:
    """What an operator's backward costs, in forwards of it."""
    if "attention" in name:  # two products: scores = q k^T, output = p v. The backward's second scores are recompute.
        query, key, value = (operand.requires_grad for operand in args[:3])
        return (value + (query or key) + query + key) / 2  # of v; of p; of q; of k
    operands = args[1:3] if name.startswith(("aten::addmm", "aten::baddbmm")) else args[:2]
    return sum(operand.requires_grad for operand in operands)


@contextmanager
def without_frozen_embedding_gradients(model: nn.Module) -> Iterator[None]:
    """Undo what transformers does under recompute: it asks for the gradient of a frozen embedding's output, which no
    trained weight needs."""
    embedding = base_model(model).get_input_embeddings()
    is_frozen = embedding is not None and not any(parameter.requires_grad for parameter in embedding.parameters())
    handle = embedding.register_forward_hook(lambda *args: args[-1].detach()) if is_frozen else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


@contextmanager
def countable_attention(model: nn.Module) -> Iterator[None]:
    """Put torch's own attention in the place of kernels that no formula is known for (flash, flex)."""
    chosen = attention_of(model.config)
    is_known = chosen in ("eager", "sdpa", None)
    try:
        if not is_known:
            model.set_attn_implementation("sdpa" if supports_attention(model, "sdpa") else "eager")
        yield
    finally:
        if not is_known:
            model.set_attn_implementation(chosen)


def attention_flops(query: tuple, key: tuple, value: tuple, *args: Any, **kwargs: Any) -> int:
    """FLOPs of attention, from shapes."""
    return sdpa_flop_count(query, key, value)


def grouped_matmul_flops(rows: tuple, *args: Any, out_shape: tuple, **kwargs: Any) -> int:
    """FLOPs of a mixture's matmul, in which each row meets one expert's matrix."""
    return 2 * prod(out_shape) * rows[-1]


UNKNOWN_TO_TORCH = {ATTENTION: attention_flops, GROUPED_MATMUL: grouped_matmul_flops}
