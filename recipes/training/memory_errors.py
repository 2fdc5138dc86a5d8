"""Errors that say that there is no memory left."""

import torch
import torch.distributed as dist
from accelerate.utils.memory import should_reduce_batch_size


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left, in the words of torch, CUDA's libraries, Triton or Python.

    Not NCCL's own: whether that collective was sent is not known.
    """
    if isinstance(error, dist.DistBackendError):
        return False
    is_named = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or should_reduce_batch_size(error)
    return is_named or "out of memory" in str(error).lower() or "ALLOC_FAILED" in str(error)


def first_line(error: BaseException) -> str:
    """What an error says, without the allocator's statistics after it."""
    return str(error).partition("\n")[0].partition(" GPU ")[0][:200]
