"""The bf16 policy, gradient clipping and the step's one wait for the device, used by every training script.

No autocast anywhere: FSDP2's policy alone sets the compute dtype, so a recomputed block sees the same dtypes as its
forward. The loss is computed in fp32 by `training/losses.py`.
"""

import torch
from accelerate import Accelerator
from hooks.config import HookConfig
from hooks.dtypes import DTYPES
from hooks.wrap import Policies
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor


def precision_policies(config: HookConfig) -> Policies:
    """Return FSDP2's dtypes for the units and for the unit that holds norms in fp32.

    `output_dtype` stays None: Accelerate's default casts the root's output and so rounds a returned loss to bf16.
    Inputs are not cast: hidden states have the weights' dtype by themselves, and FSDP2's default would round what a
    model hands to its blocks in fp32 on purpose (a residual stream, attention scales, position biases). Norms in fp32
    hand the other units' dtype out, else the next matmul would see two dtypes.
    """
    compute, reduce = DTYPES[config.hook_param_dtype], DTYPES[config.hook_reduce_dtype]
    return Policies(
        units=MixedPrecisionPolicy(compute, reduce, cast_forward_inputs=False),
        norms=MixedPrecisionPolicy(torch.float32, torch.float32, output_dtype=compute),
    )


def clip_grad_norm(accelerator: Accelerator, model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip all gradients by their global L2 norm over ranks and return the norm before clipping, the same on all ranks.

    Under fp16 the gradients are unscaled first.
    """
    # model.parameters() as it is: Accelerate compares this list with its own to find the sharded path.
    norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def read_together(*values: torch.Tensor) -> list[float]:
    """The numbers in these tensors, one after the other; integers stay such. The CPU waits for the device, once."""
    flat = [value.detach().flatten() for value in values]
    numbers = torch.cat([value.to(flat[0].device, torch.float64) for value in flat]).tolist()  # exact below 2**53
    is_whole = [not value.is_floating_point() for value in flat for _ in range(len(value))]
    return [int(number) if whole else number for number, whole in zip(numbers, is_whole)]
