"""What a run's folder tells of it. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.run_files import read_metrics, read_object

Points = list[tuple[int, float]]  # (optimizer step, value)


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


def points(rows: list[dict[str, Any]], name: str) -> Points:
    """A quantity over steps: the rows of metrics.jsonl that hold it as a number."""
    return [(row["step"], row[name]) for row in rows if isinstance(row.get(name), (int, float))]
