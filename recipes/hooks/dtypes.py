"""The dtypes that a YAML names, on this device, and in which parameters and buffers are stored."""

import torch
from torch import nn
from torch.utils.benchmark import Timer

from .config import HookConfig
from .structure import is_norm, kept_in_fp32

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EMULATED = 2.0  # times fp32: a dtype that the device has instructions for costs less than fp32, one it lacks 5 to 15


def check_device_dtype(config: HookConfig, device: torch.device) -> None:
    """Raise ValueError where this device cannot compute in the YAML's dtype, naming the dtype to use instead."""
    if config.hook_param_dtype == "fp16" and device.type == "cpu":
        raise ValueError(f"{config.path}: fp16 is for GPUs; on a CPU set mixed_precision: bf16 (or 'no' for fp32).")
    if config.hook_param_dtype == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"{config.path}: {name} has no bf16; set mixed_precision: fp16 (a loss scaler is used).")


def cost_beside_fp32(dtype: torch.dtype, device: torch.device) -> float:
    """How many times as long as in fp32 a matrix product and its gradients take in this dtype: measured, on one thread
    in about 0.2 s."""

    def seconds(dtype: torch.dtype) -> float:
        left, right, gradient = (torch.ones(256, 256, dtype=dtype, device=device) for _ in range(3))
        names = {"left": left.requires_grad_(), "right": right.requires_grad_(), "gradient": gradient}
        timer = Timer("torch.autograd.grad(left @ right, (left, right), gradient)", "import torch", globals=names)
        return timer.blocked_autorange(min_run_time=0.05).median

    return seconds(dtype) / seconds(torch.float32)


def cast_stored_parameters(model: nn.Module, config: HookConfig, frozen_dtype: torch.dtype | None = None) -> None:
    """Cast each rank's shards: trainable ones to fp32 masters, frozen ones to the dtype they compute in.

    After wrapping, so that only slices are copied; before the optimizer is made and before any forward. In bf16 an
    AdamW step of 1e-5 on a weight of 1.0 is rounded away; a frozen weight is only ever read in the compute dtype.
    Frozen norms of an fp32 norm unit, and what the model keeps in fp32, keep the dtype they were loaded in.
    """
    kept = {module for name in kept_in_fp32(model)[0] for module in model.get_submodule(name).modules()}
    compute_dtype = frozen_dtype or DTYPES[config.hook_param_dtype]
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        keeps_dtype = module in kept or (config.hook_norm_dtype is not None and is_norm(module))
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_floating_point():
                continue
            if parameter not in replaced:
                dtype = torch.float32 if parameter.requires_grad else compute_dtype
                dtype = parameter.dtype if keeps_dtype and not parameter.requires_grad else dtype
                cast = parameter.detach().to(dtype)
                replaced[parameter] = nn.Parameter(cast, parameter.requires_grad)
            setattr(module, name, replaced[parameter])


def cast_buffers(model: nn.Module, config: HookConfig) -> None:
    """Cast floating-point buffers if the YAML asks for it; otherwise they stay as loaded (rotary frequencies fp32)."""
    if config.hook_buffer_dtype is None:
        return
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(DTYPES[config.hook_buffer_dtype]))
