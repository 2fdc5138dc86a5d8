"""transformers' private names, but for tools/private_transformers.py. tests/test_private.py fails where one moves."""

from contextlib import AbstractContextManager
from unittest import mock

import transformers.masking_utils
from torch import nn


def unsplit_classes(model: nn.Module) -> set[str]:
    """Class names of what is declared not to be split. Public way looked for: device_map="auto" only obeys them."""
    return {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}


def strict_fp32_patterns(model: nn.Module) -> set[str]:
    """Of names that stay in fp32 whatever the dtype. Public way looked for: from_pretrained only obeys them."""
    return {p for module in model.modules() for p in getattr(module, "_keep_in_fp32_modules_strict", None) or ()}


def masks_without_reading(needs_mask: bool) -> AbstractContextManager:
    """Inside, masks are made, or left out, without a look at the values of positions and padding, for which the CPU
    would wait; what is traced is made so. Public way looked for: a mask of four dimensions is taken as it is, by layers
    of all kinds alike, and positions are read all the same."""
    if needs_mask:
        return mock.patch.object(transformers.masking_utils, "is_tracing", lambda *_: True)
    return mock.patch.object(transformers.masking_utils, "find_packed_sequence_indices", lambda _: None)
