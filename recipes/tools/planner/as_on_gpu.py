"""What runs a step on fake CPU tensors as a GPU would run it: stand-ins for what needs the real thing.

transformers takes a fake tensor for one that is being traced, and offloading copies to a host that a CPU run cannot
tell from its device. tests/tools/test_plan.py fails where an upgrade moves a name that is replaced here.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import transformers.masking_utils
import transformers.modeling_utils
from training.optimizer import OffloadedAdamW

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
    """What a fake CPU would do otherwise than a GPU.

    transformers takes a fake tensor for one that is being traced, and then always makes a mask of T x T; and it looks
    for an accelerator to copy saved inputs from.
    """
    with contextlib.ExitStack() as stack:
        if not has_mask:
            stack.enter_context(
                mock.patch.object(transformers.masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
            )
        stack.enter_context(mock.patch.object(transformers.modeling_utils, "save_on_cpu", SavedOnHost))
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
    if compute_dtype != "fp32" or base.config.get_text_config()._experts_implementation != "grouped_mm":
        return []
    base.set_experts_implementation("batched_mm")
    return ["experts counted with experts_implementation batched_mm, which holds other tensors than grouped_mm"]
