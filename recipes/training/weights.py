"""A model's weights, read after the wrapping: each rank reads its own slices of the files into its own shards.

The model is built on the meta device, without memory: adapters, hooks and the wrap plan need shapes alone. Files that
hold a tensor in another shape are refused before anything is allocated, those that lack one before any is read. Then, a
block at a time, each rank reads what its shards hold from the memory-mapped files, onto the shards' device and into the
dtype that they are stored in. Where a slice of the model's tensor is none of the files' (a family splits or transposes
them, or joins them along the dim that is cut), the whole is read, of a block at a time, and cut.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from filelock import FileLock
from hooks.private_transformers import conversion_of, keeps_slices, load_tensors, read_whole
from hooks.wrap import local
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.utils import logging

from .launch import one_rank_at_a_time

ROWS_AT_ONCE = 4096  # of two tensors that are compared
Place = tuple[nn.Module, str]  # a module, and the name of its parameter or buffer


class Weights:
    """The files of a model that is built without memory, and where their tensors belong.

    Of files that are not safetensors nothing is held: the model is loaded whole, by the ranks of a machine in turn.
    """

    def __init__(self) -> None:
        self.slices: dict[str, Any] = {}  # of safetensors: by their names in the files, nothing read
        self.load_config: Any = None  # transformers' own: how names and tensors are converted
        self.lock: FileLock | None = None  # held while it is this rank's turn
        self.as_built: nn.Module | None = None  # a copy without memory: the model as the files know it
        self.places: dict[str, Place] = {}  # by their names there

    def take_turn(self) -> None:
        """Wait until no other rank of this machine loads."""
        self.lock = self.lock or one_rank_at_a_time()
        self.lock.acquire()

    def end_turn(self) -> None:
        """Let the next rank load, if it was this one's turn."""
        if self.lock is not None:
            self.lock.release(force=True)

    def open(
        self,
        model: nn.Module,
        state_dict: Any,
        checkpoint_files: list[str] | None,
        load_config: Any,
        expected_keys: list[str] | None = None,
    ) -> tuple[Any, Any]:
        """What from_pretrained calls in place of reading: open the files, and compare names and shapes."""
        if self.load_config is not None:
            raise ValueError("it holds a model and an adapter (adapter_config.json): merge them first, or move one")
        self.load_config = load_config
        if not checkpoint_files or not all(file.endswith(".safetensors") for file in checkpoint_files):
            self.take_turn()  # each makes a private copy of all of it
            return read_whole(model, state_dict, checkpoint_files, load_config, expected_keys)
        for file in checkpoint_files:
            opened = safe_open(file, framework="pt")
            self.slices |= {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118 (it is no dict)
        self.drop_copies(model)
        shapes = {key: torch.empty(found.get_shape(), device="meta") for key, found in self.slices.items()}
        with without_progress_bars():
            info = load_tensors(model, shapes, load_config, "meta")
        for name, found, wanted in sorted(info.mismatched_keys):
            raise ValueError(f"{name} is {list(found)} in its files and {list(wanted)} in the model of its config.json")
        return info, None

    def drop_copies(self, model: nn.Module) -> None:
        """Where the files hold both of two tied tensors, leave one out; if they differ, untie them, as transformers
        does."""
        names = model.state_dict()
        keys = {conversion_of(key, model, names, self.load_config)[0]: key for key in self.slices}
        for tied, source in list(model.all_tied_weights_keys.items()):
            if tied in keys and source in keys:
                if is_equal(self.slices[keys[tied]], self.slices[keys[source]]):
                    del self.slices[keys[tied]]
                else:
                    del model.all_tied_weights_keys[tied]

    def remember(self, model: nn.Module) -> None:
        """Note where each tensor belongs, before adapters and hooks rename what holds it."""
        self.as_built = copy.deepcopy(model)
        self.places = {name: place_of(model, name) for name in model.state_dict()}

    @torch.no_grad()
    def fill(self, device: torch.device, is_offloaded: bool) -> None:
        """Read this rank's slices into the model, sharded by now, onto a device; offloaded parameters into host memory.

        Raises:
            ValueError: a tensor cannot be converted to what the model holds.
        """
        if self.as_built is None:  # it was loaded whole
            return
        holders = defaultdict(list)  # of tied parameters
        for place in self.places.values():
            holders[getattr(*place)].append(place)
        pieces = logging.tqdm(self.pieces(), desc="Loading weights")
        with without_progress_bars():  # of each piece
            for piece in pieces:
                for name, part in self.read(piece, device):
                    put(part, holders[getattr(*self.places[name])], device, is_offloaded)
        for places in holders.values():
            left = local(getattr(*places[0]))
            if left.is_meta:  # more ranks than rows: this one has read nothing
                put(torch.empty(0, *left.shape[1:]), places, device, is_offloaded)

    def pieces(self) -> list[dict[str, Any]]:
        """The tensors of the files that the model has, a block's together: what a family merges lies in one block. A
        tensor of which a slice can be read is sharded in the model as built as it is in the model."""
        names = self.as_built.state_dict()
        pieces: dict[str, dict[str, Any]] = defaultdict(dict)
        for key, found in self.slices.items():
            name, operations = conversion_of(key, self.as_built, names, self.load_config)
            if name not in names:
                continue
            shard = getattr(*self.places[name])
            if isinstance(shard, DTensor) and all(keeps_slices(op, shard.placements[0].dim) for op in operations):
                if not local(shard).numel():  # more ranks than rows
                    continue
                module, attribute = place_of(self.as_built, name)
                setattr(module, attribute, nn.Parameter(shard.detach().to(names[name].dtype), False))
            block = re.match(r".*?\.\d+\.", key)
            pieces[block[0] if block else ""][key] = found
        return list(pieces.values())

    def read(self, piece: dict[str, Any], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name in the model as built, what this rank holds of it), in the dtype that it was built in."""
        before = self.as_built.state_dict(keep_vars=True)
        info = load_tensors(self.as_built, piece, self.load_config, device)
        wrong = [*info.mismatched_keys, *info.conversion_errors.items(), *info.error_msgs]
        if wrong:
            raise ValueError(f"weights could not be converted: {wrong[0]}")
        found = {n: t for n, t in self.as_built.state_dict(keep_vars=True).items() if t is not before[n]}
        for name in found:
            setattr(*place_of(self.as_built, name), before[name])
        while found:  # each is let go of before the next one is copied
            name, tensor = found.popitem()
            own = local(tensor) if isinstance(tensor, DTensor) else own_slice(tensor, getattr(*self.places[name]))
            del tensor
            yield name, own


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Inside, transformers shows none."""
    shows_them = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows_them:
            logging.enable_progress_bar()


def place_of(model: nn.Module, name: str) -> Place:
    """The module that a parameter or buffer is in, and what it is called there."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def put(part: torch.Tensor, places: list[Place], device: torch.device, is_offloaded: bool) -> None:
    """Fill what a rank holds of a tensor on the meta device, in the dtype that it has there."""
    old = getattr(*places[0])
    is_parameter = isinstance(old, nn.Parameter)
    new = torch.empty_like(old.detach(), device="cpu" if is_offloaded and is_parameter else device)
    local(new).copy_(part)
    new = nn.Parameter(new, old.requires_grad) if is_parameter else new
    for place in places:
        setattr(*place, new)


def own_slice(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that is sharded like another."""
    if not isinstance(like, DTensor):
        return whole
    dim, rank = like.placements[0].dim, like.device_mesh.get_local_rank()
    slices = whole.chunk(like.device_mesh.size(), dim)
    return slices[rank] if rank < len(slices) else whole.narrow(dim, 0, 0)


def is_equal(one: Any, other: Any) -> bool:
    """Whether two tensors of files hold the same; some rows of them are read at a time."""
    if one.get_shape() != other.get_shape():
        return False
    starts = range(0, one.get_shape()[0], ROWS_AT_ONCE)
    return all(torch.equal(one[i : i + ROWS_AT_ONCE], other[i : i + ROWS_AT_ONCE]) for i in starts)
