"""Which files of a folder are data, and which split each belongs to; nothing is read here."""

import os
import re
from pathlib import Path
from typing import Any

TEXT_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
DATA_FILES = (*TEXT_FILES, ".parquet")
# Files that hold rows which cannot be read here: beside others they would be left out of the training.
PACKED_FILES = (
    *(".gz", ".zst", ".zstd", ".bz2", ".xz", ".lz4", ".zip", ".7z", ".tar", ".tgz"),
    *(".arrow", ".feather", ".pq", ".orc", ".avro", ".xls", ".xlsx"),
)
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
NO_DATA = ("readme", "license", "licence", "notice")  # how the names of files begin that nobody takes for rows
SPLITS = {  # names of the same split
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval"),
    "test": ("test",),
}


def find_split(splits: dict[str, Any], wanted: str, taken: str | None = None) -> str | None:
    """The key of a split under this or another of its names; a validation split where `test` is wanted and absent."""
    same = next((names for names in SPLITS.values() if wanted in names), (wanted,))
    others = SPLITS["validation"] if wanted == "test" else ()
    return next((name for name in (wanted, *same, *others) if name in splits and name != taken), None)


def is_saved(folder: Path) -> bool:
    """True for what `save_to_disk` wrote."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def files_inside(folder: Path) -> list[Path]:
    """All files at any depth but hidden ones, sorted; links to folders are followed, each folder once."""
    inside, visited = [], set()
    for place, folders, files in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside += [Path(place, name) for name in files if not name.startswith(".")]
    return sorted(file for file in inside if file.is_file())


def files_by_split(folder: Path) -> dict[str, list[Path]]:
    """The data files of a folder, each in the split that its own name says, else its folder's, else in `train`.

    Raises:
        ValueError: no data file, files that are packed, or loose text beside structured rows.
    """
    inside = files_inside(folder)
    packed = [file.name for file in inside if file.suffix.lower() in PACKED_FILES]
    files = [file for file in inside if file.suffix.lower() in DATA_FILES and file.name not in METADATA]
    kinds = {file.suffix.lower() == ".txt" for file in files}
    if packed or not files or len(kinds) > 1:
        found = f"packed files ({packed[0]})" if packed else "text files beside structured ones" if files else "none"
        raise ValueError(
            f"--dataset_name {folder}: the folder should hold data files ({', '.join(DATA_FILES)}); found {found}"
        )
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(split_of([*file.relative_to(folder).parts[:-1], file.stem]), []).append(file)
    return by_split


def ignored_files(folder: Path) -> list[str]:
    """Names of the files of a folder that are not read, but for those that hold no rows by their name."""
    names = [str(file.relative_to(folder)) for file in files_inside(folder) if file.suffix.lower() not in DATA_FILES]
    return [name for name in names if not Path(name).name.lower().startswith(NO_DATA)]


def split_of(names: list[str]) -> str:
    """The split that the last of these names with a split's word in it names first."""
    for name in reversed(names):
        words = re.split(r"[^a-z]+", name.lower())
        found = [split for word in words for split, same in SPLITS.items() if word in same]
        if found:
            return found[0]
    return "train"
