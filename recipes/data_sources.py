"""Where rows come from: files, folders, saved data sets, the hub; several of them, with weights.

Rows of text files stay as they were written, a JSON string each (data_files.py); others are what Arrow made of them.
"""

import glob
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from data_files import all_rows, digest_of
from data_formats import PROBLEM, ROW, WHERE
from datasets import Dataset, DatasetDict, concatenate_datasets, load_dataset, load_from_disk

TEXT_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
DATA_FILES = (*TEXT_FILES, ".parquet")
PACKED_FILES = (".gz", ".zst", ".bz2", ".xz", ".zip", ".arrow")
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
SPLITS = {  # names of the same split
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval"),
    "test": ("test",),
}
LARGEST_WEIGHT = 1000


def load_rows(
    names: list[str],
    train_split: str,
    test_split: str,
    weights: list[float] | None = None,
    validation_percentage: float = 0.0,
    seed: int = 0,
) -> tuple[Dataset, Dataset | None]:
    """Load all sources; return (train, test or None).

    A source's weight says how often each of its training rows is seen per epoch: 0.5 takes a random half, 2 takes each
    twice. Without a test split, `validation_percentage` of the training rows become one, before any is repeated.

    Raises:
        ValueError: no such data set or split, a folder without data, weights that do not match or leave no row.
    """
    weights = weights or [1.0] * len(names)
    if len(weights) != len(names):
        raise ValueError(f"--dataset_weights: found {len(weights)} for {len(names)} data sets of --dataset_name.")
    loaded = [load_source(name, train_split) for name in names]
    trains = [pick_split(name, splits, train_split) for name, splits in zip(names, loaded)]
    tests = [splits[split] for splits in loaded if (split := find_split(splits, test_split, train_split))]
    if not tests and validation_percentage:
        parts = [hold_out(name, rows, validation_percentage, seed) for name, rows in zip(names, trains)]
        trains, tests = [part["train"] for part in parts], [part["test"] for part in parts]
    generator = np.random.default_rng(seed)
    repeated = [repeat(name, rows, weight, generator) for name, rows, weight in zip(names, trains, weights)]
    return join(repeated, names), join(tests, names) if tests else None


def pick_split(name: str, splits: dict[str, Dataset], wanted: str) -> Dataset:
    """The rows of a split. Raises ValueError if there is none of that name."""
    found = find_split(splits, wanted)
    if found is None:
        raise ValueError(f"--dataset_name {name} has no split {wanted!r}; it has: {', '.join(splits)}.")
    return splits[found]


def find_split(splits: dict[str, Any], wanted: str, taken: str | None = None) -> str | None:
    """The key of a split under this or another of its names; a validation split where `test` is wanted and absent."""
    same = next((names for names in SPLITS.values() if wanted in names), (wanted,))
    others = SPLITS["validation"] if wanted == "test" else ()
    return next((name for name in (wanted, *same, *others) if name in splits and name != taken), None)


def hold_out(name: str, rows: Dataset, percentage: float, seed: int) -> DatasetDict:
    """A random part of the rows as test split."""
    if len(rows) * percentage / 100 < 0.5 or len(rows) < 2:
        raise ValueError(f"--validation_split_percentage {percentage}: leaves no row of {name}, which has {len(rows)}.")
    return rows.train_test_split(test_size=max(1, round(len(rows) * percentage / 100)), seed=seed)


def join(parts: list[Dataset], names: list[str]) -> Dataset:
    """One data set of several."""
    if len(parts) == 1:
        return parts[0]
    return concatenate_datasets([as_json_rows(part, name) for part, name in zip(parts, names)])


def repeat(name: str, rows: Dataset, weight: float, generator: np.random.Generator) -> Dataset:
    """Whole copies of the rows, and of a random part what is left of the weight."""
    if weight == 1.0:
        return rows
    if not 0 < weight <= LARGEST_WEIGHT or round(weight * len(rows)) < 1:
        raise ValueError(
            f"--dataset_weights: {weight} of the {len(rows)} rows of {name}; allowed: up to {LARGEST_WEIGHT}, and at "
            "least one row"
        )
    rest = generator.permutation(len(rows))[: round((weight % 1) * len(rows))]
    return rows.select(np.concatenate([np.tile(np.arange(len(rows)), int(weight)), np.sort(rest)]).astype(int))


def load_source(name: str, train_split: str) -> dict[str, Dataset]:
    """Load one file, folder of files, `save_to_disk` folder, or hub data set: split name -> rows."""
    path = Path(name)
    if not name:
        raise ValueError("--dataset_name: an empty name between commas")
    if path.is_file():
        if path.suffix.lower() not in DATA_FILES:
            allowed = ", ".join(DATA_FILES)
            raise ValueError(f"--dataset_name {name}: found a {path.suffix or 'nameless'} file, allowed: {allowed}")
        return {train_split: read_files([path])}
    if path.is_dir() and is_saved(path):
        saved = load_from_disk(name)
        return dict(saved) if isinstance(saved, DatasetDict) else {train_split: saved}
    if path.is_dir():
        return {split: read_files(files) for split, files in files_by_split(path).items()}
    try:
        return dict(load_dataset(name))
    except Exception as error:  # datasets raises many kinds; all of them mean that nothing was loaded
        raise ValueError(
            f"--dataset_name {name}: no such file or folder, and as a hub name it could not be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error


def open_stream(names: list[str], wanted: str, train_split: str) -> Iterator[dict[str, Any]]:
    """The records of one split of all sources, one source after the other, none of it kept.

    Raises:
        ValueError: a source that is not there or cannot be streamed.
    """
    for name in names:
        path = Path(name)
        if path.is_file():
            by_split: dict[str, Any] = {train_split: [path]}
        elif path.is_dir() and not is_saved(path):
            by_split = files_by_split(path)
        elif path.is_dir():
            by_split = {split: [rows] for split, rows in load_source(name, train_split).items()}
        else:
            try:
                by_split = {split: [rows] for split, rows in load_dataset(name, streaming=True).items()}
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                raise ValueError(f"--dataset_name {name} cannot be streamed: {cause}") from error
        split = find_split(by_split, wanted, None if wanted == train_split else train_split)
        if split is None and wanted == train_split:
            raise ValueError(f"--dataset_name {name} has no split {wanted!r}; it has: {', '.join(by_split)}.")
        for part in by_split.get(split, ()):
            if isinstance(part, Path) and part.suffix.lower() in TEXT_FILES:
                yield from all_rows([str(part)], "")
            else:
                yield from read_files([part]) if isinstance(part, Path) else part


def is_saved(folder: Path) -> bool:
    """True for what `save_to_disk` wrote."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def files_by_split(folder: Path) -> dict[str, list[Path]]:
    """The data files of a folder, each in the split that its own name says, else its folder's, else in `train`.

    Raises:
        ValueError: no data file, files that are packed, or loose text beside structured rows.
    """
    inside = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    inside = [file for file in inside if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
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


def split_of(names: list[str]) -> str:
    """The split that the last of these names with a split's word in it names first."""
    for name in reversed(names):
        words = re.split(r"[^a-z]+", name.lower())
        found = [split for word in words for split, same in SPLITS.items() if word in same]
        if found:
            return found[0]
    return "train"


def read_files(files: list[Path]) -> Dataset:
    """Read files of one split. Raises ValueError where a file cannot be read, or there is no row at all."""
    parts, names = [], []
    for file in files:
        if file.suffix.lower() == ".parquet":
            parts.append(read_parquet(file))
            names.append(str(file))
    texts = [str(file.resolve()) for file in files if file.suffix.lower() != ".parquet"]
    if texts:
        digest = "".join(digest_of(file) for file in texts)  # a changed file is another data set for the cache
        features = datasets.Features({name: datasets.Value("large_string") for name in (ROW, WHERE, PROBLEM)})
        try:
            rows = Dataset.from_generator(all_rows, gen_kwargs={"files": texts, "digest": digest}, features=features)
        except Exception as error:
            cause = error.__cause__ or error
            if isinstance(cause, ValueError) and str(cause).startswith(tuple(texts)):
                raise ValueError(str(cause)) from error
            raise ValueError(f"{', '.join(texts)} is empty: no row was found. ({type(cause).__name__})") from error
        parts.append(rows)
        names.append(texts[0])
    return join(parts, names)


def read_parquet(file: Path) -> Dataset:
    """Read one Parquet file, cached by its content."""
    cache = Path(datasets.config.HF_DATASETS_CACHE, "parquet", digest_of(str(file)))
    try:
        rows = Dataset.from_parquet(glob.escape(str(file)), cache_dir=str(cache))
    except Exception as error:
        raise ValueError(f"{file} cannot be read as Parquet: {type(error).__name__}: {error}") from error
    if not len(rows):
        raise ValueError(f"{file} is empty: no row was found.")
    return rows


def as_json_rows(rows: Dataset, name: str) -> Dataset:
    """The rows of any data set in the form of a text file's, so that sources can be joined."""
    if ROW in rows.column_names:
        return rows
    return rows.map(
        lambda row, index: {ROW: json.dumps(dict(row), default=plain), WHERE: f"{name}, row {index + 1}", PROBLEM: ""},
        with_indices=True,
        remove_columns=rows.column_names,
        features=datasets.Features({column: datasets.Value("large_string") for column in (ROW, WHERE, PROBLEM)}),
    )


def plain(value: Any) -> str:
    """Dates and the like as text. Raises TypeError for bytes: there is nothing to learn in them."""
    if isinstance(value, bytes):
        raise TypeError("a column holds bytes; only text can be learnt")
    return str(value)
