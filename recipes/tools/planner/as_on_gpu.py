"""What runs a step on fake CPU tensors as a GPU would run it: stand-ins for what needs the real thing."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from training.optimizer import OffloadedAdamW

from ..private_transformers import saving_with, without_packed_mask
from .memory_trace import MemoryTrace


def stand_in(world_size: int) -> SimpleNamespace:
    """What forward_backward asks of an Accelerator: Accelerate's own does not run on fake tensors."""
    return SimpleNamespace(
        num_processes=world_size,
        process_index=0,
        device=torch.device("cpu"),
        scaler=None,
        backward=lambda loss: loss.backward(),
    )


@contextlib.contextmanager
def on_a_gpu(has_mask: bool) -> Iterator[None]:
    """What a fake CPU would do otherwise than a GPU: a mask of T x T, copies of saved inputs off an accelerator."""
    with contextlib.nullcontext() if has_mask else without_packed_mask(), saving_with(SavedOnHost):
        yield


class SavedOnHost(torch.autograd.graph.saved_tensors_hooks):
    """torch's save_on_cpu, with a host that is told apart by the trace alone."""

    trace: MemoryTrace | None = None

    def __init__(self, **_: Any) -> None:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if SavedOnHost.trace is None:
                return tensor.clone()
            SavedOnHost.trace.counts["host copied"] += tensor.nbytes
            with SavedOnHost.trace.host():
                return tensor.clone()

        super().__init__(pack, torch.clone)


@contextlib.contextmanager
def offloading_seen(trace: MemoryTrace) -> Iterator[None]:
    """Count copies in host memory as such."""
    take_back = OffloadedAdamW.take_back

    def to_host(self: OffloadedAdamW, *args: Any) -> None:
        with trace.host():
            take_back(self, *args)

    with mock.patch.object(OffloadedAdamW, "take_back", to_host), mock.patch.object(SavedOnHost, "trace", trace):
        yield


def use_experts_that_can_be_faked(model: Any, compute_dtype: str) -> list[str]:
    """In fp32 a mixture's default kernel does not run on fake tensors; another one does, and needs other memory.

    Returns the note that says so.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    experts = base.get_experts_implementation()  # of the model, and of its parts
    if compute_dtype != "fp32" or experts.get("text_config", experts[""]) != "grouped_mm":
        return []
    base.set_experts_implementation("batched_mm")
    return ["experts counted with experts_implementation batched_mm, which holds other tensors than grouped_mm"]
