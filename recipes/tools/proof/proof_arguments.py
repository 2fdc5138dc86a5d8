"""The command line of verify.py: its arguments, and the tiny models that they ask for."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from training.model import add_adapters, check_not_quantized
from transformers import AutoConfig, PreTrainedConfig

from .cases import DROPOUT, Case


@dataclass
class VerifyArguments:
    """Prove that a model trains exactly under a YAML."""

    model_name_or_path: str = field(metadata={"help": "Local folder or hub name; only its config is read."})
    accelerate_config: str = field(metadata={"help": "The Accelerate YAML to prove."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the hub."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that the model's repository brings."})
    num_processes: int = field(default=2, metadata={"help": "Processes to shard over."})
    use_peft: bool = field(default=False, metadata={"help": "Check LoRA as well."})
    lora_r: int = field(default=4, metadata={"help": "Rank of the adapters in the tiny model."})
    lora_alpha: int = field(default=8, metadata={"help": "Scale of the adapters is lora_alpha / lora_r."})
    lora_dropout: float = field(default=DROPOUT, metadata={"help": "Dropout in the adapters."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"], metadata={"help": "Module names to adapt, or all-linear."}
    )
    packing: bool = field(default=False, metadata={"help": "Fail where packed documents see each other."})
    json: bool = field(default=False, metadata={"help": "Print one JSON object and nothing else."})


def load_model_config(arguments: VerifyArguments) -> PreTrainedConfig:
    """The model's config, from a folder or the hub. Raises ValueError where there is none, or weights are quantized."""
    name = arguments.model_name_or_path
    try:
        config = AutoConfig.from_pretrained(
            name, revision=arguments.model_revision, trust_remote_code=arguments.trust_remote_code
        )
    except Exception as error:
        raise ValueError(f"--model_name_or_path {name}: no config could be loaded: {error}") from error
    check_not_quantized(config)
    return config


def build_case(build: Callable[..., nn.Module], case: Case, lora: VerifyArguments | None) -> nn.Module:
    """The tiny model of a case, its weights rounded to bf16 as a checkpoint's are where the YAML's dtypes are proved.

    Raises:
        ValueError: no such model can be built, or no such adapters.
    """
    try:
        model = build(dropout=case.dropout)
    except Exception as error:
        raise ValueError(f"no tiny model could be built from this config: {type(error).__name__}: {error}") from error
    if case.balances:
        model.config.output_router_logits = True
    if case.is_policy:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.bfloat16()
    if not case.use_peft:
        return model
    torch.manual_seed(0)  # the same adapters on every rank, sharded and whole
    try:
        adapted = add_adapters(model, lora)
    except ValueError as error:
        if not lora.lora_dropout or "--lora_dropout 0" not in str(error):
            raise
        return build_case(build, case, dataclasses.replace(lora, lora_dropout=0.0))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero at the start: the gradient of lora_A would be zero too
            nn.init.normal_(parameter, std=0.02)
    return adapted
