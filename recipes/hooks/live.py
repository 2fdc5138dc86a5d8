"""What the hooks really did, read off the live model: printed, compared with the plan, and saved as JSON."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from .activation_checkpointing import recomputed_blocks
from .apply import HookPlan
from .config import HookConfig, as_plain_dict, notes
from .private_torch import fsdp_groups
from .structure import base_model, count_blocks, kept_in_fp32, original_class
from .wrap import FEW_ELEMENTS, LITTLE_PADDING, Unit, padded_numel, placement_of

GPUS_PER_MACHINE = 8  # numbers of ranks that are advised are multiples of it where the run's is one
VOCABULARY_ADVICE = 50_000  # from here an embedding is worth a unit of its own (vocabularies of 50k-250k)


def read_units(model: nn.Module) -> list[dict[str, Any]]:
    """Return one entry per FSDP unit that holds parameters, the root last."""
    names = {module: name for name, module in model.named_modules()}
    units = [
        {
            "modules": sorted((names[m] for m in group.modules), key=natural_order),
            "parameters": sum(p.numel() for p in group.parameters),
            "trainable_parameters": sum(p.numel() for p in group.parameters if p.requires_grad),
            "parameters_on_this_rank": sum(p.to_local().numel() for p in group.parameters),
            "parameters_on_first_rank": sum(held_by(p)[0] for p in group.parameters),
            "parameters_on_last_rank": sum(held_by(p)[1] for p in group.parameters),
            "gathered_parameters": sum(held_by(p)[0] * cut_of(p)[1] for p in group.parameters),
            "is_sharded": all(is_sharded(p) for p in group.parameters),
            "reshard_after_forward": group.reshards_after_forward,
            "stored_dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in group.parameters}),
            "param_dtype": str(group.mp_policy.param_dtype).removeprefix("torch."),
            "reduce_dtype": str(group.mp_policy.reduce_dtype).removeprefix("torch."),
            "output_dtype": str(group.mp_policy.output_dtype).removeprefix("torch."),
            "cpu_offload": isinstance(group.offload_policy, CPUOffloadPolicy),
        }
        for group in fsdp_groups(model)
    ]
    return sorted(units, key=lambda unit: (unit["modules"] == [""], natural_order(unit["modules"][0])))


def is_sharded(parameter: nn.Parameter) -> bool:
    """True for a DTensor cut over its mesh (a one-row weight lies whole on one rank and empty on the others)."""
    return isinstance(parameter, DTensor) and any(placement.is_shard() for placement in parameter.placements)


def cut_of(parameter: nn.Parameter) -> tuple[int, int]:
    """(dim, number of shards) of a sharded parameter; (0, 1) of another."""
    if not is_sharded(parameter):
        return 0, 1
    shards = zip(parameter.placements, parameter.device_mesh.shape)
    return next((placement.dim, size) for placement, size in shards if placement.is_shard())


def held_by(parameter: nn.Parameter) -> tuple[int, int]:
    """Elements of a parameter that the first rank holds, which is the most, and the last one, the least."""
    dim, shards = cut_of(parameter)
    size = parameter.shape[dim]
    rows, row = -(-size // shards), parameter.numel() // max(size, 1)
    return rows * row, max(size - rows * (shards - 1), 0) * row


def natural_order(name: str) -> list[Any]:
    """Sort key under which layers.10 comes after layers.9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def check_against_plan(
    live: list[dict[str, Any]], planned: list[Unit], recomputed: list[str], asked: list[str]
) -> None:
    """Raise ValueError if the live model is not what was planned."""
    found = {(tuple(u["modules"]), u["reshard_after_forward"]) for u in live if u["modules"] != [""]}
    expected = {(tuple(sorted(u.modules, key=natural_order)), u.reshard_after_forward) for u in planned}
    problems = [f"planned, not done: unit {sorted(expected - found)}"] if expected - found else []
    problems += [f"done, not planned: unit {sorted(found - expected)}"] if found - expected else []
    if sorted(recomputed) != sorted(asked):
        problems.append(f"recompute planned for {asked}, on in {recomputed}")
    unsharded = [unit["modules"] for unit in live if not unit["is_sharded"]]
    problems += [f"not sharded: {unsharded}"] if unsharded else []
    if problems:
        raise ValueError("The live model differs from the plan:\n- " + "\n- ".join(problems))


def warnings_for(report: dict[str, Any], model: nn.Module) -> list[str]:
    """Return the guide's warnings about this wrap."""
    units, num_blocks = report["units"], report["num_blocks"]
    largest = max(units, key=lambda unit: unit["parameters"])
    found = []
    if num_blocks >= 4 and largest["parameters"] > report["parameters"] / 2:
        name = ", ".join(largest["modules"]) or "the root"
        share = largest["parameters"] / report["parameters"]
        found.append(f"too few units, memory will be high: one unit ({name}) holds {share:.0%} of the parameters")
    if num_blocks and len(units) > 2 * num_blocks + 4:
        found.append(f"too many units, communication will be dense: {len(units)} units for {num_blocks} blocks")
    embedding = base_model(model).get_input_embeddings()
    name = next((name for name, module in model.named_modules() if module is embedding), None)
    vocabulary = embedding.weight.shape[0] if name is not None else 0
    is_apart = any(name in unit["modules"] for unit in units)
    if vocabulary >= VOCABULARY_ADVICE and not is_apart:
        found.append(
            f"a vocabulary of {vocabulary:,} ({embedding.weight.numel():,} embedding parameters) stays gathered in the "
            "root; hook_wrap_embeddings: true gives it a unit of its own"
        )
    found += padding_notes(model)
    rounded = kept_in_fp32(model)[1]
    if rounded and any(unit["param_dtype"] != "float32" for unit in units):
        example = f"{len(rounded)} tensors such as {rounded[0]}"
        found.append(
            f"{example} share a module with others and compute in 16 bits, though the model keeps them in fp32"
        )
    return found


def padding_notes(model: nn.Module) -> list[str]:
    """What the cut of a sharded model costs where the ranks divide no dim of a large parameter, and how many would."""
    parameters = list(model.named_parameters())
    added = {name: held_by(p)[0] * cut_of(p)[1] - p.numel() for name, p in parameters}
    large = [(n, p) for n, p in parameters if added[n] > max(FEW_ELEMENTS, LITTLE_PADDING * p.numel())]
    shapes = Counter(tuple(parameter.shape) for _, parameter in parameters)
    padding = sum(added.values()) / sum(n * math.prod(shape) for shape, n in shapes.items())
    if not large or padding <= LITTLE_PADDING:
        return []
    name, worst = max(large, key=lambda item: added[item[0]])
    ranks = cut_of(worst)[1]
    step = GPUS_PER_MACHINE if ranks % GPUS_PER_MACHINE == 0 else 1
    good = [n for n in range(step, 2 * ranks, step) if n > 1 and padding_share(shapes, n) <= LITTLE_PADDING]
    near = [*[n for n in good if n < ranks][-1:], *[n for n in good if n > ranks][:1]]
    advice = f"; {' or '.join(map(str, near))} ranks pad under {LITTLE_PADDING:.0%}" if near else ""
    return [
        f"padding: gathers move {padding:.0%} more than the parameters, and the first rank holds as much more than an "
        f"even share: no dim of {name} {tuple(worst.shape)} divides by {ranks} ranks{advice}"
    ]


def padding_share(shapes: Mapping[tuple[int, ...], int], shards: int) -> float:
    """What gathers move beyond parameters of these shapes (and how many there are of each), as a share of them."""
    placed = {shape: placement_of(shape, shards) for shape in shapes}
    moved = sum(n * padded_numel(s, shards, placed[s].dim if placed[s] else 0) for s, n in shapes.items())
    return moved / sum(n * math.prod(shape) for shape, n in shapes.items()) - 1


def module_tree(model: nn.Module, live: list[dict[str, Any]]) -> list[str]:
    """Return the module tree, one line each: repeated blocks folded, each unit marked with its number."""
    unit_of = {name: number for number, unit in enumerate(live) for name in unit["modules"]}

    def describe(module: nn.Module, name: str) -> list[str]:
        mark = f"  <- unit {unit_of[name]}" if name in unit_of else ""
        head = [f"{name.rpartition('.')[2] or 'model'}: {original_class(module).__name__}{mark}"]
        children = [describe(child, f"{name}.{key}".lstrip(".")) for key, child in module.named_children()]
        index = 0
        while index < len(children):
            last = index
            while last + 1 < len(children) and shape_of(children[last + 1]) == shape_of(children[index]):
                last += 1
            body = children[index]
            if last > index:
                marks = [re.search(r"<- unit (\d+)", child[0]) for child in (children[index], children[last])]
                units = f"  <- units {marks[0][1]} to {marks[1][1]}" if all(marks) else ""
                kind = body[0].split(": ")[1].split("  <-")[0]
                body = [f"{index}-{last}: {last - index + 1} x {kind}{units}", *body[1:]]
            head += ["  " + line for line in body]
            index = last + 1
        return head

    return describe(model, "")


def shape_of(lines: list[str]) -> list[str]:
    """A module's description without its own index and unit numbers: equal for repeated blocks."""
    return [re.sub(r"^( *)\d+:", r"\1#:", re.sub(r"<- unit \d+", "<- unit", line)) for line in lines]


def build_report(
    live: list[dict[str, Any]], recomputed: list[str], num_blocks: int, keys: dict[str, Any]
) -> dict[str, Any]:
    """Everything a person or a test needs to know about what was done to this model."""
    total = sum(unit["parameters"] for unit in live)
    root = sum(unit["parameters"] for unit in live if unit["modules"] == [""])
    return {
        "num_units": len(live),
        "num_blocks": num_blocks,
        "parameters": total,
        "trainable_parameters": sum(unit["trainable_parameters"] for unit in live),
        "share_left_in_root": root / total,
        "padding": sum(unit["gathered_parameters"] for unit in live) / total - 1,
        "largest_share_of_a_rank": sum(unit["parameters_on_first_rank"] for unit in live) / total,
        "smallest_share_of_a_rank": sum(unit["parameters_on_last_rank"] for unit in live) / total,
        "recomputed_blocks": recomputed,
        "units": live,
        "keys": keys,
    }


def summary_lines(report: dict[str, Any]) -> list[str]:
    """The report for the screen."""
    sizes = sorted(unit["parameters"] for unit in report["units"] if unit["modules"] != [""])
    spread = f"{sizes[0]:,} to {sizes[-1]:,} parameters each, " if sizes else ""
    lines = [
        f"FSDP: {report['num_units']} units (root included), {spread}{report['share_left_in_root']:.1%} in the root",
        f"padding: gathers move {report['padding']:.2%} more than the parameters; a rank holds "
        f"{report['smallest_share_of_a_rank']:.2%} to {report['largest_share_of_a_rank']:.2%} of them",
        f"recompute: {len(report['recomputed_blocks'])} of {report['num_blocks']} blocks",
    ]
    kinds: dict[str, int] = {}
    for unit in report["units"]:
        stored = "+".join(unit["stored_dtypes"])
        kind = f"stored {stored}, compute {unit['param_dtype']}, reduce {unit['reduce_dtype']}"
        kinds[kind] = kinds.get(kind, 0) + 1
    return lines + [f"dtypes of {count} unit(s): {kind}" for kind, count in kinds.items()]


@dataclass(frozen=True)
class WrapReport:
    """What the hooks did: for wrap_report.json, and in lines for the screen."""

    values: dict[str, Any]
    lines: list[str]


def report_wrap(model: nn.Module, plan: HookPlan, config: HookConfig, is_cpu: bool) -> WrapReport:
    """Read off the live model what the hooks did, with what the YAML asks for without effect.

    Raises:
        ValueError: the live model is not what was planned.
    """
    live = read_units(model)
    check_against_plan(live, plan.units, recomputed_blocks(model), plan.recomputed)
    values = build_report(live, plan.recomputed, count_blocks(model), as_plain_dict(config))
    found = [*warnings_for(values, model), *notes(config, is_cpu)]
    return WrapReport(values, [*module_tree(model, live), *summary_lines(values), *(f"note: {text}" for text in found)])


def save_report(report: WrapReport, output_dir: str) -> None:
    """Write wrap_report.json into the output folder."""
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    Path(output_dir, "wrap_report.json").write_text(json.dumps(report.values, indent=1) + "\n", encoding="utf-8")
