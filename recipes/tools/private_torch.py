"""torch's private names that only tools need, and no copied recipe has. tests/test_private.py fails where one moves."""

from typing import Any

import torch
from hooks.private_torch import attention_operators
from torch._subclasses import fake_tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils import _python_dispatch

# A mode that sees operators. Public way looked for: torch.overrides.TorchFunctionMode sees calls, and none in backward.
OperatorMode = _python_dispatch.TorchDispatchMode
# Raised where the values of fake tensors are needed. Public way looked for: nothing else tells it from a RuntimeError.
NEEDS_VALUES = (fake_tensor.DynamicOutputShapeException, fake_tensor.DataDependentOutputException)
# Operators, which have no other names. Public way looked for: flop_registry of torch.utils.flop_counter lacks them.
ATTENTION = attention_operators()[-1]  # the CPU's
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
GROUPED_MATMUL = torch.ops.aten._grouped_mm
ALL_REDUCES = ("c10d.allreduce", "_c10d_functional.all_reduce")  # how their names begin
ALL_GATHER, REDUCE_SCATTER = torch.ops.c10d._allgather_base_.default, torch.ops.c10d._reduce_scatter_base_.default
# (class, method) by which FSDP2 makes whole parameters, begins a unit, reduces its gradients. Public way looked for:
# hooks of modules run before or after all of it; set_custom_all_gather sees buffers, not what is copied out of them.
ALLOCATES = _fsdp_param.FSDPParam, "init_all_gather_outputs"
BEGINS = tuple((_fsdp_param_group.FSDPParamGroup, name) for name in ("pre_forward", "pre_backward"))
REDUCES = _fsdp_param_group.FSDPParamGroup, "post_backward"
# Where DTensor runs operators of whole shape to learn theirs. Public way looked for: to an OperatorMode they look real.
PROPAGATES = ShardingPropagator, "_propagate_tensor_meta_non_cached"


def fake_tensors() -> fake_tensor.FakeTensorMode:
    """Inside, tensors have no memory. Public way looked for: meta tensors do not say where they would lie."""
    return fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)


def unit_name(group: Any) -> str:
    """The module of what BEGINS and REDUCES work on. Public way looked for: as for these."""
    return group._module_fqn or "root"


def gathered(parameter: Any) -> list[torch.Tensor]:
    """What ALLOCATES made. Public way looked for: as for it."""
    return parameter.all_gather_outputs


def gradients(group: Any) -> list[tuple[torch.Tensor | None, ...]]:
    """Of each parameter: of this backward, kept unreduced, the shard's. Public way looked for: as for REDUCES."""
    found = [(getattr(p, "_unsharded_param", None), p) for p in group.fsdp_params]  # None before the first gather
    return [(getattr(w, "grad", None), p.unsharded_accumulated_grad, p.sharded_param.grad) for w, p in found]
