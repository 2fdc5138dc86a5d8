"""The files of a run's folder that its report is made of: read, and written whole. Imports nothing heavy."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; one that a kill left unfinished is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and isinstance(row.get("step"), int)]


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file (of a list of them the first), empty where there is no file.

    Raises:
        ValueError: it holds something else; names the file.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not readable: {error}") from error
    value = value[0] if isinstance(value, list) and value else value
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected an object, found {type(value).__name__}.")
    return value


def points(rows: list[dict[str, Any]], name: str) -> Points:
    """A quantity over steps: the rows of metrics.jsonl that hold it as a number."""
    return [(row["step"], row[name]) for row in rows if isinstance(row.get(name), (int, float))]


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its name, then rename it: a reader, or a kill, finds the old one or the new one."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8", errors="backslashreplace")
    beside.replace(path)
