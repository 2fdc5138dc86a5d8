"""The recipes' training loops beside others that do the same work (a section of bench.py).

Ratios of speed and of memory within one run on one machine; not a word about other machines. On a CPU, in fp32.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from statistics import median

from bench_start import seconds_to_first_step
from bench_turns import CHECKED, LOGGING_STEPS, PAIRS, TOLERANCE, Measured, run_in_turn, speed_ratio
from bench_work import SIZES, Loop
from launching import RECIPES

MIB = 2**20
SAME_UNITS = "finetune, embeddings apart"  # Accelerate's path wraps them apart in any model whose head is not tied
CONFIGS = {"finetune": "default", "finetune_mem_limit": "mem_limit", "finetune_performance": "performance"}
LOGITS_DOMINATE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 16384}


def contenders() -> Iterator[str]:
    """Step times, collectives and peak memory, one process and two, padded and packed; then what was asked for."""
    yield (
        f"Llama, hidden size {SIZES['hidden_size']}, {SIZES['num_hidden_layers']} layers, vocabulary "
        f"{SIZES['vocab_size']:,}, fp32, 8 rows of 256 tokens a step over all processes, fused AdamW, as many threads "
        f"as cores over all processes. Losses of the first {CHECKED} steps are equal to {TOLERANCE:.0e}."
    )
    yield (
        f"Each recipe runs with its own YAML (performance.yaml recomputes half the blocks, the others all). Speed is "
        f"tokens/s by the bare loop's: median of {PAIRS} pairs of steps taken in turn, [95% bounds]; a "
        f"{LOGGING_STEPS}th of a log line is part of each step. Memory: live tensor bytes at the peak of a step."
    )
    if find_spec("trl") is None:
        yield "TRL is not installed, so SFTTrainer is left out; the docstring of bench.py says how to add it."
    bars: list[str] = []
    for processes in (1, 2):
        for rows in ("padded", "packed"):
            measured = run_in_turn(loops_of(rows, processes))
            yield f"\n{processes} process{'es' if processes > 1 else ''}, {rows} rows{load()}"
            yield from table(measured)
            bars += bars_of(measured, f"{rows}, {processes} process{'es' if processes > 1 else ''}", rows)
    plain = Loop("finetune", sizes=LOGITS_DOMINATE, length=512)
    measured = run_in_turn({"finetune": plain, "finetune_mem_limit": replace(plain, runs="finetune_mem_limit")}, 5)
    yield f"\n1 process, 4,096 tokens, vocabulary {LOGITS_DOMINATE['vocab_size']:,}, hidden size 128: logits dominate"
    yield from table(measured)
    share = measured["finetune_mem_limit"].peak_bytes / measured["finetune"].peak_bytes
    bars.append(bar("peak of the loss in chunks by that of the plain loss", share, share <= 0.5, "at most 0.5"))
    yield "\nfrom start to the end of the first step, the embedded sample, medians of launches in turn"
    seconds = seconds_to_first_step()
    for name, values in seconds.items():
        yield f"{name:32} {median(values):6.2f} s"
    ratio, lower, _ = speed_ratio(seconds["Trainer"], seconds["finetune.py"])
    bars.append(bar("start to first step by Trainer's", ratio, lower <= 1.0, "at most 1.0", f"[{lower:.3f} ..]"))
    yield "\nbars (of a speed, the upper 95% bound counts)"
    yield from bars


def load() -> str:
    """How busy the machine was: this run alone makes a load of about as many as there are cores."""
    return f" (load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)"


def loops_of(rows: str, processes: int) -> dict[str, Loop]:
    """The contenders of one table, the bare loop first."""
    loops = {"bare": Loop("bare", rows, processes)}
    for name, config in CONFIGS.items():
        if (RECIPES / f"{name}.py").is_file():
            loops[name] = Loop(name, rows, processes, config)
    if processes > 1:
        loops[SAME_UNITS] = Loop("finetune", rows, processes, keys={"hook_wrap_embeddings": True})
        loops["accelerate"] = Loop("accelerate", rows, processes)
    else:
        loops["bare, fully_shard"] = Loop("bare", rows, is_sharded=True)
        loops["trainer"] = Loop("trainer", rows)
        if find_spec("trl") is not None:
            loops["sft_trainer"] = Loop("sft_trainer", rows)
    return loops


def table(measured: Mapping[str, Measured]) -> Iterator[str]:
    """One line per contender; ratios are to the first."""
    first = next(iter(measured.values()))
    heads = f"{'step':>7} {'speed':>6} {'[95% bounds]':>14} {'log line':>8} {'peak MiB':>9} {'ratio':>6}"
    yield f"{'':28} {heads}  collectives"
    for name, found in measured.items():
        ratio, lower, upper = speed_ratio(found.seconds, first.seconds)
        line = f"{name:28} {median(found.seconds):5.2f} s {ratio:6.3f} [{lower:.3f}, {upper:.3f}] "
        line += f"{found.log_line_s:6.3f} s {found.peak_bytes / MIB:9.1f} {found.peak_bytes / first.peak_bytes:6.3f}  "
        counts = [f"{number} {kind}" for kind, (number, _) in found.collectives.items() if number]
        size = sum(size for _, size in found.collectives.values()) / MIB
        yield line + (f"{', '.join(counts)}, {size:.1f} MiB" if counts else "none")


def bars_of(measured: Mapping[str, Measured], where: str, rows: str) -> Iterator[str]:
    """What was asked of finetune.py in this table."""
    ours = measured["finetune"]
    asked = {"bare": 0.97, "bare, fully_shard": 0.97, "trainer": 1.0, "sft_trainer": 1.8 if rows == "packed" else 1.3}
    for name in (name for name in asked if name in measured):
        ratio, lower, upper = speed_ratio(ours.seconds, measured[name].seconds)
        what, bounds = f"finetune.py by {name}, {where}", f"[{lower:.3f}, {upper:.3f}]"
        step_s = median(measured["bare"].seconds)
        note = "" if "bare" not in name or step_s > 0.5 else f" (a step takes {step_s:.2f} s; asked from 0.5 s on)"
        yield bar(what, ratio, upper >= asked[name], f"at least {asked[name]}", bounds) + note
    if "accelerate" in measured:
        apart, theirs = measured[SAME_UNITS], measured["accelerate"]
        ratio, lower, upper = speed_ratio(apart.seconds, theirs.seconds)
        bounds = f"[{lower:.3f}, {upper:.3f}]"
        yield f"{'':7} finetune.py by Accelerate's own FSDP2, same units, {where}: {ratio:.3f} {bounds} (no bar)"
        counts = [sum(run.collectives[kind][0] for kind in ("gathers", "scatters")) for run in (apart, theirs)]
        what = f"gathers and scatters per step, same units, {where}"
        yield bar(what, counts[0], counts[0] <= counts[1], f"at most Accelerate's {counts[1]}")


def bar(what: str, value: float, is_met: bool, asked: str, bounds: str = "") -> str:
    """One line: met or missed, what was asked and what was found."""
    shown = f"{value:.3f}" if isinstance(value, float) else str(value)
    return f"{'met' if is_met else 'MISSED':7} {what}: {shown} {bounds + ' ' if bounds else ''}({asked})"
