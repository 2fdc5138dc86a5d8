"""The files of a run's folder: read, and written whole. Imports nothing heavy."""

import contextlib
import json
from pathlib import Path
from typing import Any


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


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its name, then rename it: a reader, or a kill, finds the old one or the new one."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8", errors="backslashreplace")
    beside.replace(path)
