"""What recorded steps spent their time on, as shares that add up to 1, and what to try next: counted on every rank, put
together, printed and written by rank 0. Times are in microseconds, as the profiler's are.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from training.run_files import read_object

from .model_flops import CONVENTION, count_flops, peak_flops

Batch = dict[str, torch.Tensor]

STEP, DATA, CLIP, OPTIMIZER = "ProfilerStep", "recipe: reading the data", "recipe: clipping", "Optimizer.step#"
NOT_COUNTED = ("recipe: evaluation", "recipe: saving", "recipe: memory")  # between two steps, and no part of either
COLLECTIVES = ("nccl", "rccl", "xccl", "gloo:", "mpi:")  # a device's kernels, and gloo's work on its own thread
COPIES = ("Memcpy", "Memset")
# Operators that hold others, or wait for a collective.
NO_WORK = ("c10d::", "_c10d_functional::", "autograd::", "torch::autograd::", "profiler::", *COLLECTIVES)
COMPILED = ("Torch-Compiled Region", "CompiledFunctionBackward")
SHARES = ("computation", "exposed communication", "data wait", "optimizer", "copies", "host")

COMMUNICATION_LIMIT, DATA_LIMIT, PADDING_LIMIT, HOST_LIMIT = 0.25, 0.05, 0.20, 0.20
MANY_BLOCKS = 4  # per unit: the guide's range ends here


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
        found |= {"convention": CONVENTION, "advice": advice(found, wrap, keys, arguments, device.type != "cpu")}
        folder = output_dir / "profile"
        say("\n".join([*profile_lines(found), f"trace for https://ui.perfetto.dev, and tables: {folder}"]))
        (folder / "profile.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (folder / "profile.md").write_text(profile_markdown(found), encoding="utf-8")
    except (OSError, ValueError, KeyError) as error:  # of a full disk; it does not end the run
        say(f"the profile could not be written: {type(error).__name__}: {error}")


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


class Span(NamedTuple):
    """Something that took time. A region is a name that code gave to a stretch of time, and no work itself."""

    name: str
    start: float
    end: float
    is_device: bool = False  # on a GPU's stream
    is_region: bool = False
    is_main: bool = True  # on the thread that runs the loop


def spans_of(events: Iterable[Any]) -> list[Span]:
    """The spans of torch's FunctionEvents."""
    events = list(events)
    main = {event.thread for event in events if event.name.startswith(STEP) and event.device_type.name == "CPU"}
    return [
        Span(
            event.name,
            event.time_range.start,
            event.time_range.end,
            is_device=event.device_type.name != "CPU",
            is_region=bool(event.is_user_annotation),
            is_main=event.thread in main,
        )
        for event in events
    ]


def measure(spans: list[Span]) -> dict[str, float]:
    """Microseconds of the recorded steps by what they went to (SHARES), in all ("step"), and in collectives whether
    hidden or not ("communication").

    Each moment counts once, for the first that applies: the optimizer's or any other computation runs; a collective
    runs; only a copy between host and device runs; the loop reads rows. What is left is the host's: nothing runs.
    On a GPU what runs is kernels on any stream, else operators on the thread of the loop.
    """
    on_gpu = any(span.is_device and not span.is_region for span in spans)
    edges = np.unique([edge for span in spans for edge in (span.start, span.end)])
    stretches = np.diff(edges)  # from each edge to the next: what runs changes only there

    def during(some: Iterable[Span]) -> np.ndarray:
        """Of each stretch, whether any of these runs in it."""
        starts, ends = np.array([(span.start, span.end) for span in some]).reshape(-1, 2).T
        changes = np.zeros(len(edges), dtype=int)
        np.add.at(changes, np.searchsorted(edges, starts), 1)
        np.add.at(changes, np.searchsorted(edges, ends), -1)
        return changes.cumsum()[:-1] > 0

    def in_host_regions(*names: str) -> np.ndarray:
        return during(s for s in spans if not s.is_device and s.is_main and s.name.startswith(names))

    data = in_host_regions(DATA)
    updates = during(s for s in spans if s.is_device == on_gpu and s.name.startswith((OPTIMIZER, CLIP)))
    work = during(s for s in spans if is_work(s, on_gpu))
    work = work if on_gpu else work & ~data
    collectives = during(s for s in spans if s.is_device == on_gpu and is_collective(s))
    copies = during(s for s in spans if s.is_device and not s.is_region and s.name.startswith(COPIES))
    window = in_host_regions(STEP) & ~in_host_regions(*NOT_COUNTED)
    taken = {"step": window, "communication": window & collectives}
    rest = window
    for name, runs in (
        ("optimizer", work & updates),
        ("computation", work),
        ("exposed communication", collectives),
        ("copies", copies),
        ("data wait", data),
    ):
        taken[name], rest = rest & runs, rest & ~runs
    taken["host"] = rest
    return {name: float(stretches[taken[name]].sum()) for name in (*SHARES, "step", "communication")}


def is_collective(span: Span) -> bool:
    """True for a collective that runs. On a device a region of that name surrounds the kernel."""
    return span.name.startswith(COLLECTIVES) and not (span.is_device and span.is_region)


def is_work(span: Span, on_gpu: bool) -> bool:
    """True for computation: a kernel on a device, else an operator on the thread of the loop."""
    if on_gpu:
        return span.is_device and not span.is_region and not span.name.startswith((*COLLECTIVES, *COPIES))
    if not span.is_main or span.is_device:
        return False
    return span.name.startswith(COMPILED) or (
        "::" in span.name and not span.is_region and not span.name.startswith(NO_WORK)
    )


def advice(
    profile: dict[str, Any], wrap: dict[str, Any], keys: dict[str, Any], arguments: dict[str, Any], is_gpu: bool
) -> list[str]:
    """What to try, in this order: the price of recompute, units too fine, data, padding, micro-batches too small.

    `wrap` is the run's wrap_report.json, `keys` are its YAML's, `arguments` the script's own.
    """
    shares, padding, found = profile["shares"], profile["padding_share"], []
    if wrap["recomputed_blocks"]:
        found.append(
            f"{len(wrap['recomputed_blocks'])} of {wrap['num_blocks']} blocks recompute: see what turning that off "
            "returns, and whether it fits, with compare.py --steps 5; then hook_checkpoint_every_n_blocks 2-4"
        )
    if shares["exposed communication"] > COMMUNICATION_LIMIT:
        how = "; ".join(ways_to_send_less(wrap["num_units"], keys, arguments["gradient_accumulation_steps"]))
        how = how or "a larger --per_device_train_batch_size computes more for what is sent"
        found.append(f"communication holds up {shares['exposed communication']:.0%} of the step: {how}")
    if shares["data wait"] > DATA_LIMIT:
        found.append(
            f"{shares['data wait']:.0%} of the step waits for rows: --dataloader_num_workers 2 or more; where rows are "
            "made before the first step, --dataset_num_proc"
        )
    if padding > PADDING_LIMIT:
        how = "--packing, or --group_by_length"
        if arguments["packing"] or arguments["group_by_length"]:
            how = "--packing" if arguments["group_by_length"] else "a --max_length that rows fill better"
        found.append(f"{padding:.0%} of the tokens are padding: {how}")
    if shares["host"] > HOST_LIMIT:
        how = "a larger --per_device_train_batch_size"
        if is_gpu and not arguments.get("torch_compile"):
            how += ", or --torch_compile" + ("" if "torch_compile" in arguments else " (finetune_performance.py)")
        found.append(f"{shares['host']:.0%} of the step nothing runs, Python is behind: {how}")
    return found


def ways_to_send_less(num_units: int, keys: dict[str, Any], accumulation: int) -> list[str]:
    """Coarser units, where blocks or sizes decide them; one reduction a step."""
    ways, blocks = [], keys["hook_wrap_blocks_per_unit"]
    policy = None if keys["hook_wrap_function"] else keys["fsdp_auto_wrap_policy"]
    if policy == "SIZE_BASED_WRAP":
        ways.append(f"{num_units} units are too fine, raise fsdp_min_num_params (now {keys['fsdp_min_num_params']:,})")
    elif policy == "TRANSFORMER_BASED_WRAP" and blocks < MANY_BLOCKS:
        coarser = "2-4" if blocks == 1 else 2 * blocks
        ways.append(f"{num_units} units are too fine, hook_wrap_blocks_per_unit {coarser}")
    if keys["hook_reduce_every_micro_batch"] and accumulation > 1:
        ways.append("hook_reduce_every_micro_batch: false")
    return ways


def combine(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One profile from what each rank found: `measured` (of `measure`), `steps`, `tokens`, `padding`, `flops`.

    Shares are means over ranks; a rank that waits for a slower one shows it as exposed communication.
    """
    per_rank = [{name: rank["measured"][name] / rank["measured"]["step"] for name in SHARES} for rank in ranks]
    seconds = sum(rank["measured"]["step"] for rank in ranks) / len(ranks) / 1e6
    tokens, steps = sum(rank["tokens"] for rank in ranks), ranks[0]["steps"]
    hidden = [rank["measured"]["communication"] / rank["measured"]["step"] for rank in ranks]
    return {
        "steps": steps,
        "ranks": len(ranks),
        "step_time_s": seconds / steps,
        "shares": {name: sum(shares[name] for shares in per_rank) / len(ranks) for name in SHARES},
        "communication": sum(hidden) / len(ranks),
        "shares_per_rank": per_rank,
        "tokens": tokens,
        "padding_share": sum(rank["padding"] for rank in ranks) / tokens,
        "tokens_per_second": tokens / seconds,
        "model_flops_per_second_per_rank": sum(rank["flops"] for rank in ranks) / seconds / len(ranks),
    }


def profile_lines(profile: dict[str, Any]) -> list[str]:
    """The profile for the screen."""
    shares = [f"{name} {share:.1%}" for name, share in profile["shares"].items()]
    shares[1] += f" (of {profile['communication']:.1%})"
    flops, use = profile["model_flops_per_second_per_rank"], profile["model_flop_utilisation"]
    speed = f"{profile['tokens_per_second']:,.0f} tokens/s, {profile['padding_share']:.1%} of them padding"
    return [
        f"profile: {profile['steps']} step(s) of {profile['step_time_s']:.3f} s (the profiler slows them) on "
        f"{profile['ranks']} rank(s)",
        " | ".join(shares),
        f"{speed} | {flops / 1e12:.3g} model TFLOP/s per rank"
        + (f", {use:.1%} of the device's peak in bf16" if use is not None else ""),
        profile["convention"],
        *(f"try: {text}" for text in profile["advice"]),
    ]


def profile_markdown(profile: dict[str, Any]) -> str:
    """The same with each share's lowest and highest rank."""
    rows = ["| share of the step | mean | lowest rank | highest rank |", "|---|---|---|---|"]
    for name, share in profile["shares"].items():
        values = [shares[name] for shares in profile["shares_per_rank"]]
        rows.append(f"| {name} | {share:.1%} | {min(values):.1%} | {max(values):.1%} |")
    first, _, *rest = profile_lines(profile)
    return "\n\n".join([first, "\n".join(rows), *rest]) + "\n"
