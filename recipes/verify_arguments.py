"""The arguments of verify.py, and the config of the model that they name."""

from dataclasses import dataclass, field

from exact_checks import DROPOUT
from model_loading import check_not_quantized
from transformers import AutoConfig, PreTrainedConfig


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
