"""fp16's loss scaler in ranks on a CPU (in_process.py), put where Accelerate puts it on a GPU.

torch's scaler takes CPU tensors too; Accelerate makes it for device types only, and the scripts refuse fp16 on a CPU.
All else is the scripts' own code, whatever dtype the YAML computes in: scaling does not depend on it.
"""

import dataclasses

import finetune
import torch.distributed as dist
from accelerate.utils.fsdp_utils import get_fsdp2_grad_scaler
from hooks.config import HookConfig
from training import launch, non_finite


def use_scaler(
    growth_interval: int = 2000,
    limit: int = non_finite.MAX_SKIPPED_STEPS,
    infinite: tuple[int, ...] = (),
    nan: tuple[int, ...] = (),
) -> None:
    """Give this rank a loss scaler.

    `growth_interval`: good steps after which the scale doubles; `limit`: of steps skipped in a row; `infinite`, `nan`:
    steps in which a gradient of the last rank's slice, or its loss, is not finite.
    """
    own, clip, micro_batch_loss, steps = launch.Accelerator, finetune.clip_grad_norm, finetune.micro_batch_loss, []

    def with_scaler(*args, **kwargs):
        made = own(*args, **kwargs)
        made.state._mixed_precision, made.native_amp = "fp16", True  # clipping then unscales first
        options = made.scaler_handler.to_kwargs()
        made.scaler = get_fsdp2_grad_scaler(device="cpu", growth_interval=growth_interval, **options)
        return made

    def is_at_fault(faulty):
        return len(steps) + 1 in faulty and dist.get_rank() == dist.get_world_size() - 1

    def clip_grad_norm(accelerator, model, max_norm):
        if is_at_fault(infinite):
            next(model.parameters()).grad.to_local().view(-1)[0] = float("inf")
        norm = clip(accelerator, model, max_norm)
        steps.append(norm)
        return norm

    def with_nan(*args):
        factor = float("nan") if is_at_fault(nan) else 1.0
        return tuple(value * factor for value in micro_batch_loss(*args))

    launch.check_device_dtype = lambda *_: None
    use_plain_optimizer()
    launch.Accelerator, finetune.clip_grad_norm, finetune.micro_batch_loss = with_scaler, clip_grad_norm, with_nan
    non_finite.MAX_SKIPPED_STEPS = limit


def use_plain_optimizer() -> None:
    """The optimizer of a run with a scaler, without one: it is not fused, which rounds otherwise."""
    make = finetune.make_optimizer
    finetune.make_optimizer = lambda model, arguments, config: make(model, arguments, in_fp16(config))


def in_fp16(config: HookConfig) -> HookConfig:
    """The keys of a run that has a scaler."""
    return dataclasses.replace(config, mixed_precision="fp16")
