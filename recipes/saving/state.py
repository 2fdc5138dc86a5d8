"""What a training run is at a step: its sharded tensors, its random generators, and what identifies it."""

import hashlib
import json
import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
import torch.distributed as dist
from accelerate import Accelerator
from datasets import Dataset
from safetensors import safe_open
from safetensors.torch import save
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from .folder import patient_group


@dataclass
class LiveState:
    """What a checkpoint is of. `state`: folder.START's names, and what else its manifest says of now."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer  # Accelerate's, around the one that holds the state
    scheduler: torch.optim.lr_scheduler.LRScheduler
    state: dict[str, Any]

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """To wait in for ranks that read unequal shares. A collective at first."""
        return patient_group()


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element


def training_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, copies: bool = False
) -> dict[str, dict[str, torch.Tensor]]:
    """{"model": {...}, "optimizer": {...}} of sharded tensors by name: the live ones, or copies in host memory.

    Of a model with adapters only what is trained. A tied weight appears once.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # inside of Accelerate's
    options = StateDictOptions(ignore_frozen_params=hasattr(model, "peft_config"), flatten_optimizer_state_dict=True)
    weights = get_model_state_dict(model, options=options)
    once = dict(model.named_parameters()).keys()
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    weights = {name: value for name, value in weights.items() if name not in tied}
    is_fresh = not optimizer.state
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    for state in optimizer.state.values() if is_fresh else ():
        state["step"].zero_()  # torch made the state with a step of zero gradients, which must not count
    # Learning rate, betas and so on are what the arguments say, not state.
    moments = {name: in_full(value) for name, value in optimizer_state.items() if name.startswith("state.")}
    tensors = {"model": weights, "optimizer": moments}
    if copies:
        tensors = {
            kind: {n: t.clone() if t.device.type == "cpu" else t.cpu() for n, t in held.items()}
            for kind, held in tensors.items()
        }
    return tensors


def in_full(value: torch.Tensor) -> torch.Tensor:
    """Optimizer state as it is, but a full-precision copy of what torchao keeps in 8 bits: files hold plain tensors.

    In 8 bits a block's scale is its largest value, and -0.99 of it stands for a largest value that is negative. There
    the copy holds the scale itself, so that the same bits come of it.
    """
    shard = value.to_local() if isinstance(value, DTensor) else value
    if not hasattr(shard, "codes"):
        return value
    full = shard.dequantize()
    blocks = full.view(len(shard.scale), -1)
    lowest, values = blocks.argmin(1, keepdim=True), blocks.amin(1, keepdim=True)
    is_scale = (blocks.amax(1, keepdim=True) < shard.scale[:, None]) & (values < 0)
    blocks.scatter_(1, lowest, torch.where(is_scale, -shard.scale[:, None], values))
    options = {"run_check": False, "shape": value.shape, "stride": value.stride()}
    return DTensor.from_local(full, value.device_mesh, value.placements, **options)


def take_quantized(model: nn.Module, optimizer: torch.optim.Optimizer, loaded: dict[str, torch.Tensor]) -> None:
    """Write the copies that in_full made, once they are loaded, back into the 8-bit state: the same bits as saved."""
    options = StateDictOptions(ignore_frozen_params=hasattr(model, "peft_config"), flatten_optimizer_state_dict=True)
    optimizer = getattr(optimizer, "optimizer", optimizer)
    for name, value in get_optimizer_state_dict(model, optimizer, options=options).items():
        if isinstance(value, DTensor) and hasattr(value.to_local(), "codes"):
            value.to_local().copy_(loaded[name].to_local())


def random_state(device: torch.device) -> bytes:
    """This rank's random generators (torch on both devices, numpy, Python) as one safetensors file."""
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = getattr(torch, device.type).get_rng_state(device)
    kind, keys, *rest = np.random.get_state()
    others = {"python": random.getstate(), "numpy": (kind, keys.tolist(), *rest)}
    return save(states, metadata={name: json.dumps(value) for name, value in others.items()})


def set_random_state(file: str, device: torch.device) -> None:
    """Put back what random_state wrote; of another device type, what this one has."""
    with safe_open(file, framework="pt") as states:
        tensors = {name: states.get_tensor(name) for name in states.keys()}  # noqa: SIM118 (it is no dict)
        others = {name: json.loads(text) for name, text in states.metadata().items()}
    torch.set_rng_state(tensors["cpu"])
    if device.type != "cpu" and device.type in tensors:
        getattr(torch, device.type).set_rng_state(tensors[device.type], device)
    version, numbers, gauss = others["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = others["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def data_hash(rows: Dataset) -> str:
    """Identifies token rows, their labels and their order: the same for the same rows, wherever they came from."""
    digest = hashlib.sha256()
    for table in rows.select_columns(["input_ids", "labels"]).with_format("arrow").iter(batch_size=10_000):
        for column in table.columns:
            digest.update(np.ascontiguousarray(pc.list_value_length(column), dtype=np.int64))
            digest.update(np.ascontiguousarray(pc.list_flatten(column), dtype=np.int64))
    return digest.hexdigest()


def frozen_checksum(model: nn.Module) -> dict[str, int]:
    """{dtype: checksum} of the weights that are not trained, so not saved; the same on any number of ranks. A
    collective."""
    sums: dict[str, torch.Tensor] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            continue
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not isinstance(parameter, DTensor) and dist.get_rank() > 0:
            local = local[:0]  # whole on every rank: count it once
        dtype = str(parameter.dtype).removeprefix("torch.")
        sums[dtype] = sums.get(dtype, 0) + checksum(local)
    for value in sums.values():
        dist.all_reduce(value)
    return {dtype: value.item() for dtype, value in sums.items()}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's bits as integers. It wraps around and knows no order, so that the sums of shards, or of
    the parts that a family's files hold, add up to that of the whole."""
    return tensor.detach().contiguous().view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
