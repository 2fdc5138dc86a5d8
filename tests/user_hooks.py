"""Hooks as a user would write them, for the tests of hook_wrap_function and hook_checkpoint_function."""

from torch import nn


def wrap_attention_and_mlp(model: nn.Module) -> list[tuple[list[str], bool]]:
    """One unit per attention and per MLP."""
    return [([name], True) for name, module in model.named_modules() if name.endswith((".self_attn", ".mlp"))]


def first_half(index: int, name: str, block: nn.Module) -> bool:
    """Recompute the first two blocks."""
    return index < 2
