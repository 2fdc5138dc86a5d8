"""transformers' private names, but for tools/private_transformers.py. tests/test_private.py fails where one moves."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import transformers.masking_utils
from torch import nn
from transformers import PreTrainedModel, core_model_loading

READ_WHOLE = PreTrainedModel._load_pretrained_model


def unsplit_classes(model: nn.Module) -> set[str]:
    """Class names of what is declared not to be split. Public way looked for: device_map="auto" only obeys them."""
    return {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}


def strict_fp32_patterns(model: nn.Module) -> set[str]:
    """Of names that stay in fp32 whatever the dtype. Public way looked for: from_pretrained only obeys them."""
    return {p for module in model.modules() for p in getattr(module, "_keep_in_fp32_modules_strict", None) or ()}


def opening_with(load: Callable[..., Any]) -> AbstractContextManager:
    """Inside, from_pretrained hands what it has built on the meta device, and the files, to this, in place of reading
    them. Public way looked for: device_map="meta" leaves buffers without values; from_config knows no files."""
    return mock.patch.object(PreTrainedModel, "_load_pretrained_model", staticmethod(load))


def read_whole(*arguments: Any) -> Any:
    """What from_pretrained does there. Public way looked for: as for opening_with."""
    return READ_WHOLE(*arguments)


def load_tensors(model: nn.Module, tensors: dict[str, Any], load_config: Any, device: str | torch.device) -> Any:
    """Rename and convert a family's tensors, or slices of its files, and put them into its model; of a DTensor this
    rank's slice is read. Public way looked for: from_pretrained builds its own model and reads all files."""
    config = dataclasses.replace(load_config, device_map={"": device})
    return core_model_loading.convert_and_load_state_dict_in_model(model, tensors, config)[0]


def conversion_of(
    key: str, model: nn.Module, names: dict[str, torch.Tensor], load_config: Any
) -> tuple[str, list[Any]]:
    """(which of these names a file's tensor goes into, the operations on the way; none: it is only renamed). Public way
    looked for: as for load_tensors."""
    renamings, converters = (
        [entry for entry in load_config.weight_mapping or () if isinstance(entry, kind)]
        for kind in (core_model_loading.WeightRenaming, core_model_loading.WeightConverter)
    )
    prefix = model.base_model_prefix
    name, pattern = core_model_loading.rename_source_key(key, renamings, converters, prefix, names)
    if name not in names and key in names:  # not meant for it
        name, pattern = core_model_loading.rename_source_key(key, [], [], prefix, names)
    operations = [entry.operations for entry in converters if pattern in entry.source_patterns]
    return name, operations[-1] if pattern is not None else []


def keeps_slices(operation: Any, dim: int) -> bool:
    """Whether a slice along a dim of what an operation makes comes of the same slices of what it takes. Public way
    looked for: as for load_tensors."""
    if isinstance(operation, core_model_loading.MergeModulelist):
        return operation.dim == 0
    return isinstance(operation, core_model_loading.Concatenate) and 0 <= operation.dim != dim


def masks_without_reading(needs_mask: bool) -> AbstractContextManager:
    """Inside, masks are made, or left out, without a look at the values of positions and padding, for which the CPU
    would wait; what is traced is made so. Public way looked for: a mask of four dimensions is taken as it is, by layers
    of all kinds alike, and positions are read all the same."""
    if needs_mask:
        return mock.patch.object(transformers.masking_utils, "is_tracing", lambda *_: True)
    return mock.patch.object(transformers.masking_utils, "find_packed_sequence_indices", lambda _: None)
