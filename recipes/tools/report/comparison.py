"""Several runs side by side: comparison.md and comparison.png."""

from pathlib import Path
from typing import Any

from training.run_files import write_whole

from .plots import draw_comparison
from .run_files import Run, read_run
from .run_report import table, verdict

COMPARED = ("status", "last logged step", "loss", "eval loss", "exact match")
COMPARED += ("speed", "memory of rank 0", "device", "time")
THE_RUNS_OWN = ("output_dir",)  # differs in any two runs


def names_of(folders: list[Path]) -> list[str]:
    """A name per run: its folder's, or the whole path where two folders have the same name."""
    names = [folder.resolve().name for folder in folders]
    return [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders)]


def settings_of(run: Run) -> dict[str, Any]:
    """Everything that may tell runs apart: --arguments, YAML keys, processes, versions."""
    facts = run.facts
    settings = {f"--{n}": value for n, value in facts.get("arguments", {}).items() if n not in THE_RUNS_OWN}
    for key, entry in facts.get("yaml", {}).items():
        settings[f"YAML {key}"] = entry["value"] if isinstance(entry, dict) else entry
    settings["processes"] = facts.get("num_processes", "unknown")
    return settings | {f"version of {name}": version for name, version in facts.get("versions", {}).items()}


def differing_settings(runs: list[Run]) -> dict[str, list[Any]]:
    """Settings that are not the same in all runs: name -> a value per run, "-" where a run does not have it."""
    settings = [settings_of(run) for run in runs]
    names = dict.fromkeys(name for of_run in settings for name in of_run)
    values = {name: [of_run.get(name, "-") for of_run in settings] for name in names}
    return {name: of_runs for name, of_runs in values.items() if any(value != of_runs[0] for value in of_runs)}


def compare_runs_report(folders: list[Path], output_dir: Path) -> str:
    """Write comparison.md and comparison.png: results, and only the settings that differ; returns a line that says
    where.

    Raises:
        ValueError: a folder is not that of a run; names it.
    """
    runs = [read_run(folder) for folder in folders]
    names, verdicts = names_of(folders), [verdict(run) for run in runs]
    output_dir.mkdir(parents=True, exist_ok=True)
    plot = output_dir / "comparison.png"
    is_drawn = draw_comparison(plot, {name: run.rows for name, run in zip(names, runs)})
    results = [(what, *(of_run[what] for of_run in verdicts)) for what in COMPARED]
    settings = [(name, *of_runs) for name, of_runs in differing_settings(runs).items()]
    lines = [f"# {len(runs)} runs", "", *table(("", *names), [*results, *settings])]
    lines += [f"![loss]({plot.name})", ""] if is_drawn else []
    write_whole(output_dir / "comparison.md", "\n".join(lines))
    return f"comparison: {output_dir / 'comparison.md'}"
