"""Faster code for what a block computes: flash attention, Liger's kernels, torch.compile."""

import contextlib

import torch
from hooks.structure import find_blocks
from torch import nn
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import is_flash_attn_2_available, is_liger_kernel_available

from .arguments import PerformanceArguments
from .on_demand import tool

NO_LOSS = {"cross_entropy": False, "fused_linear_cross_entropy": False}  # the loss is ours: exact per label token


def check_kernels(arguments: PerformanceArguments, device: torch.device) -> None:
    """Raise ValueError where what the arguments ask for cannot run."""
    if arguments.use_liger_kernel and not is_liger_kernel_available():
        raise ValueError("--use_liger_kernel: liger-kernel is not installed (pip install liger-kernel).")
    if arguments.use_liger_kernel and device.type == "cpu":
        raise ValueError("--use_liger_kernel: its kernels are written in Triton and need a GPU; leave it out on a CPU.")


def use_kernels(model: nn.Module, arguments: PerformanceArguments, compute_dtype: str) -> list[str]:
    """Flash attention where packed rows can use it, Liger's kernels where asked for; returns what was done, in lines.

    Call after loading and before adapters. Flash attention of variable length reads the documents off the positions,
    in micro-batches of one row, if the family hands them on (measured on a tiny model); without it, packed rows pay for
    a mask of T x T. What the user named stays.

    Raises:
        ValueError: Liger has no kernels for this family.
    """
    lines = []
    fits = arguments.packing and arguments.per_device_train_batch_size == 1 and compute_dtype in ("bf16", "fp16")
    if fits and arguments.attn_implementation is None and is_flash_attn_2_available():
        architecture = tool("proof.architecture", "flash attention chosen by itself", lines.append)
        with contextlib.suppress(Exception):  # a family without it, or of which no tiny model can be built
            if architecture is not None and architecture.flash_isolation(model.config) == "isolated":
                model.set_attn_implementation("flash_attention_2")
                lines.append("attention of packed rows: flash_attention_2")
    if arguments.use_liger_kernel:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

        if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:  # it would say nothing and do nothing
            known = ", ".join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))
            raise ValueError(f"--use_liger_kernel: it has no kernels for {model.config.model_type}; it knows: {known}")
        apply_liger_kernel(model, NO_LOSS)
        lines.append("kernels: liger")
    return lines


def compile_blocks(model: nn.Module, class_names: tuple[str, ...] = ()) -> None:
    """Compile each block in place, its recompute inside and its FSDP unit outside: call between the two hooks.

    Equal blocks share one compilation; module and parameter names stay. Compiled dropout draws other numbers than
    eager dropout does.
    """
    for _, block in find_blocks(model, class_names):
        block.compile()
