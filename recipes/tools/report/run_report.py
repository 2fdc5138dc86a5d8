"""report.md and its plots: what a run did, from the files in its folder alone, so that it can be made again.

Imports neither torch nor, before it draws, matplotlib.
"""

import math
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from training.run_files import read_metrics, read_object, write_whole

from .plots import Points, draw_run, points

GIB = 2**30
KILLED = "running, or killed: its end was never written"


@dataclass(frozen=True)
class Run:
    """What is known of a run; a file that is not there is an empty dict."""

    folder: Path
    rows: list[dict[str, Any]]  # metrics.jsonl
    facts: dict[str, Any]  # run.json
    wrap: dict[str, Any]  # wrap_report.json
    plan: dict[str, Any]  # plan.json: what was predicted


def read_run(folder: Path) -> Run:
    """Read a run's folder. Raises ValueError where it is none, or where a file in it is not what a run writes."""
    if not any((folder / name).is_file() for name in ("metrics.jsonl", "run.json")):
        raise ValueError(f"{folder} is not the output folder of a run: it holds neither metrics.jsonl nor run.json.")
    objects = (read_object(folder / f"{name}.json") for name in ("run", "wrap_report", "plan"))
    return Run(folder, read_metrics(folder / "metrics.jsonl"), *objects)


def cell(value: Any) -> str:
    """A value as the text of one table cell, whatever is in it: bars, line ends, markup."""
    text = re.sub(r"([\\|`*])", r"\\\1", str(value).replace("&", "&amp;").replace("<", "&lt;"))
    return "<br>".join(text.splitlines())


def table(head: Sequence[Any], rows: Iterable[Iterable[Any]]) -> list[str]:
    """A Markdown table, and an empty line after it."""
    lines = ["| " + " | ".join(map(cell, row)) + " |" for row in (head, *rows)]
    return [lines[0], "|" + "---|" * len(head), *lines[1:], ""]


def fenced(text: str) -> list[str]:
    """Text as it is, between fences longer than any in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return [fence, text, fence, ""]


def details(summary: str, lines: list[str]) -> list[str]:
    """Lines that are folded away until they are asked for."""
    return [f"<details><summary>{summary}</summary>", "", *lines, "</details>", ""]


def first_to_last(line: Points) -> str:
    """Where a quantity began and ended."""
    if not line:
        return "not measured"
    (first_step, first), (last_step, last) = line[0], line[-1]
    return f"{first:.5g} (step {first_step})" + (f" -> {last:.5g} (step {last_step})" if len(line) > 1 else "")


def status_of(run: Run) -> str:
    """How the run ended, in one line: of a traceback the one that names the error."""
    status = run.facts.get("status", "unknown: no run.json")
    errors = re.findall(r"^\w[\w.]*(?:Error|Exception)\b.*", status, re.MULTILINE)
    if "Traceback (most recent call last)" in status and errors:
        return f"failed: {errors[-1]}"
    return KILLED if status == "running" else status.partition("\n")[0]


def eval_loss_of(run: Run) -> str:
    """The first and the last eval loss, and the lowest."""
    line = points(run.rows, "eval_loss")
    numbers = [point for point in line if math.isfinite(point[1])]
    step, lowest = min(numbers, key=lambda point: point[1], default=(0, math.nan))
    return first_to_last(line) + (f", lowest {lowest:.5g} (step {step})" if len(line) > 1 else "")


def exact_match_of(run: Run) -> str:
    """The share of exact answers; a resumed run did not answer before it began."""
    before, after = (points(run.rows, f"exact_match_{when}") for when in ("before", "after"))
    if not after:
        return "not measured"
    return (f"{before[0][1]:.1%} before -> " if before else "") + f"{after[-1][1]:.1%} after"


def speed_of(run: Run) -> str:
    """Medians over the log lines: the first of them hold warm-up and compilation."""
    names = "tokens_per_second_per_gpu", "label_tokens_per_second_per_gpu", "step_time_s", "data_share"
    lines = [[value for _, value in points(run.rows, name)] for name in names]
    if not all(lines):
        return "not measured"
    tokens, labels, seconds, share = map(median, lines)
    ranks = run.facts.get("num_processes")
    where = f" on {ranks} process(es)" if ranks else ""
    return f"{tokens:,.0f} tok/s/gpu (label {labels:,.0f}){where}, {seconds:.3f} s per step, data {share:.0%}"


def largest(run: Run, name: str) -> float | None:
    """The largest value of a quantity, None if it was not measured."""
    return max((value for _, value in points(run.rows, name)), default=None)


def memory_of(run: Run) -> str:
    """The peak on a GPU; on a CPU the largest of what the log lines found between steps."""
    names = {"peak_mem_gib": "reserved", "peak_allocated_gib": "allocated"}
    names |= {"live_tensors_gib": "in live tensors", "process_gib": "of the process"}
    found = [f"{largest(run, name):.3f} GiB {what}" for name, what in names.items() if largest(run, name) is not None]
    retries = largest(run, "num_alloc_retries")
    found += [] if retries is None else [f"{retries} allocator retries"]
    return ", ".join(found) or "not measured"


def predicted_memory(run: Run) -> dict[str, float]:
    """What was predicted, in GiB: its name -> peak. On a CPU there is no reserved memory."""
    step = run.plan.get("step") or {}
    found = {"predicted reserved peak": step.get("reserved"), "predicted allocated peak": step.get("peak")}
    if largest(run, "live_tensors_gib") is not None:
        found = {"predicted peak": step.get("peak")}
    return {name: value / GIB for name, value in found.items() if value}


def prediction_of(run: Run) -> str:
    """The predicted peak beside the measured one."""
    measured = {"predicted reserved peak": "peak_mem_gib", "predicted allocated peak": "peak_allocated_gib"}
    found = []
    for name, predicted in predicted_memory(run).items():
        value = largest(run, measured.get(name, ""))
        is_off = "" if value is None else f", measured {value:.3f} GiB ({value / predicted - 1:+.0%})"
        found.append(f"{name} {predicted:.3f} GiB{is_off or ', not measured on a CPU (live tensors, between steps)'}")
    return "; ".join(found) or "none (no plan.json)"


def time_of(run: Run) -> str:
    """When the run was started, and how long it took."""
    started, ended = run.facts.get("started"), run.facts.get("ended")
    if not (started and ended):
        return started or "unknown"
    return f"{started}, {datetime.fromisoformat(ended) - datetime.fromisoformat(started)} h:m:s"


def verdict(run: Run) -> dict[str, str]:
    """What a reader wants to know first: its name -> a line."""
    steps, first = max((row["step"] for row in run.rows), default=0), run.facts.get("first_step")
    resumed = f", resumed at step {first}" if first else ""
    return {
        "status": status_of(run),
        "last logged step": f"{steps} of {run.facts.get('total_steps', 'unknown')}{resumed}",
        "loss": first_to_last(points(run.rows, "loss")),
        "eval loss": eval_loss_of(run),
        "exact match": exact_match_of(run),
        "speed": speed_of(run),
        "memory of rank 0": memory_of(run),
        "predicted memory": prediction_of(run),
        "device": str(run.facts.get("device", "unknown")),
        "time": time_of(run),
    }


def wrap_section(wrap: dict[str, Any]) -> list[str]:
    """What FSDP did: units, parameters, recompute."""
    if not wrap:
        return []
    sizes = [unit["parameters"] for unit in wrap["units"] if unit["modules"] != [""]]
    spread = f"{min(sizes):,} to {max(sizes):,}" if sizes else "one unit, the root"
    recomputed = wrap["recomputed_blocks"]
    rows = [
        ("units, the root included", wrap["num_units"]),
        ("parameters", f"{wrap['parameters']:,}, of which {wrap['trainable_parameters']:,} are trained"),
        ("parameters per unit", spread),
        ("share left in the root", f"{wrap['share_left_in_root']:.1%}"),
        ("padding that gathers move", f"{wrap['padding']:.2%}" if "padding" in wrap else "not recorded"),
        ("blocks that recompute", f"{len(recomputed)} of {wrap['num_blocks']}"),
    ]
    head = ("modules", "parameters", "freed after forward", "compute", "reduce")
    names = ("reshard_after_forward", "param_dtype", "reduce_dtype")
    units = [
        (", ".join(unit["modules"]) or "the root", f"{unit['parameters']:,}", *(unit[name] for name in names))
        for unit in wrap["units"]
    ]
    return ["## What FSDP did", "", *table(("", ""), rows), *details("All units", table(head, units))]


def plan_section(run: Run) -> list[str]:
    """The parts of the predicted peak."""
    parts = (run.plan.get("step") or {}).get("parts")
    if not parts:
        return []
    rows = [(name, f"{size / GIB:.3f}") for name, size in parts.items()]
    where = f"At: {cell(run.plan['step'].get('peak_at', 'unknown'))}"
    return ["## Predicted memory by part", "", where, "", *table(("part", "GiB"), rows)]


def arguments_section(facts: dict[str, Any]) -> list[str]:
    """The command, the arguments that are not the defaults, and the YAML's keys; all of them folded away."""
    values, defaults, yaml = (facts.get(name, {}) for name in ("arguments", "defaults", "yaml"))
    keys = {key: entry for key, entry in yaml.items() if isinstance(entry, dict)}
    changed = [(f"--{n}", v, defaults.get(n)) for n, v in values.items() if n not in defaults or v != defaults[n]]
    chosen = [(key, entry["value"], entry["origin"]) for key, entry in keys.items() if entry["origin"] != "default"]
    every = [(f"--{name}", value, defaults.get(name)) for name, value in values.items()]
    all_keys = [(key, entry["value"], entry["origin"]) for key, entry in keys.items()]
    heads = ("argument", "value", "default"), ("key", "value", "from")
    return [
        *("## Arguments", ""),
        *fenced(shlex.join(facts.get("command", []))),
        *table(heads[0], changed),
        *details("All arguments", table(heads[0], every)),
        *(f"## YAML: {cell(yaml.get('path', 'unknown'))}", ""),
        *table(heads[1], chosen),
        *details("All keys", table(heads[1], all_keys)),
    ]


def report_text(run: Run, plots: list[str]) -> str:
    """The report; `plots` names the PNG files beside it."""
    facts, status = run.facts, run.facts.get("status", "")
    lines = [f"# Run {cell(run.folder.resolve().name)}", "", *table(("", ""), verdict(run).items())]
    lines += fenced(status) if "\n" in status.strip() else []
    lines += [line for name in plots for line in (f"![{name.removesuffix('.png')}]({name})", "")]
    lines += [*wrap_section(run.wrap), *plan_section(run)]
    if facts:
        lines += ["## Data", "", *fenced("\n".join(facts.get("data", []))), *arguments_section(facts)]
        lines += ["## Versions", "", *table(("", ""), facts.get("versions", {}).items())]
    samples = facts.get("samples")
    lines += ["## Samples", "", *fenced(samples)] if samples else []
    return "\n".join(lines)


def write_report(folder: Path, output_dir: Path | None = None) -> str:
    """Make report.md and its plots from a run's folder, into it or into `output_dir`; returns a line that says where.

    Raises:
        ValueError: the folder is not that of a run, or a file in it cannot be read.
    """
    run, target, problem = read_run(folder), output_dir or folder, ""
    target.mkdir(parents=True, exist_ok=True)
    try:
        plots = draw_run(target, run.rows, predicted_memory(run))
    except Exception as error:  # matplotlib is missing, or the disk is full: the text is worth having without them
        plots, problem = [], f" (without plots: {error})"
    write_whole(target / "report.md", report_text(run, plots))
    return f"report: {target / 'report.md'}{problem}"
