"""Micro-batches to the device, and from there to the model, with what the host knows of their rows.

Whatever the host has to ask of the device later, it waits for: all that was queued before has to be done first.
B rows, T tokens.
"""

import inspect
from functools import cache

import torch
import torch.nn.functional as F
from hooks.private_transformers import masks_without_reading
from hooks.structure import base_model, original_class
from torch import nn
from transformers.modeling_outputs import ModelOutput
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_tracing


class Sent(dict):
    """A micro-batch on the device. `needs_mask`: whether rows are padded, or hold several documents; None where that is
    not known. `documents`: of packed rows, where documents begin and end and how long the longest is, by the names that
    transformers' flash attention has for them."""

    needs_mask: bool | None = None
    documents: dict[str, torch.Tensor | int] | None = None


def send(batch: dict[str, torch.Tensor], device: torch.device) -> Sent:
    """A micro-batch from the host to the device. Nothing here waits for the device: all goes from pinned memory."""
    sent = Sent({name: send_values(values, device) for name, values in batch.items()})
    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    if any(values.device.type != "cpu" or is_tracing(values) for values in batch.values()):
        return sent  # sent before, or a plan's: there are no values here to look at
    if positions is None:
        sent.needs_mask = mask is not None and not bool(mask.all())
    elif mask is None:
        starts, longest = document_starts(positions)
        sent.needs_mask = len(starts) - 1 > len(positions)
        starts = send_values(starts, device)
        sent.documents = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        sent.documents |= {"max_length_q": longest, "max_length_k": longest}
    return sent


def send_values(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on the device, not waited for."""
    is_pinned = device.type != "cpu" and values.device.type == "cpu"
    return (values.pin_memory() if is_pinned else values).to(device, non_blocking=True)


def document_starts(positions: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Of position_ids (B, T): where documents start in the rows laid end to end, and at last where all end, int32; the
    length of the longest. A document ends where positions do not go on, and with its row."""
    is_start = F.pad(positions.diff(dim=1) != 1, (1, 0), value=True)  # (B, T)
    starts = F.pad(is_start.flatten().nonzero().flatten(), (0, 1), value=positions.numel())
    return starts.to(torch.int32), int(starts.diff().max())


def run_model(model: nn.Module, batch: dict[str, torch.Tensor], leave_out: tuple[str, ...] = ()) -> ModelOutput:
    """What the model returns for a micro-batch.

    By itself transformers asks the device whether a mask is needed, once or twice per forward, and flash attention of
    packed rows where documents begin, several times per layer. What `send` found on the host is handed on instead: to
    flash attention where the family takes it. Of padded rows it still asks.
    """
    inputs = {name: values for name, values in batch.items() if name not in leave_out}
    if not isinstance(batch, Sent) or batch.needs_mask is None:
        return model(**inputs)
    if not batch.needs_mask:
        inputs.pop("attention_mask", None)
    root = base_model(model)
    if batch.documents and takes_any_name(original_class(root)) and is_flash_attention_requested(root.config):
        inputs |= batch.documents
    with masks_without_reading(batch.needs_mask):
        return model(**inputs)


@cache
def takes_any_name(kind: type[nn.Module]) -> bool:
    """Whether a family's forward takes names that it does not list: it hands them down to attention."""
    parameters = inspect.signature(kind.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
