"""torch's private names, but for those of tools/private_torch.py. tests/test_private.py fails where one moves."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Group:
    """Parameters that FSDP2 gathers together, as it holds them now."""

    modules: tuple[nn.Module, ...]
    parameters: list[nn.Parameter]
    reshards_after_forward: bool
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy


def fsdp_groups(model: nn.Module) -> list[Group]:
    """FSDP2's groups, those of the last module first. Public way looked for: FSDPModule sets all of this and tells none
    of it; DTensor.placements knows of no group."""
    modules = [module for module in reversed(list(model.modules())) if isinstance(module, FSDPModule)]
    states = dict.fromkeys(module._get_fsdp_state() for module in modules)  # modules of one group share a state
    groups = [group for state in states for group in state._fsdp_param_groups]
    infos = [[parameter._module_info for parameter in group.fsdp_params] for group in groups]
    held = [[getattr(info.module, info.param_name) for info in one] for one in infos]
    reshards = [group.post_forward_mesh_info is not None for group in groups]
    return [Group(g.modules, p, r, g.mp_policy, g.offload_policy) for g, p, r in zip(groups, held, reshards)]


def set_shard(tensor: DTensor, shard: torch.Tensor) -> None:
    """Replace this rank's shard, wherever the new one lies. Public way looked for: DTensor.from_local moves it to the
    mesh's device; `to_local().data = shard` leaves a fake tensor's device as it was."""
    tensor._local_tensor = shard


def attention_operators() -> list[Any]:
    """What scaled_dot_product_attention runs, the CPU's last. Public way looked for: flop_registry of
    torch.utils.flop_counter has those of GPUs, among others, and not the CPU's."""
    kinds = ("efficient_attention", "flash_attention", "cudnn_attention", "flash_attention_for_cpu")
    return [getattr(torch.ops.aten, f"_scaled_dot_product_{kind}") for kind in kinds]
