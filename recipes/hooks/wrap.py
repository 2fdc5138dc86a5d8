"""The wrap hook: which modules form an FSDP unit (plan), and `fully_shard` on them (apply).

A unit is gathered, computed and freed together. The plan is plain data: lists of module names, each with its reshard
choice; what no unit takes stays in the root unit. Order: recompute hook, compile, this hook, then the optimizer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from .config import HookConfig, load_function
from .structure import (
    base_model,
    final_norm,
    find_blocks,
    innermost,
    is_norm,
    kept_in_fp32,
    modules_sharing_parameters,
    num_parameters,
    outermost,
    parameter_owners,
)

CONTAINERS = (nn.ModuleList, nn.ModuleDict)
# Padding that is left alone, since a cut along another dim is not free (placement_of): a share of a parameter, or
# elements, a MiB in bf16. Chosen, not measured.
LITTLE_PADDING, FEW_ELEMENTS = 0.02, 2**19


@dataclass(frozen=True)
class Policies:
    """FSDP2's dtypes: of the units, and of the one that holds norms in fp32."""

    units: MixedPrecisionPolicy
    norms: MixedPrecisionPolicy


@dataclass(frozen=True)
class Unit:
    """Modules gathered together. `kind` is block, embeddings, tail, norms, fp32, shared, size or user."""

    modules: tuple[str, ...]
    reshard_after_forward: bool | None  # None: FSDP2's rule for the root, which is never resharded after forward
    kind: str


def plan_units(model: nn.Module, config: HookConfig) -> list[Unit]:
    """Return the units that the YAML asks for, inner units first, without the root. Works on a meta-device model.

    Raises:
        ValueError: nothing matches, or the plan is not a partition that FSDP2 can carry out.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            "The model is sharded already (from_pretrained(distributed_config=...), or another fully_shard), and a "
            "module is sharded once: load it without distributed_config and let the YAML's units shard it."
        )
    reshard = config.fsdp_reshard_after_forward
    units: list[Unit] = []
    if config.hook_norm_dtype is not None:
        norms = [name for name, module in model.named_modules() if is_norm(module) and num_parameters(module)]
        if not norms:
            raise ValueError("hook_norm_dtype: this model's norms hold no parameter; leave the key out.")
        units.append(Unit(tuple(norms), False, "norms"))
    if config.hook_param_dtype != "fp32":
        taken = {name for unit in units for name in unit.modules}
        kept = tuple(name for name in kept_in_fp32(model)[0] if name not in taken)
        units += [Unit(kept, False, "fp32")] if kept else []
    if config.hook_wrap_function:
        chosen = user_units(model, config.hook_wrap_function)
        named = {name for unit in chosen for name in unit.modules}  # the user's word goes before the model's
        kept = [tuple(name for name in u.modules if u.kind != "fp32" or name not in named) for u in units]
        units = [replace(unit, modules=names) for unit, names in zip(units, kept)]  # in one order on every rank
        units = [unit for unit in units if unit.modules] + chosen
        if not chosen:
            raise ValueError(f"hook_wrap_function {config.hook_wrap_function}: returned no unit.")
    elif config.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP":
        units += block_units(model, config)
        if config.hook_wrap_embeddings:
            units += embedding_units(model, reshard, {name for unit in units for name in unit.modules})
    elif config.fsdp_auto_wrap_policy == "SIZE_BASED_WRAP":
        in_units = {p for unit in units for name in unit.modules for p in model.get_submodule(name).parameters()}
        sized = size_units(model, config.fsdp_min_num_params, reshard, in_units)
        if not sized:
            raise ValueError(
                f"fsdp_min_num_params: {config.fsdp_min_num_params:,}, but no module below the whole model (of "
                f"{num_parameters(model):,} parameters) is that large. Lower it, or set fsdp_auto_wrap_policy: NO_WRAP."
            )
        units += sized
    unit_of = {name: index for index, unit in enumerate(units) for name in unit.modules}
    units = [Unit(names, False, "shared") for names in modules_sharing_parameters(model, unit_of)] + units
    check_plan(model, units)
    return units


def block_units(model: nn.Module, config: HookConfig) -> list[Unit]:
    """N consecutive blocks per unit; a block class nested in another gets its own unit inside."""
    blocks = find_blocks(model, config.fsdp_transformer_layer_cls_to_wrap)
    names = [name for name, _ in outermost(blocks)]
    nested = [name for name, _ in reversed(blocks) if name not in names]
    n, reshard = config.hook_wrap_blocks_per_unit, config.fsdp_reshard_after_forward
    units = [Unit((name,), reshard, "block") for name in nested]
    return units + [Unit(tuple(names[i : i + n]), reshard, "block") for i in range(0, len(names), n)]


def embedding_units(model: nn.Module, reshard: bool, taken: set[str]) -> list[Unit]:
    """Input embedding apart, [final norm, lm_head] apart and not resharded (backward needs them at once).

    What other units have (norms or a head in fp32) stays there.

    Tied: both ends in one unit, since FSDP2 refuses a parameter that two units share. A head whose bias its parent
    holds as well (BERT) is taken with that parent.
    """
    base = base_model(model)
    names = {module: name for name, module in model.named_modules()}
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if embedding is None or head is None:
        raise ValueError("hook_wrap_embeddings: true, but this model has no input embedding or no lm_head; set false.")
    norm = final_norm(model)
    owners, head_name = parameter_owners(model), names[head]
    held_by = {owner for p in head.parameters() for owner in owners[p]} - {names[embedding]}
    while head_name and any(not f"{owner}.".startswith(f"{head_name}.") for owner in held_by):
        head_name = head_name.rpartition(".")[0]
    tail = [name for name in (names[norm] if norm is not None else "", head_name) if name and name not in taken]
    shared = set(embedding.parameters()) & set(head.parameters())
    if shared:
        return [Unit((names[embedding], *tail), False, "embeddings")]
    units = [Unit((names[embedding],), reshard, "embeddings"), Unit(tuple(tail), False, "tail")]
    return [unit for unit in units if unit.modules and not set(unit.modules) & taken]


def size_units(
    model: nn.Module, min_num_params: int, reshard: bool, taken: set[nn.Parameter] | None = None
) -> list[Unit]:
    """Bottom-up: a module becomes a unit once its parameters outside inner units reach the threshold.

    `taken` holds the parameters that other units have. Passed over: containers (they have no forward), single
    Linears (never a unit per Linear), modules that hold only one end of a tied parameter, and a module that holds all
    parameters (that is the root).
    """
    base = base_model(model)
    total = num_parameters(model)
    ends = {base.get_input_embeddings(), base.get_output_embeddings()}
    owners = parameter_owners(model)
    units: list[Unit] = []
    taken = set(taken or ())
    for name, module in reversed(list(model.named_modules())):  # children come before their parent
        is_leaf = not any(module.children()) or isinstance(module, BaseTunerLayer)
        is_whole = num_parameters(module) == total
        if is_whole or isinstance(module, CONTAINERS) or (is_leaf and module not in ends):
            continue
        rest = [p for p in module.parameters() if p not in taken]
        inside = {name, *(f"{name}.{child}" for child, _ in module.named_modules() if child)}
        holds_all_ends = all(owners[p] <= inside for p in rest)
        if holds_all_ends and sum(p.numel() for p in rest) >= min_num_params:
            units.append(Unit((name,), reshard, "size"))
            taken |= set(rest)
    return units


def user_units(model: nn.Module, reference: str) -> list[Unit]:
    """Call the user's `(model) -> [([module names], reshard_after_forward), ...]`."""
    planned = load_function(reference)(model)
    try:
        return [
            Unit((names,) if isinstance(names, str) else tuple(names), as_bool(reshard), "user")
            for names, reshard in planned
        ]
    except (TypeError, ValueError) as error:
        shape = "a list of (module names, reshard_after_forward as True or False)"
        raise ValueError(f"hook_wrap_function {reference}: returned {planned!r}, expected {shape}.") from error


def as_bool(value: object) -> bool:
    """The value itself if it is True or False. Raises TypeError otherwise ('no' would count as True)."""
    if not isinstance(value, bool):
        raise TypeError(value)
    return value


def check_plan(model: nn.Module, units: list[Unit]) -> None:
    """Raise ValueError unless the units are a partition that FSDP2 can carry out."""
    modules = dict(model.named_modules(remove_duplicate=False))
    unit_of: dict[str, int] = {}
    problems = []
    for index, unit in enumerate(units):
        for name in unit.modules:
            if not isinstance(name, str) or name not in modules:
                problems.append(f"unit {index}: no module named {name!r}")
                continue
            if isinstance(modules[name], CONTAINERS):
                problems.append(f"unit {index}: {name} is a {type(modules[name]).__name__}, whose forward never runs")
            elif name == "":
                problems.append(f"unit {index}: the whole model is always the root unit; leave it out")
            if name in unit_of:
                problems.append(f"{name} is in unit {unit_of[name]} and in unit {index}")
            unit_of.setdefault(name, index)
            if any(name.startswith(other + ".") for other in unit.modules):
                problems.append(f"unit {index}: {name} lies inside another module of the same unit")

    filled = set()
    for owners in parameter_owners(model).values():
        holders = {innermost(name, unit_of) for name in owners}
        filled |= holders
        if len(holders) > 1:
            problems.append(f"a tied parameter of {' and '.join(sorted(owners))} would lie in two units")
    problems += [f"unit {i}: {unit.modules} holds no parameter" for i, unit in enumerate(units) if i not in filled]
    if problems:
        raise ValueError("The wrap plan cannot be carried out:\n- " + "\n- ".join(problems))


def apply_units(model: nn.Module, units: list[Unit], config: HookConfig, mesh: DeviceMesh, policies: Policies) -> None:
    """Shard the model in place: one `fully_shard` per unit, the root last, then the prefetch depth.

    Each rank keeps its slice of every parameter on its own device; a model on the meta device stays there.
    """
    pin_memory = mesh.device_type != "cpu"
    offload = CPUOffloadPolicy(pin_memory=pin_memory) if config.fsdp_offload_params else OffloadPolicy()
    # What a model keeps in fp32 hands on what its own code returns.
    fp32 = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)
    apart = {"norms": policies.norms, "fp32": fp32}
    num_shards = mesh.size(mesh.ndim - 1)  # replicas, if there are any, come first
    shard = partial(fully_shard, shard_placement_fn=lambda parameter: placement_of(parameter.shape, num_shards))
    for unit in sorted(units, key=lambda unit: -max(name.count(".") for name in unit.modules)):  # inner ones first
        modules = [model.get_submodule(name) for name in unit.modules]
        group = modules if len(modules) > 1 else modules[0]
        policy = apart.get(unit.kind, policies.units)
        reshard = unit.reshard_after_forward
        shard(group, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshard)
    shard(model, mesh=mesh, mp_policy=policies.units, offload_policy=offload)
    firsts = {unit.modules[0] for unit in units if unit.kind not in apart}
    set_prefetch([module for name, module in model.named_modules() if name in firsts], config)


def placement_of(shape: Sequence[int], num_shards: int) -> Shard | None:
    """The dim that a parameter of this shape is cut along; None: dim 0, which is the cheapest.

    FSDP2 pads dim 0 to a multiple of the shards, sends the padding along, and the first ranks hold all there is: of 8
    experts 64 ranks gather 8 times the bytes. Another dim must divide by the shards, and costs a copy on the device, in
    time and for that time in memory, of the parameter in each gather and of its gradient in each reduction. So it is
    taken where dim 0 pads more than a little.
    """
    if not shape:
        return None  # a scalar, which FSDP2 refuses by its name
    padding = padded_numel(shape, num_shards) - math.prod(shape)
    if padding <= FEW_ELEMENTS or padding <= LITTLE_PADDING * math.prod(shape):
        return None
    return next((Shard(dim) for dim in range(1, len(shape)) if shape[dim] % num_shards == 0), None)


def padded_numel(shape: Sequence[int], num_shards: int, dim: int = 0) -> int:
    """Elements that a gather of such a parameter moves: as many shards as the first rank's."""
    return -(-shape[dim] // num_shards) * num_shards * math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])


def set_prefetch(modules: list[FSDPModule], config: HookConfig) -> None:
    """Gather the next units while one computes. Depth 1 is FSDP2's own implicit prefetch and sets nothing."""
    depth = config.hook_prefetch_units
    if depth == 1:
        return
    for i, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(modules[i + 1 : i + 1 + depth])
        module.set_modules_to_backward_prefetch(modules[max(0, i - depth) : i][::-1])


def set_gradient_sync(model: FSDPModule, config: HookConfig, is_last_micro_batch: bool) -> None:
    """Reduce-scatter after this micro-batch's backward, or keep unsharded gradients until the window's last one."""
    model.set_requires_gradient_sync(config.hook_reduce_every_micro_batch or is_last_micro_batch)


def reshard_all(model: FSDPModule) -> None:
    """Free gathered parameters, and forget the order in which units ran. Call after forwards without a backward
    (evaluation, generation).

    Units that are not resharded after forward would otherwise hand plain copies to the optimizer and the clipping, and
    the next backward would begin by gathering the unit that ran last in the evaluation.
    """
    model.reset_iter_state()  # of all units; it reshards them


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, or the tensor where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
