"""Checks of what the hooks take a tiny model to be, against rules of their own."""

from collections.abc import Iterator

from torch import nn

from .architecture import kept_otherwise, lora_error, norms_by_name, norms_otherwise
from .cases import Check

ADAPTER_TOLERANCE = 1e-5  # of the update; fp32 rounding of a sum with what the layer itself returns


def structure_checks(model: nn.Module, has_norm_dtype: bool) -> Iterator[Check]:
    """Whether the hooks' norms, and what they keep in fp32, are those that names and the library's patterns say."""
    norms, kept = norms_otherwise(model), kept_otherwise(model)
    yield Check("norms", not norms, detail=f"by class name otherwise: {first(norms)}" if norms else "")
    yield Check("kept in fp32", not kept, detail=f"by the library's patterns otherwise: {first(kept)}" if kept else "")
    called = norms_by_name(model)[1]
    if has_norm_dtype and called:
        yield Check("norms by name", True, False, detail=f"not proved: their class is no norm: {first(called)}")


def adapter_check(adapted: nn.Module, scale: float) -> Iterator[Check]:
    """Whether an adapted layer adds scale * B A x."""
    name, error = lora_error(adapted, scale)
    detail = f"{name}: off by {error:.0e} of the update" if name else "not proved: no linear layer is adapted"
    yield Check("an adapter by hand", error <= ADAPTER_TOLERANCE, bool(name), detail=detail)


def first(names: set[str]) -> str:
    """A few of them."""
    return ", ".join(sorted(names)[:3])
