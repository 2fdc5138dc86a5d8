"""What a fake process group is asked to gather of a model, without memory for it."""

import contextlib
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist
from hook_cases import CONFIG
from hooks import wrap
from hooks.live import build_report, padding_notes, read_units
from tools.planner.as_on_gpu import leave_meta
from tools.private_torch import ALL_GATHER, OperatorMode, fake_tensors
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy


class Gathers(OperatorMode):
    """Counts the elements of what is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ALL_GATHER:
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def gathered(build: Callable[[], nn.Module], ranks: int, rank: int = 0, along_dim_0: bool = False) -> dict:
    """Wrap a model of the meta device by block on one of so many ranks, and gather its first block.

    {block, sent: elements of the first block, and what was gathered for it; held: this rank's; report:
    wrap_report.json; notes: on its padding}.
    `along_dim_0`: every parameter is cut there, as FSDP2 does by itself.
    """
    naive = mock.patch.object(wrap, "placement_of", lambda shape, num_shards: None)
    dist.init_process_group("fake", rank=rank, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        with torch.device("meta"):
            model = build()
        with fake_tensors(), naive if along_dim_0 else contextlib.nullcontext():
            leave_meta(model)
            units = wrap.plan_units(model, CONFIG)
            whole = sum(p.numel() for p in model.get_submodule(units[0].modules[0]).parameters())
            policies = wrap.Policies(MixedPrecisionPolicy(), MixedPrecisionPolicy())
            wrap.apply_units(model, units, CONFIG, mesh, policies)
            live, notes = read_units(model), padding_notes(model)
            with Gathers() as seen:
                model.get_submodule(units[0].modules[0]).unshard()
        held = sum(unit["parameters_on_this_rank"] for unit in live)
        found = {"block": whole, "sent": seen.elements, "held": held, "report": build_report(live, [], 1, {})}
        return found | {"notes": notes}
    finally:
        dist.destroy_process_group()
