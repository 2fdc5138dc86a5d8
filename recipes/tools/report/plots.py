"""The plots of a run's report: what metrics.jsonl holds, over optimizer steps. Imports matplotlib where it draws."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Points = list[tuple[int, float]]  # (optimizer step, value)
FEW_POINTS = 40  # up to here each point gets a mark: a line through two or three does not show where they are
LOG_SCALE_FROM = 50  # largest over smallest value from which a gradient norm is easier to read on a logarithmic axis


@dataclass(frozen=True)
class Panel:
    """One pair of axes: lines over steps, and dashed levels."""

    label: str  # of the vertical axis, with its unit
    lines: dict[str, Points]
    levels: dict[str, float] = field(default_factory=dict)
    starts_at_zero: bool = False
    may_be_logarithmic: bool = False


def points(rows: list[dict[str, Any]], name: str) -> Points:
    """A quantity over steps: the rows of metrics.jsonl that hold it as a number."""
    return [(row["step"], row[name]) for row in rows if isinstance(row.get(name), (int, float))]


def finite(line: Points) -> Points:
    """The points that can be drawn."""
    return [(step, value) for step, value in line if math.isfinite(value)]


def as_label(name: str) -> str:
    """A name that matplotlib shows as it is: dollar signs mean mathematics to it, a leading underscore hides a line."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def draw(path: Path, title: str, panels: list[Panel]) -> bool:
    """Write a PNG of panels, one below the other. False, and an older file is removed, where there is nothing to draw.

    Raises:
        ImportError: matplotlib is not installed.
    """
    drawn = [panel for panel in panels if any(finite(line) for line in panel.lines.values())]
    if not drawn:
        path.unlink(missing_ok=True)
        return False
    # Not pyplot: it picks a backend, and keeps each figure alive.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 0.8 + 2.7 * len(drawn)), dpi=110, layout="constrained")
    figure.suptitle(as_label(title))
    all_axes = figure.subplots(len(drawn), sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(all_axes, drawn):
        draw_panel(axes, panel)
    all_axes[-1].set_xlabel("optimizer step")
    all_axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path)
    return True


def draw_panel(axes: Any, panel: Panel) -> None:
    """Draw the lines and levels of one panel into matplotlib's axes."""
    lines = {name: finite(line) for name, line in panel.lines.items() if finite(line)}
    for name, line in lines.items():
        mark = "o" if len(line) <= FEW_POINTS else ""
        axes.plot(*zip(*line), marker=mark, markersize=3.5, linewidth=1.3, label=as_label(name))
    for number, (name, level) in enumerate(panel.levels.items()):
        axes.axhline(level, linestyle=("--", ":")[number % 2], color="black", linewidth=1, label=as_label(name))
    if len(lines) + len(panel.levels) > 1:
        axes.legend(fontsize="small")
    values = [value for line in lines.values() for _, value in line]
    if panel.may_be_logarithmic and min(values) > 0 and max(values) / min(values) > LOG_SCALE_FROM:
        axes.set_yscale("log")
    elif panel.starts_at_zero:
        axes.set_ylim(bottom=0)
    if max(values) >= 1000:
        axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel(panel.label)
    axes.grid(alpha=0.3)


def draw_run(folder: Path, rows: list[dict[str, Any]], predicted: dict[str, float]) -> list[str]:
    """Write a run's plots into a folder; returns the names of those that have something to show. `predicted` names
    levels of memory, in GiB."""

    def lines(names: dict[str, str]) -> dict[str, Points]:
        return {label: points(rows, name) for label, name in names.items()}

    share = [(step, 100 * value) for step, value in points(rows, "data_share")]
    speed = {"all tokens": "tokens_per_second_per_gpu", "learnt tokens": "label_tokens_per_second_per_gpu"}
    memory = {"reserved, peak": "peak_mem_gib", "allocated, peak": "peak_allocated_gib"}
    memory |= {"live tensors": "live_tensors_gib", "process": "process_gib"}
    plots = {
        "loss.png": (
            "Loss",
            [Panel("loss per label token", lines({"train, mean since the last line": "loss", "eval": "eval_loss"}))],
        ),
        "speed.png": (
            "Speed",
            [
                Panel("tokens/s per process", lines(speed), starts_at_zero=True),
                Panel("waiting for data, % of time", {"data": share}, starts_at_zero=True),
            ],
        ),
        "optimization.png": (
            "Optimization",
            [
                Panel("learning rate", lines({"learning rate": "learning_rate"}), starts_at_zero=True),
                Panel("gradient norm before clipping", lines({"gradient norm": "grad_norm"}), may_be_logarithmic=True),
            ],
        ),
        "memory.png": ("Memory of rank 0", [Panel("GiB", lines(memory), predicted, starts_at_zero=True)]),
    }
    return [name for name, (title, panels) in plots.items() if draw(folder / name, title, panels)]


def draw_comparison(path: Path, rows_of_runs: dict[str, list[dict[str, Any]]]) -> bool:
    """Write a plot of the runs' losses, one line per run; False where no run has one."""
    labels = {"loss": "train loss per label token", "eval_loss": "eval loss per label token"}
    panels = [
        Panel(label, {run: points(rows, name) for run, rows in rows_of_runs.items()}) for name, label in labels.items()
    ]
    return draw(path, "Loss of the compared runs", panels)
