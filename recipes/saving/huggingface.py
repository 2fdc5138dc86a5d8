"""The live model as a Hugging Face folder, a block of it at a time; export.py writes its files in the same way.

A block is what lies under one number in the names of weights, as in model.layers.7: what a family merges on load, such
as experts, lies in one. What lies under none (embedding, last norm, head) is one block too.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .checkpoint import CheckpointWriter
from .private_transformers import as_on_disk, never_saved

FILE_BYTES = 5 * 10**9  # of weights; rank 0 holds as many


def export_model(
    writer: CheckpointWriter,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype,
    loaded: Path | None = None,
) -> None:
    """Write the live model (or, for LoRA, the adapter alone) so that plain transformers / peft loads it.

    `loaded`: the checkpoint that the live weights were loaded from at the end, if any. A collective.

    Raises:
        ValueError: on every rank, where rank 0 could not write. It names a checkpoint of these weights, written now
            if there was none, and the command that makes the folder of it.
    """
    if failure := write_folder(writer.live.model, tokenizer, folder, dtype, writer.group):
        raise ValueError(f"{folder} could not be written: {failure}. {writer.keep(loaded)}")


def write_folder(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
) -> str:
    """Write weights, cast to `dtype` (an adapter stays fp32), beside config and tokenizer; returns "" or, on every
    rank, why rank 0 could not.

    The ranks gather a block at a time. Rank 0 holds what goes into one file, and a block of `dtype` twice (gathering
    copies, and so does taking experts apart): of fp32 masters exported in bf16 that is a file and a block. Tied weights
    are stored once. What the config says goes with it: switch on first what training has switched off (use_cache). The
    folder appears when it is complete. In `group` the ranks wait for rank 0's disk. A collective.
    """
    is_adapter = hasattr(model, "peft_config")
    weights = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=is_adapter))  # shards
    for name in set() if is_adapter else left_out(model):
        weights.pop(name, None)
    pieces, failure = gathered(weights, None if is_adapter else dtype, group), [""]
    if dist.get_rank() == 0:
        incomplete, sharded_class = folder.with_name(folder.name + ".incomplete"), type(model)
        try:
            shutil.rmtree(incomplete, ignore_errors=True)
            if is_adapter:
                adapter = {name: tensor for piece in pieces for name, tensor in piece.items()}
                model.save_pretrained(incomplete, state_dict=adapter)
            else:
                # As its own class: a hub model's code is saved, under its name.
                model.__class__ = next(kind for kind in sharded_class.__mro__ if not issubclass(kind, FSDPModule))
                model.save_pretrained(incomplete, state_dict={})  # all but the weights
                model.config.dtype = dtype  # that was the dtype of the fp32 masters
                model.config.save_pretrained(incomplete)
                write_weights(on_disk(model, pieces), incomplete, FILE_BYTES)
            tokenizer.save_pretrained(incomplete)
            if folder.exists():
                shutil.rmtree(folder)
            incomplete.rename(folder)
        except (Exception, SystemExit) as error:
            shutil.rmtree(incomplete, ignore_errors=True)
            failure = [f"{type(error).__name__}: {error}"]
        finally:
            model.__class__ = sharded_class
    for _ in pieces:  # also of a rank 0 that cannot write: the others would wait for it in a gather
        pass
    dist.broadcast_object_list(failure, group=group)
    return failure[0]


def gathered(
    weights: dict[str, torch.Tensor], dtype: torch.dtype | None, group: dist.ProcessGroup
) -> Iterator[dict[str, torch.Tensor]]:
    """Sharded weights, whole, a block at a time: on rank 0 in host memory, elsewhere {}.

    Each step is a collective in FSDP's own group; in `group` the ranks first wait for one that writes.
    """
    for names in blocks(weights):
        dist.barrier(group=group)
        piece = {}
        for name in names:
            tensor = whole(weights[name], dtype)
            if dist.get_rank() == 0:
                piece[name] = tensor.cpu()
            del tensor  # before the next one
        yield piece


def left_out(model: nn.Module) -> set[str]:
    """Names that no file of a whole model holds: of a tied weight all but one."""
    return {*(getattr(model, "all_tied_weights_keys", None) or ()), *never_saved(model)}


def whole(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A sharded tensor gathered on every rank, cast first, which halves what is sent: a collective. Integers are not
    cast, and a plain tensor is whole already."""
    value = value.detach()
    if dtype is not None and value.is_floating_point():
        value = value.to(dtype)
    if not isinstance(value, DTensor):
        return value
    if value.device.type != value.device_mesh.device_type:  # an offloaded one, which NCCL cannot send
        value = value.to(value.device_mesh.device_type)
    return value.full_tensor()


def blocks(names: Iterable[str]) -> list[list[str]]:
    """The names of each block."""
    pieces: dict[str, list[str]] = {}
    for name in names:
        block = re.match(r".*?\.\d+\.", name)
        pieces.setdefault(block[0] if block else "", []).append(name)
    return list(pieces.values())


def on_disk(model: nn.Module, pieces: Iterator[dict[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of blocks as the family's files have them, and under their names there. It lets go of each."""
    for piece in pieces:
        tensors = dict(as_on_disk(model, piece))
        piece.clear()
        while tensors:
            name = next(iter(tensors))
            yield name, tensors.pop(name)


def write_weights(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, limit: int) -> None:
    """Write tensors as they come, in files of at most `limit` bytes, with the index that names each one's file."""
    files: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    size = total = 0

    def write() -> None:
        save_file(held, folder / f"part-{len(files)}", metadata={"format": "pt"})
        files.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > limit:
            write()
            size = 0
        is_part = tensor.untyped_storage().nbytes() > tensor.nbytes  # it would keep the whole of it alive
        tensor = tensor.clone(memory_format=torch.contiguous_format) if is_part else tensor.contiguous()
        held[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    write()
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    names = [SAFE_WEIGHTS_NAME] if len(files) == 1 else names
    for i, name in enumerate(names):
        (folder / f"part-{i}").rename(folder / name)
    if len(files) > 1:
        index = {n: name for name, held_names in zip(names, files) for n in held_names}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2, sort_keys=True)
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text + "\n", encoding="utf-8")
