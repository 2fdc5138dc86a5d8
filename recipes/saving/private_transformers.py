"""transformers' private names that writing a model needs. tests/test_private.py fails where one has moved."""

import torch
from torch import nn
from transformers import core_model_loading


def as_on_disk(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors as the family's files have them. Public way looked for: save_pretrained writes a whole model."""
    return core_model_loading.revert_weight_conversion(model, tensors)


def never_saved(model: nn.Module) -> set[str]:
    """Names that a family leaves out of its files. Public way looked for: as for as_on_disk."""
    return set(model._keys_to_ignore_on_save or ())
