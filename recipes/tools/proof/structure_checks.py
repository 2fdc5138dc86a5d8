"""Checks of what the hooks take a tiny model to be, against rules of their own."""

import re
from collections.abc import Iterator

import torch
from hooks.private_transformers import strict_fp32_patterns
from hooks.structure import is_norm, kept_in_fp32, num_parameters
from torch import nn

from .architecture import norms_by_name
from .cases import Check

ADAPTER_TOLERANCE = 1e-5  # of the update; fp32 rounding of a sum with what the layer itself returns


def structure_checks(model: nn.Module, has_norm_dtype: bool) -> Iterator[Check]:
    """Whether the hooks' norms, and what they keep in fp32, are those that names and the library's patterns say."""
    by_class, by_own_name = norms_by_name(model)
    found = {name for name, module in model.named_modules() if is_norm(module) and num_parameters(module)}
    norms, kept = found ^ by_class, kept_otherwise(model)
    yield Check("norms", not norms, detail=f"by class name otherwise: {first(norms)}" if norms else "")
    yield Check("kept in fp32", not kept, detail=f"by the library's patterns otherwise: {first(kept)}" if kept else "")
    if has_norm_dtype and by_own_name:
        detail = f"not proved: their class is no norm: {first(by_own_name)}"
        yield Check("norms by name", True, False, detail=detail)


def kept_otherwise(model: nn.Module) -> set[str]:
    """Parameters that the hooks keep in fp32 and the library's own rule does not, or the reverse; and linear layers
    that compute in it in the library only."""
    modules, tensors = kept_in_fp32(model)
    inside = {name for name, _ in model.named_parameters() if any(name.startswith(f"{m}.") for m in modules)}
    patterns = {pattern.replace("*", ".*") for pattern in strict_fp32_patterns(model)}
    strict = {name for name, _ in model.named_parameters() if any(re.search(pattern, name) for pattern in patterns)}
    linear = {f"{name}.weight" for name, module in model.named_modules() if type(module) is nn.Linear}
    return (strict ^ (inside | set(tensors))) | ((strict & linear) - inside)


@torch.no_grad()
def adapter_check(adapted: nn.Module, scale: float) -> Iterator[Check]:
    """Whether an adapted linear layer adds scale * B A x."""
    name = "an adapter by hand"
    for module, layer in adapted.eval().named_modules():
        if "default" in getattr(layer, "lora_A", ()) and isinstance(getattr(layer, "base_layer", None), nn.Linear):
            x = torch.randn(3, layer.base_layer.in_features, generator=torch.Generator().manual_seed(3))
            update = scale * x @ layer.lora_A["default"].weight.T @ layer.lora_B["default"].weight.T
            error = ((layer(x) - layer.base_layer(x) - update).norm() / update.norm()).item()
            yield Check(name, error <= ADAPTER_TOLERANCE, detail=f"{module}: off by {error:.0e} of the update")
            return
    yield Check(name, True, False, detail="not proved: no linear layer is adapted")


def first(names: set[str]) -> str:
    """A few of them."""
    return ", ".join(sorted(names)[:3])
