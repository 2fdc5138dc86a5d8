"""What a transformers model is made of: its blocks, norms, and which modules hold which parameter."""

import re

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from .private_transformers import strict_fp32_patterns, unsplit_classes


def find_blocks(model: nn.Module, class_names: tuple[str, ...] = ()) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of every transformer block, in execution order.

    By class name if given; else the elements of outermost ModuleLists that the library marks as blocks (it can
    recompute them, or declares them not to be split; a vision tower's too), and always those of the largest list.

    Raises:
        ValueError: a class name that matches nothing, or no ModuleList; lists the block classes the model has.
    """
    named = dict(model.named_modules())
    lists = outermost_module_lists(model)
    candidates = sorted({type(block).__name__ for _, blocks in lists for block in blocks})
    if class_names:
        present = {original_class(module).__name__ for module in named.values()}
        missing = [name for name in class_names if name not in present]
        if missing:
            raise ValueError(
                f"fsdp_transformer_layer_cls_to_wrap: {', '.join(missing)} not in this model. "
                f"Block classes it has: {', '.join(candidates) or 'none'}. Leave the key out to let them be found."
            )
        return [(name, module) for name, module in named.items() if original_class(module).__name__ in class_names]
    if not lists:
        raise ValueError(
            "No transformer blocks found (no ModuleList of layers). Set fsdp_transformer_layer_cls_to_wrap, "
            "or fsdp_auto_wrap_policy: SIZE_BASED_WRAP."
        )
    declared = unsplit_classes(model)
    with_children = [entry for entry in lists if any(any(block.children()) for block in entry[1])]  # no list of Linears
    largest = max(with_children or lists, key=lambda entry: num_parameters(entry[1]))[1]
    return [
        (f"{list_name}.{i}", block)
        for list_name, blocks in lists
        for i, block in enumerate(blocks)
        if blocks is largest
        or isinstance(block, GradientCheckpointingLayer)
        or original_class(block).__name__ in declared
    ]


def outermost_module_lists(model: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """ModuleLists with parameters that lie in no other ModuleList."""
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        is_nested = any(name.startswith(outer + ".") for outer, _ in found)
        if isinstance(module, nn.ModuleList) and len(module) and num_parameters(module) and not is_nested:
            found.append((name, module))
    return found


def outermost(blocks: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Drop blocks that lie inside another block of the list."""
    names = [name for name, _ in blocks]
    return [(name, block) for name, block in blocks if not any(name.startswith(other + ".") for other in names)]


def count_blocks(model: nn.Module) -> int:
    """Number of transformer blocks, 0 for a model without a block list."""
    return len(outermost(find_blocks(model))) if outermost_module_lists(model) else 0


def base_model(model: nn.Module) -> nn.Module:
    """The transformers model inside a peft model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def set_use_cache(model: nn.Module, use_cache: bool) -> None:
    """Set the cache flag of the model's config and of every config inside it: each part reads its own."""
    for module in model.modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config.use_cache = use_cache


def original_class(module: nn.Module) -> type:
    """A module's class before `fully_shard` put its own in front."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))


def num_parameters(module: nn.Module) -> int:
    """Number of parameters, each counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def is_norm(module: nn.Module) -> bool:
    """True for LayerNorm, LlamaRMSNorm and the like (q_norm and k_norm included)."""
    return "norm" in type(module).__name__.lower() and not any(module.children())


def final_norm(model: nn.Module) -> nn.Module | None:
    """The norm that stands beside the block list and after it, None if the model has none there."""
    list_name = max(outermost_module_lists(model), key=lambda entry: num_parameters(entry[1]))[0]
    parent_name, _, own_name = list_name.rpartition(".")
    children = list(model.get_submodule(parent_name).named_children())
    position = [name for name, _ in children].index(own_name)
    norms = [module for _, module in children[position + 1 :] if is_norm(module)]
    return norms[-1] if norms else None


def parameter_owners(model: nn.Module) -> dict[nn.Parameter, set[str]]:
    """Parameter -> names of the modules that hold it (several for tied weights)."""
    owners: dict[nn.Parameter, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, set()).add(name)
    return owners


def innermost(name: str, unit_of: dict[str, int]) -> int:
    """Index of the innermost unit around a module, -1 for the root."""
    while name and name not in unit_of:
        name = name.rpartition(".")[0]
    return unit_of.get(name, -1)


def modules_sharing_parameters(model: nn.Module, unit_of: dict[str, int]) -> list[tuple[str, ...]]:
    """Sets of modules inside different units that share all their parameters (the shared blocks of Zamba).

    FSDP2 refuses a parameter that two units share, so each set must be one unit of its own.
    """
    crossing: dict[nn.Parameter, set[str]] = {}
    for parameter, owners in parameter_owners(model).items():
        is_inside = all(owner not in unit_of for owner in owners)
        if is_inside and len({innermost(owner, unit_of) for owner in owners}) > 1:
            crossing[parameter] = owners

    def topmost(name: str) -> str:  # the largest module around `name` that holds nothing but shared parameters
        parent = name.rpartition(".")[0]
        is_shared = parent and all(p in crossing for p in model.get_submodule(parent).parameters())
        return topmost(parent) if is_shared else name

    return list(dict.fromkeys(tuple(sorted({topmost(name) for name in owners})) for owners in crossing.values()))


def kept_in_fp32(model: nn.Module) -> tuple[list[str], list[str]]:
    """What the model says must stay fp32 under bf16 (routers, decay rates): modules of nothing else, other tensors.

    transformers loads these in fp32 whatever the dtype asked for, by the same patterns.
    """
    patterns = strict_fp32_patterns(model)
    if not patterns:
        return [], []
    pattern = re.compile("|".join(sorted({p.replace("*", ".*") for p in patterns})))
    modules: list[str] = []
    tensors = [name for name, _ in model.named_parameters() if pattern.search(name)]
    for name, module in model.named_modules():  # the largest modules whose forward runs: a parent comes first
        inside = [f"{name}.{key}" for key, _ in module.named_parameters()]
        is_taken = any(name.startswith(f"{other}.") for other in modules)
        never_runs = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Conv1d))  # the last: only its weight is read
        if inside and not is_taken and not never_runs and all(pattern.search(key) for key in inside):
            modules.append(name)
    tensors = [key for key in tensors if not any(key.startswith(f"{name}.") for name in modules)]
    return modules, tensors
