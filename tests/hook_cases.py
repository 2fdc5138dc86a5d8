"""The YAML's keys and the optimizer's arguments as tests start from them."""

from hooks.config import HookConfig
from training.arguments import FinetuneArguments

CONFIG = HookConfig(
    path="test.yaml",
    found_by="test",
    origins={},
    num_processes=2,
    mixed_precision="no",
    fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP",
    fsdp_transformer_layer_cls_to_wrap=(),
    fsdp_min_num_params=10_000_000,
    fsdp_reshard_after_forward=True,
    fsdp_offload_params=False,
    fsdp_activation_checkpointing=False,
    fsdp_activation_checkpointing_offload=False,
    fsdp_state_dict_type="SHARDED_STATE_DICT",
)


def adamw(learning_rate: float, weight_decay: float = 0.0) -> FinetuneArguments:
    """The script's arguments as far as its optimizer reads them."""
    return FinetuneArguments(learning_rate=learning_rate, weight_decay=weight_decay)
