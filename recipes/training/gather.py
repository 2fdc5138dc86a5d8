"""What every rank holds, on every rank."""

from typing import Any

import torch.distributed as dist

from .launch import control_group


def gather(own: Any) -> list[Any]:
    """What each rank has given, in their order. Waits for them in host memory, as long as they need. A collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own, group=control_group())
    return found
