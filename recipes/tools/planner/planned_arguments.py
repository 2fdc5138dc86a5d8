"""What a script's arguments mean where its step is only planned: attention as on a GPU, what is left out."""

import contextlib
from typing import Any

import torch
from torch import nn
from training.arguments import FinetuneArguments
from training.model import learned_positions
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..private_transformers import attention_of, supports_attention, with_attention
from ..proof.architecture import check_architecture, flash_isolation

STAND_IN = "without_mask"


def settle_attention(arguments: FinetuneArguments, compute_dtype: str, model: nn.Module) -> None:
    """Give a model the attention that a GPU with flash-attn would run, under its name in `arguments`: the named one, or
    flash attention where finetune_performance.py chooses it by itself (training/kernels.py).

    In flash attention's place stands torch's own without a mask, which keeps the same tensors.

    Raises:
        ValueError: packed documents would see each other.
    """
    chooses = hasattr(arguments, "torch_compile") and arguments.attn_implementation is None
    fits = arguments.packing and arguments.per_device_train_batch_size == 1 and compute_dtype in ("bf16", "fp16")
    with contextlib.suppress(Exception):  # a family of which no tiny model can be built
        if chooses and fits and supports_attention(model, "flash_attn") and flash_isolation(model.config) == "isolated":
            arguments.attn_implementation = "flash_attention_2"
    if arguments.packing:
        attention = arguments.attn_implementation or attention_of(model.config)
        check_architecture(with_attention(model.config, attention), packing=True)
    if uses_flash(arguments) and not supports_attention(model, "sdpa"):  # whose own is eager: it holds T x T scores
        AttentionInterface.register(STAND_IN, without_mask)
        model.set_attn_implementation(STAND_IN)


def without_mask(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attention that keeps what flash attention keeps: sinks and soft caps, left out here, would keep no more."""
    options = {name: kwargs[name] for name in ("scaling", "dropout") if name in kwargs}
    return sdpa_attention_forward(module, query, key, value, None, **options)


def settle_length(arguments: FinetuneArguments, model: nn.Module) -> list[str]:
    """Cut `max_length` to a table of learned positions, which no unpacked row goes beyond; returns the note on it."""
    limit = learned_positions(model)
    if arguments.packing or limit is None or arguments.max_length <= limit:
        return []
    arguments.max_length = limit
    return [f"rows counted with {limit} tokens: the model has no more positions"]


def reads_documents(arguments: FinetuneArguments) -> bool:
    """Whether attention is handed a mask of the documents in a packed row."""
    return arguments.packing and not uses_flash(arguments)


def uses_flash(arguments: FinetuneArguments) -> bool:
    """Whether a GPU's attention would be flash attention: it is handed no mask."""
    return (arguments.attn_implementation or "").startswith("flash")


def notes_on(arguments: FinetuneArguments, is_padded: bool, traced: int) -> list[str]:
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
