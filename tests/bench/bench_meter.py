"""What one training step does: its collectives, their bytes, and the most bytes of tensors that lived at once."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMES = {"gather": "gathers", "reduce_scatter": "scatters", "reduce": "reduces"}  # the first that occurs in the name


class StepMeter(TorchDispatchMode):
    """Counts while it is on. `held` are the tensors that the run keeps between steps (weights, optimizer state).

    Bytes of a collective are those of its larger side. Live bytes are those of the storages that operations have seen
    and that are not freed; what a kernel allocates for itself is not in them. Storages that FSDP2 resizes to nothing
    count as nothing. The step itself is several times slower.
    """

    def __init__(self, held: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref] = {}
        self.peak_bytes = 0
        self.collectives = {name: [0, 0] for name in NAMES.values()}  # number, bytes
        for tensor in held:
            self.note(tensor.to_local() if isinstance(tensor, DTensor) else tensor)

    def note(self, tensor: torch.Tensor) -> None:
        """Keep an eye on a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self.storages:
            self.storages[key] = weakref.ref(storage, lambda _: self.storages.pop(key, None))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operations on its shards come by as well
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            self.note(tensor)
        live = [storage() for storage in list(self.storages.values())]
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in live if storage is not None))
        if "c10d" in func.namespace and tensors:
            name = next((NAMES[word] for word in NAMES if word in func._schema.name), None)
            if name is not None:
                self.collectives[name][0] += 1
                self.collectives[name][1] += max(tensor.nbytes for tensor in tensors)
        return out

    def read(self) -> dict[str, Any]:
        """What was counted, as plain data."""
        return {"peak_bytes": self.peak_bytes, "collectives": self.collectives}
