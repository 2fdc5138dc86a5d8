"""What recorded steps spent their time on: counted on every rank, put together, printed and written by rank 0."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from training.run_files import read_object

from .model_flops import CONVENTION, count_flops, peak_flops
from .profile_report import Facts, advice, combine, measure, profile_lines, profile_markdown, spans_of

Batch = dict[str, torch.Tensor]


def count(
    profile: torch.profiler.profile,
    recorded: list[Batch],
    num_steps: int,
    model: nn.Module,
    micro_batch_loss: Callable[..., Any],
) -> list[dict[str, Any]]:
    """Of each rank: time by what it went to, tokens, padding and model FLOPs of these micro-batches. A collective."""
    longest = max(recorded, key=lambda batch: batch["labels"].shape[1])
    per_token, squared = count_flops(model, micro_batch_loss, longest, longest["labels"].device)
    shapes = [batch["labels"].shape for batch in recorded]
    found: dict[str, Any] = {
        "measured": measure(spans_of(profile.events())),
        "steps": num_steps,
        "tokens": sum(rows * length for rows, length in shapes),
        "padding": sum(map(padding_tokens, recorded)),
        "flops": sum(rows * (per_token * length + squared * length**2) for rows, length in shapes),
    }
    ranks = [found] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    return ranks


def report(ranks: list[dict[str, Any]], output_dir: Path, device: torch.device, say: Callable[[str], object]) -> None:
    """Print the profile with what to try, and write it beside the trace."""
    if not all(rank["measured"]["step"] for rank in ranks):
        say("nothing was recorded: torch's profiler returned no step")
        return
    found = combine(ranks)
    try:
        wrap = json.loads((output_dir / "wrap_report.json").read_text(encoding="utf-8"))
        keys = {name: key["value"] for name, key in wrap["keys"].items()}
        peak = None
        if device.type == "cuda" and keys["hook_param_dtype"] != "fp32":
            peak = peak_flops(torch.cuda.get_device_name(device))
        flops = found["model_flops_per_second_per_rank"]
        found |= {"model_flop_utilisation": flops / peak if peak else None, "peak_flops": peak}
        arguments = read_object(output_dir / "run.json")["arguments"]
        found |= {"convention": CONVENTION, "advice": advice(facts(found, wrap, keys, arguments, device))}
        folder = output_dir / "profile"
        say("\n".join([*profile_lines(found), f"trace for https://ui.perfetto.dev, and tables: {folder}"]))
        (folder / "profile.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (folder / "profile.md").write_text(profile_markdown(found), encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:  # of a full disk; it does not end the run
        say(f"the profile could not be written: {type(error).__name__}: {error}")


def facts(
    found: dict[str, Any], wrap: dict[str, Any], keys: dict[str, Any], arguments: dict[str, Any], device: torch.device
) -> Facts:
    """What the advice needs to know of this run; `wrap` is its wrap_report.json."""
    return Facts(
        shares=found["shares"],
        padding=found["padding_share"],
        is_gpu=device.type != "cpu",
        recomputed_blocks=len(wrap["recomputed_blocks"]),
        num_blocks=wrap["num_blocks"],
        num_units=wrap["num_units"],
        wrap_policy="" if keys["hook_wrap_function"] else keys["fsdp_auto_wrap_policy"],
        blocks_per_unit=keys["hook_wrap_blocks_per_unit"],
        min_num_params=keys["fsdp_min_num_params"],
        reduces_often=keys["hook_reduce_every_micro_batch"] and arguments["gradient_accumulation_steps"] > 1,
        packs=arguments["packing"],
        groups_by_length=arguments["group_by_length"],
        compiles=arguments.get("torch_compile"),
    )


def padding_tokens(batch: Batch) -> int:
    """How many tokens of a micro-batch are padding. Packed rows have no mask: there it is the last document of a row,
    one token over and over without a label."""
    if "attention_mask" in batch:
        return int((batch["attention_mask"] == 0).sum())
    ids, labels, positions = batch["input_ids"], batch["labels"], batch["position_ids"]
    length = ids.shape[1]
    first = length - 1 - (positions == 0).flip(1).int().argmax(1, keepdim=True)  # (B, 1), of the last document
    is_last = torch.arange(length, device=ids.device) >= first  # (B, T)
    differs = is_last & ((ids != ids[:, -1:]) | (labels >= 0))
    return int((is_last & ~differs.any(1, keepdim=True)).sum())
