"""What profiled steps spent their time on, as shares that add up to 1, and what to try next.

Plain arithmetic on the profiler's events; nothing here needs torch. Times are in microseconds, as the profiler's are.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

Intervals = list[tuple[float, float]]  # in order, apart from one another

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

    def host_regions(*names: str) -> Intervals:
        return union(s for s in spans if not s.is_device and s.is_main and s.name.startswith(names))

    window = subtract(host_regions(STEP), host_regions(*NOT_COUNTED))
    data = host_regions(DATA)
    updates = union(s for s in spans if s.is_device == on_gpu and s.name.startswith((OPTIMIZER, CLIP)))
    work = union(span for span in spans if is_work(span, on_gpu))
    work = work if on_gpu else subtract(work, data)
    collectives = union(s for s in spans if s.is_device == on_gpu and is_collective(s))
    copies = union(s for s in spans if s.is_device and not s.is_region and s.name.startswith(COPIES))
    first_of = {
        "optimizer": intersect(work, updates),
        "computation": work,
        "exposed communication": collectives,
        "copies": copies,
        "data wait": data,
    }
    found, rest = {}, window
    for name, intervals in first_of.items():
        found[name] = length(intersect(rest, intervals))
        rest = subtract(rest, intervals)
    found["host"] = length(rest)
    return {
        **{name: found[name] for name in SHARES},
        "step": length(window),
        "communication": length(intersect(window, collectives)),
    }


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


def union(spans: Iterable[Span]) -> Intervals:
    """The time that any of these covers."""
    merged: Intervals = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def intersect(first: Intervals, second: Intervals) -> Intervals:
    """The time that both cover."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if end > start:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(first: Intervals, second: Intervals) -> Intervals:
    """The time that the first covers and the second does not."""
    if not first:
        return []
    edges = [first[0][0], *(edge for interval in second for edge in interval), first[-1][1]]
    gaps = [(start, end) for start, end in zip(edges[::2], edges[1::2]) if end > start]
    return intersect(first, gaps)


def length(intervals: Intervals) -> float:
    """Their time in all."""
    return sum(end - start for start, end in intervals)


@dataclass(frozen=True)
class Facts:
    """What advice is given on. The defaults are those of a run that needs none."""

    shares: dict[str, float]
    padding: float = 0.0  # share of the tokens run
    is_gpu: bool = True
    recomputed_blocks: int = 0
    num_blocks: int = 1
    num_units: int = 1
    wrap_policy: str = "TRANSFORMER_BASED_WRAP"
    blocks_per_unit: int = 1
    min_num_params: int = 0
    reduces_often: bool = False  # after each of several micro-batches
    packs: bool = False
    groups_by_length: bool = False
    compiles: bool | None = None  # None: the script has no such argument


def advice(facts: Facts) -> list[str]:
    """What to try, in this order: the price of recompute, units too fine, data, padding, micro-batches too small."""
    shares, found = facts.shares, []
    if facts.recomputed_blocks:
        found.append(
            f"{facts.recomputed_blocks} of {facts.num_blocks} blocks recompute: see what turning that off returns, and "
            "whether it fits, with compare.py --steps 5; then hook_checkpoint_every_n_blocks 2-4"
        )
    if shares["exposed communication"] > COMMUNICATION_LIMIT:
        found.append(
            f"communication holds up {shares['exposed communication']:.0%} of the step: {communication_advice(facts)}"
        )
    if shares["data wait"] > DATA_LIMIT:
        found.append(
            f"{shares['data wait']:.0%} of the step waits for rows: --dataloader_num_workers 2 or more; where rows are "
            "made before the first step, --dataset_num_proc"
        )
    if facts.padding > PADDING_LIMIT:
        how = "--packing, or --group_by_length"
        if facts.packs or facts.groups_by_length:
            how = "--packing" if facts.groups_by_length else "a --max_length that rows fill better"
        found.append(f"{facts.padding:.0%} of the tokens are padding: {how}")
    if shares["host"] > HOST_LIMIT:
        how = "a larger --per_device_train_batch_size"
        if facts.is_gpu and not facts.compiles:
            how += ", or --torch_compile" + (" (finetune_performance.py)" if facts.compiles is None else "")
        found.append(f"{shares['host']:.0%} of the step nothing runs, Python is behind: {how}")
    return found


def communication_advice(facts: Facts) -> str:
    """How to send less often."""
    ways = []
    if facts.wrap_policy == "SIZE_BASED_WRAP":
        ways.append(f"{facts.num_units} units are too fine, raise fsdp_min_num_params (now {facts.min_num_params:,})")
    elif facts.wrap_policy == "TRANSFORMER_BASED_WRAP" and facts.blocks_per_unit < MANY_BLOCKS:
        range_ = f"{max(2, 2 * facts.blocks_per_unit)}" + ("-4" if facts.blocks_per_unit == 1 else "")
        ways.append(f"{facts.num_units} units are too fine, hook_wrap_blocks_per_unit {range_}")
    if facts.reduces_often:
        ways.append("hook_reduce_every_micro_batch: false")
    return "; ".join(ways) or "a larger --per_device_train_batch_size computes more for what is sent"


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
