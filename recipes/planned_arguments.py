"""What a script's arguments mean where its step is only planned: attention as on a GPU, what is left out."""

import contextlib
import copy
from typing import Any

from architecture import check_architecture, flash_isolation
from transformers import PreTrainedConfig


def settle_attention(arguments: Any, compute_dtype: str, config: PreTrainedConfig) -> None:
    """Put flash attention's name into `arguments` where finetune_performance.py would choose it by itself on a GPU
    (block_kernels.use_kernels), with flash-attn installed.

    Raises:
        ValueError: packed documents would see each other.
    """
    chooses = hasattr(arguments, "torch_compile") and arguments.attn_implementation is None
    fits = arguments.packing and arguments.per_device_train_batch_size == 1 and compute_dtype in ("bf16", "fp16")
    with contextlib.suppress(Exception):  # a family of which no tiny model can be built
        if chooses and fits and flash_isolation(config) == "isolated":
            arguments.attn_implementation = "flash_attention_2"
    if arguments.packing:
        as_run = copy.deepcopy(config)
        as_run._attn_implementation = arguments.attn_implementation or config._attn_implementation
        check_architecture(as_run, packing=True)


def reads_documents(arguments: Any) -> bool:
    """Whether attention is handed a mask of the documents in a packed row."""
    return arguments.packing and not uses_flash(arguments)


def uses_flash(arguments: Any) -> bool:
    """Whether a GPU's attention would be flash attention: it is handed no mask."""
    return (arguments.attn_implementation or "").startswith("flash")


def notes_on(arguments: Any, is_padded: bool, traced: int) -> list[str]:
    """What is counted otherwise than it would run, or refused."""
    notes = []
    if getattr(arguments, "optim", "adamw_torch_fused") == "adamw_torch_8bit":
        raise ValueError("--optim adamw_torch_8bit: its compiled update does not run on fake tensors; plan without it")
    if getattr(arguments, "torch_compile", False):
        notes.append("--torch_compile: counted without; compiled blocks need less")
    if getattr(arguments, "use_liger_kernel", False):
        notes.append("--use_liger_kernel: counted without; its kernels need less")
    if uses_flash(arguments):
        notes.append("attention counted as flash attention (flash-attn must be installed): no mask of T x T")
    elif is_padded or arguments.packing:
        notes.append("attention counted with a mask of T x T, which padded or packed rows need without flash attention")
    if arguments.gradient_accumulation_steps > traced:
        notes.append(f"{traced} of {arguments.gradient_accumulation_steps} micro-batches were run")
    return notes
