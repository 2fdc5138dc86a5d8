"""The recompute hook: which blocks recompute their forward during backward (plan), and switching it on (apply).

transformers' own implementation is used where the model has it: it checkpoints `forward`, so FSDP2's hooks run once,
names stay as they are, and random state is kept, so a recomputed block draws the same dropout mask.
"""

import functools

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from .config import HookConfig, load_function
from .private_torch import attention_operators
from .structure import base_model, find_blocks, outermost

# Kept by `selective`: what is dear to compute again. Everything else of a block is recomputed.
MATMULS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
KEPT_OPS = {operator.default for operator in (*MATMULS, *attention_operators())}


def plan_activation_checkpointing(model: nn.Module, config: HookConfig) -> list[str]:
    """Return the names of the blocks that recompute: 0, n, 2n, ... or those the user's function picks.

    Raises:
        ValueError: the model has no blocks, or the user's function picks none.
    """
    if not config.fsdp_activation_checkpointing:
        return []
    blocks = outermost(find_blocks(model, config.fsdp_transformer_layer_cls_to_wrap))
    if config.hook_checkpoint_function:
        recomputes = load_function(config.hook_checkpoint_function)
        chosen = [name for index, (name, block) in enumerate(blocks) if recomputes(index, name, block)]
        if not chosen:
            raise ValueError(f"hook_checkpoint_function {config.hook_checkpoint_function}: picked no block.")
        return chosen
    return [name for index, (name, _) in enumerate(blocks) if index % config.hook_checkpoint_every_n_blocks == 0]


def apply_activation_checkpointing(model: nn.Module, names: list[str], config: HookConfig, is_cpu: bool) -> None:
    """Make the named blocks recompute in backward, in place. Works before and after peft; call it before wrapping.

    Saves a block's activations and keeps its input (in host memory with fsdp_activation_checkpointing_offload, which
    has no effect on a CPU run); costs one more forward of each named block.

    Raises:
        ValueError: recompute is on already (the model would recompute twice).
    """
    if not names:
        return
    base = base_model(model)
    if any(has_recompute(module) for module in model.modules()):
        raise ValueError("The model recomputes already (gradient checkpointing was enabled before); enable it once.")
    kwargs = {"use_reentrant": False}
    if config.hook_checkpoint_mode == "selective":
        kwargs["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep_or_recompute)
    blocks = [model.get_submodule(name) for name in names]
    offload = config.fsdp_activation_checkpointing_offload and not is_cpu
    if base.supports_gradient_checkpointing and all(isinstance(block, GradientCheckpointingLayer) for block in blocks):
        if not hasattr(base, "activation_checkpointing_enable"):
            raise ValueError("This transformers has no activation_checkpointing_enable; install requirements.txt.")
        base.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs, offload=offload)
        for module in model.modules():  # it marks every layer, nested ones too: keep the planned blocks only
            if isinstance(module, GradientCheckpointingLayer):
                module.gradient_checkpointing = module in blocks
        return
    if offload:
        raise ValueError("fsdp_activation_checkpointing_offload: this model has no support for it; set it to false.")
    for block in blocks:
        block.forward = recomputing_forward(block, block.forward, kwargs)


def keep_or_recompute(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """The `selective` policy: keep matmul and attention outputs."""
    return CheckpointPolicy.MUST_SAVE if op in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def recomputing_forward(block: nn.Module, forward: object, checkpoint_kwargs: dict) -> object:
    """Wrap `forward` for blocks that transformers cannot checkpoint itself."""

    @functools.wraps(forward)
    def checkpointed(*args: object, **kwargs: object) -> object:
        if block.training and torch.is_grad_enabled():
            return checkpoint(forward, *args, **checkpoint_kwargs, **kwargs)
        return forward(*args, **kwargs)

    checkpointed.recomputes = True
    return checkpointed


def has_recompute(module: nn.Module) -> bool:
    """True if this block itself recomputes in backward, read off the live module."""
    by_transformers = isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
    return by_transformers or getattr(module.forward, "recomputes", False)


def recomputed_blocks(model: nn.Module) -> list[str]:
    """Names of the modules that recompute, read off the live model."""
    return [name for name, module in model.named_modules() if has_recompute(module)]
