"""The YAML's keys as the tests of the hooks start from them."""

from hooks.config import HookConfig

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
