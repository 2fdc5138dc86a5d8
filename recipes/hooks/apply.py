"""The order in which hooks touch a model, written once: scripts, proof, planner and tests call this.

Build the model and add its adapters first; then recompute, compile, wrap, stored dtypes, here; then read its weights,
if it has none yet; then make the optimizer, before any forward, and hand both to `accelerator.prepare`. Compiled code
must hold a block's recompute and lie inside its FSDP unit; only what is sharded already is cast, a slice at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .activation_checkpointing import apply_activation_checkpointing, plan_activation_checkpointing
from .config import HookConfig
from .dtypes import cast_buffers, cast_stored_parameters
from .wrap import Policies, Unit, apply_units, plan_units


@dataclass(frozen=True)
class HookPlan:
    """What the YAML decides for a model, as plain data: its units, inner ones first, and the blocks that recompute."""

    units: list[Unit]
    recomputed: list[str]


def plan_hooks(model: nn.Module, config: HookConfig) -> HookPlan:
    """Names only; works on a meta-device model. Raises ValueError where a key matches nothing in this model."""
    return HookPlan(plan_units(model, config), plan_activation_checkpointing(model, config))


def apply_hooks(
    model: nn.Module,
    plan: HookPlan,
    config: HookConfig,
    mesh: DeviceMesh,
    policies: Policies,
    *,
    compile_blocks: Callable[[nn.Module], None] | None = None,
    frozen_dtype: torch.dtype | None = None,
    is_cpu: bool | None = None,
) -> nn.Module:
    """Carry a plan out, in place; returns the model, which is sharded then.

    `policies`: utils.precision_policies. `compile_blocks` compiles blocks in place. `frozen_dtype`: of weights that are
    not trained, unless they keep their own; the compute dtype if None. `is_cpu`: whether activations are in host memory
    anyway; the mesh tells unless it is said.
    """
    is_cpu = mesh.device_type == "cpu" if is_cpu is None else is_cpu
    apply_activation_checkpointing(model, plan.recomputed, config, is_cpu)
    if compile_blocks is not None:
        compile_blocks(model)
    apply_units(model, plan.units, config, mesh, policies)
    cast_stored_parameters(model, config, frozen_dtype)
    cast_buffers(model, config)
    return model
