"""A model of real size without its weights: from its config alone, on the meta device or on fake tensors."""

import copy

import torch
from hooks.structure import set_use_cache
from torch import nn
from training.arguments import FinetuneArguments
from training.model import check_not_quantized
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig


def load_without_weights(arguments: FinetuneArguments) -> nn.Module:
    """The model as training.model.load_model would give it, from its config alone."""
    source = {"revision": arguments.model_revision, "trust_remote_code": arguments.trust_remote_code}
    config = AutoConfig.from_pretrained(arguments.model_name_or_path, **source)
    check_not_quantized(config)
    options = {"dtype": config_dtype(config), "trust_remote_code": arguments.trust_remote_code}
    if (arguments.attn_implementation or "").startswith("flash"):  # stood in for, as planned_arguments.py says
        try:
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa", **options)
        except ValueError:  # a family without it
            model = AutoModelForCausalLM.from_config(config, **options)
    else:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=arguments.attn_implementation, **options)
    set_use_cache(model, False)
    return model.train()


def leave_meta(model: nn.Module) -> None:
    """Give a model on the meta device fake tensors of the CPU in place; tied ones stay tied.

    nn.Module.to_empty would untie them, and peft cannot move fake parameters.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if value not in made:
                made[value] = torch.empty_like(value, device="cpu")
                if isinstance(value, nn.Parameter):
                    made[value] = nn.Parameter(made[value], value.requires_grad)
            setattr(module, name, made[value])


def config_dtype(config: PreTrainedConfig) -> torch.dtype:
    """The dtype that the checkpoint's config names, bf16 where it names none."""
    named = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.bfloat16
    return getattr(torch, named) if isinstance(named, str) else named
