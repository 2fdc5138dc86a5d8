"""Out of memory: what was live by part, which usual extra copies there are, the next knob and what it would save."""

import gc
import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hooks.wrap import local
from torch import nn
from torch.distributed.tensor import DTensor
from training.memory_errors import first_line

from ..planner.advice import next_knobs
from ..planner.planned_step import request_of_run

GIB = 2**30
OTHERS = "gathered units, activations and temporaries"
LARGEST = 20  # tensors that a snapshot names
FRAGMENTED = 0.2  # of the device: reserved beyond what is allocated


def live_by_part(optimizer: torch.optim.Optimizer) -> tuple[dict[str, int], list[tuple[int, str]]]:
    """Bytes of live tensors by part, and the largest tensors that are neither parameter, gradient nor state.

    The shards are looked for among all tensors: while a unit is gathered, the model's own parameters are whole.
    """
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    shards = [one for one in tensors if isinstance(one, DTensor) and isinstance(one, nn.Parameter)]
    parts = {"parameter shards": shards, "gradient shards": (shard.grad for shard in shards)}
    parts["optimizer state"] = (v for state in optimizer.state.values() for v in state.values())
    seen: dict[int, int] = {}
    found = {name: sum(new_bytes(value, seen) for value in values) for name, values in parts.items()}
    rest = []
    for value in tensors:
        size = new_bytes(value, seen)
        if size:
            rest.append((size, f"{tuple(value.shape)} {value.dtype}".replace("torch.", "")))
    found[OTHERS] = sum(size for size, _ in rest)
    return found, sorted(rest, reverse=True)


def new_bytes(value: Any, seen: dict[int, int]) -> int:
    """Bytes of a tensor's storage, 0 if it was seen, or where there is no storage to ask: a sparse tensor."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        return 0
    try:
        storage = local(value).untyped_storage()
        if storage.data_ptr() in seen:
            return 0
        seen[storage.data_ptr()] = storage.nbytes()
        return storage.nbytes()
    except RuntimeError:  # of a sparse or wrapper tensor somewhere in the process; the report is worth having without
        return 0


def extra_copies(model: nn.Module, rest: list[tuple[int, str]]) -> Iterator[str]:
    """The usual ones: whole logits that are kept, a cache, hidden states, a loss that is not in chunks."""
    config = model.config.get_text_config()
    logits = [size for size, shape in rest if f", {config.vocab_size})" in shape]
    if logits and max(logits) * 2 > GIB / 100:
        yield (
            f"{len(logits)} tensors of logits ({sum(logits) / GIB:.2f} GiB): the loss in chunks of "
            "finetune_mem_limit.py keeps none"
        )
    for name in ("use_cache", "output_hidden_states", "output_attentions"):
        if getattr(config, name, False):
            yield f"the model's config has {name}: true, which keeps a copy per block: set it to false"


def describe_memory(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, path: Path) -> list[str]:
    """What is live, in lines; written to `path` too. The frames that failed must still be alive."""
    parts, rest = live_by_part(optimizer)
    lines = ["live then: " + ", ".join(f"{name} {size / GIB:.3f} GiB" for name, size in parts.items() if size)]
    if device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        capacity = torch.cuda.get_device_properties(device).total_memory
        lines.append(f"allocated {allocated / GIB:.2f}, reserved {reserved / GIB:.2f} of {capacity / GIB:.2f} GiB")
        if reserved - allocated > FRAGMENTED * capacity:
            lines.append("fragmented (reserved far above allocated): PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    state = sum(size for name, size in parts.items() if name != OTHERS)
    if parts[OTHERS] > state:
        lines.append("gathered units and activations, not shards of parameters, take the most")
    lines += extra_copies(model, rest)
    segments = torch.cuda.memory_snapshot() if device.type == "cuda" else []  # of the allocator
    largest = [{"bytes": size, "tensor": shape} for size, shape in rest[:LARGEST]]
    snapshot = json.dumps({"parts": parts, "largest": largest, "segments": segments}, default=str)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(snapshot, encoding="utf-8")
        lines.append(f"memory snapshot: {path}")
    except OSError as problem:
        lines.append(f"no memory snapshot could be written: {problem}")
    return lines


def explain_out_of_memory(
    error: BaseException,
    place: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    *,
    rank: int,
    say: Callable[[str], object],
) -> list[str]:
    """Lines on an out-of-memory error of a run whose folder this is: place, what was live, the next knobs.

    `say` gets what is known at once; the predictions take the planner some seconds.
    """
    device, path = next(model.parameters()).device, folder / f"out_of_memory-rank-{rank}.json"
    lines = [f"out of memory in {place} ({first_line(error)})", *describe_memory(model, optimizer, device, path)]
    traceback.clear_frames(error.__traceback__)
    say("\n".join(lines))
    try:
        knobs = [f"next: {knob}" for knob in next_knobs(place.split(":")[0], request_of_run(folder))]
    except (ValueError, KeyError, OSError) as problem:  # run.json could not be written, say
        knobs = [f"next knobs are not known: {type(problem).__name__}: {problem}"]
    return [*lines, *knobs]
