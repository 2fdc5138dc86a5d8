"""transformers' private names that only tools need, and no copied recipe has. tests/test_private.py fails likewise."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import transformers.masking_utils
import transformers.modeling_utils
from torch import nn
from transformers import PreTrainedConfig


def attention_of(config: PreTrainedConfig) -> str | None:
    """The attention that a config asks for. Public way looked for: there is a setter, and experts have a getter."""
    return config._attn_implementation


def with_attention(config: PreTrainedConfig, name: str | None) -> PreTrainedConfig:
    """A copy that asks for this attention, None: the family's own. Public way looked for: as for attention_of."""
    changed = copy.deepcopy(config)
    changed._attn_implementation = name
    return changed


def supports_attention(model: nn.Module, kind: str) -> bool:
    """Whether a family has `sdpa` or `flash_attn`. Public way looked for: setting it needs its package too."""
    return getattr(model, f"_supports_{kind}")


def layer_overrides(name: str, value: Any) -> dict[int, dict[str, Any]] | None:
    """What an attribute of a config says of single layers, None if it is another one. Public way looked for:
    per_layer_config gives whole configs, and setting it checks what is half changed."""
    return value.per_layer_overrides if name == "_heterogeneity_spec" else None


def with_overrides(value: Any, layers: list[dict[str, Any] | None]) -> Any:
    """A copy of the attribute that says this of each layer. Public way looked for: as for layer_overrides."""
    changed = copy.copy(value)
    changed.per_layer_overrides = {i: dict(entry) for i, entry in enumerate(layers) if entry}
    return changed


def without_packed_mask() -> AbstractContextManager:
    """Inside, no mask is made of positions. Public way looked for: nothing tells fake tensors from traced ones, which
    get one."""
    return mock.patch.object(transformers.masking_utils, "find_packed_sequence_indices", lambda position_ids: None)


def saving_with(saves: Callable[..., AbstractContextManager]) -> AbstractContextManager:
    """Inside, recompute offloads blocks' inputs with this. Public way looked for: it takes `offload`, and no hooks."""
    return mock.patch.object(transformers.modeling_utils, "save_on_cpu", saves)
