"""Where rows come from: files, folders, saved data sets, the hub; several of them, with weights.

Text files are read here and kept as they are, a JSON string per row beside its file and line: Arrow's own readers
retype dates and numbers, fill objects with other rows' fields, and do not say which line was bad.
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from data_formats import PROBLEM, ROW, WHERE
from datasets import Dataset, DatasetDict, concatenate_datasets, load_dataset, load_from_disk

TEXT_FILES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
DATA_FILES = (*TEXT_FILES, ".parquet")
SPLITS = {"train": ("train", "training"), "test": ("test", "validation", "valid", "val", "dev", "eval")}
LARGEST_FIELD = 2**30  # bytes of one CSV field


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
    twice. Without a test split, `validation_percentage` of the training rows become one.

    Raises:
        ValueError: no such data set or split, a folder without data, weights that do not match.
    """
    weights = weights or [1.0] * len(names)
    if len(weights) != len(names):
        raise ValueError(f"--dataset_weights: found {len(weights)} for {len(names)} data sets of --dataset_name.")
    loaded = [load_source(name, train_split, test_split) for name in names]
    for name, splits in zip(names, loaded):
        if train_split not in splits:
            raise ValueError(f"--dataset_name {name} has no split {train_split!r}; it has: {', '.join(splits)}.")
    if len(loaded) > 1:
        loaded = [{split: as_json_rows(rows) for split, rows in splits.items()} for splits in loaded]
    generator = np.random.default_rng(seed)
    train = join([repeat(splits[train_split], weight, generator) for splits, weight in zip(loaded, weights)])
    tests = [splits[test_split] for splits in loaded if test_split in splits]
    if not tests and validation_percentage:
        parts = train.train_test_split(test_size=validation_percentage / 100, seed=seed)
        return parts["train"], parts["test"]
    return train, join(tests) if tests else None


def join(parts: list[Dataset]) -> Dataset:
    """One data set of several."""
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def repeat(rows: Dataset, weight: float, generator: np.random.Generator) -> Dataset:
    """Whole copies of the rows, and of a random part what is left of the weight."""
    if weight == 1.0:
        return rows
    rest = generator.permutation(len(rows))[: round((weight % 1) * len(rows))]
    return rows.select(np.concatenate([np.tile(np.arange(len(rows)), int(weight)), np.sort(rest)]).astype(int))


def load_source(name: str, train_split: str, test_split: str) -> dict[str, Dataset]:
    """Load one file, folder of files, `save_to_disk` folder, or hub data set: split name -> rows."""
    path = Path(name)
    if path.is_file():
        if path.suffix not in DATA_FILES:
            allowed = ", ".join(DATA_FILES)
            raise ValueError(f"--dataset_name {name}: found a {path.suffix or 'nameless'} file, allowed: {allowed}")
        return {train_split: read_files([path])}
    if path.is_dir():
        if is_saved(path):
            saved = load_from_disk(name)
            return dict(saved) if isinstance(saved, DatasetDict) else {train_split: saved}
        return read_folder(path, train_split, test_split)
    try:
        return dict(load_dataset(name))
    except Exception as error:  # datasets raises many kinds; all of them mean that nothing was loaded
        raise ValueError(
            f"--dataset_name {name}: no such file or folder, and as a hub name it could not be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error


def open_stream(names: list[str], split: str, train_split: str, test_split: str) -> Iterator[dict[str, Any]]:
    """The records of one split of all sources, one source after the other, none of it kept.

    Raises:
        ValueError: no such data set or split.
    """
    for name in names:
        path = Path(name)
        if path.is_dir() and not is_saved(path):
            files = files_by_split(path, train_split, test_split).get(split, [])
        else:
            files = [path] if path.is_file() and split == train_split else []
        for file in files:
            yield from all_rows([str(file)], []) if file.suffix in TEXT_FILES else Dataset.from_parquet(str(file))
        if path.is_dir() and is_saved(path):
            yield from load_source(name, train_split, test_split).get(split, ())
        elif not path.exists():
            try:
                yield from load_dataset(name, split=split, streaming=True)
            except Exception as error:
                raise ValueError(
                    f"--dataset_name {name} cannot be streamed: {type(error).__name__}: {error}"
                ) from error


def is_saved(folder: Path) -> bool:
    """True for what `save_to_disk` wrote."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def read_folder(folder: Path, train_split: str, test_split: str) -> dict[str, Dataset]:
    """The rows of a folder's data files by split."""
    return {split: read_files(files) for split, files in files_by_split(folder, train_split, test_split).items()}


def files_by_split(folder: Path, train_split: str, test_split: str) -> dict[str, list[Path]]:
    """The data files of a folder, each in the split that its name (or its folder's) says, else in the training one."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in DATA_FILES and file.is_file())
    if not files:
        raise ValueError(f"--dataset_name {folder}: the folder holds no data file; allowed: {', '.join(DATA_FILES)}")
    by_split: dict[str, list[Path]] = {}
    for file in files:
        words = "-".join(file.relative_to(folder).with_suffix("").parts).lower().replace("_", "-").replace(".", "-")
        found = [split for split, names in SPLITS.items() if set(names) & set(words.split("-"))]
        split = train_split if not found else {"train": train_split, "test": test_split}[found[-1]]
        by_split.setdefault(split, []).append(file)
    return by_split


def read_files(files: list[Path]) -> Dataset:
    """Read files of one split. Raises ValueError where there is no row at all."""
    parts = [Dataset.from_parquet(str(file)) for file in files if file.suffix == ".parquet"]
    texts = [str(file) for file in files if file.suffix != ".parquet"]
    if texts:
        # The stamps make a changed file another data set for the cache.
        stamps = [(Path(file).stat().st_mtime_ns, Path(file).stat().st_size) for file in texts]
        features = datasets.Features({name: datasets.Value("large_string") for name in (ROW, WHERE, PROBLEM)})
        try:
            rows = Dataset.from_generator(all_rows, gen_kwargs={"files": texts, "stamps": stamps}, features=features)
        except Exception as error:  # a file without rows, above all
            raise ValueError(f"{', '.join(texts)} is empty: no row was found. ({type(error).__name__})") from error
        parts.append(rows)
    return join(parts if len(parts) == 1 else [as_json_rows(part) for part in parts])


def all_rows(files: list[str], stamps: list[tuple[int, int]]) -> Iterator[dict[str, str]]:
    """Every row of text files, bad ones with their problem."""
    readers = {".csv": csv_rows, ".tsv": csv_rows, ".txt": text_rows, ".json": json_rows}
    for file in files:
        for where, row, problem in readers.get(Path(file).suffix, jsonl_rows)(file):
            text = ""
            if not problem:
                text = json.dumps(row, ensure_ascii=False)
                try:
                    text.encode("utf-8")
                except UnicodeEncodeError as error:
                    text, problem = "", f"holds half of a surrogate pair ({error})"
            yield {ROW: text, WHERE: f"{file}, {where}", PROBLEM: problem}


def lines_of(file: str) -> Iterator[tuple[int, str, str]]:
    """(line number, text, problem) of each line; only \\n ends one, a byte-order mark and \\r\\n are no text."""
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                yield number, "", f"is not UTF-8 ({error})"
                continue
            if text.strip():
                yield number, text, ""


def jsonl_rows(file: str) -> Iterator[tuple[str, Any, str]]:
    """An object per line."""
    for number, text, problem in lines_of(file):
        row = None
        if not problem:
            try:
                row = json.loads(text)
            except json.JSONDecodeError as error:
                starts_array = number == 1 and text.lstrip().startswith("[")
                hint = "; a JSON array needs the ending .json" if starts_array else ""
                problem = f"is not JSON: {error}{hint}"
        if not problem and not isinstance(row, dict):
            problem = f"is {type(row).__name__}, expected an object per line"
            problem += "; a JSON array needs the ending .json" if isinstance(row, list) else ""
        yield f"line {number}", row, problem


def json_rows(file: str) -> Iterator[tuple[str, Any, str]]:
    """An array of objects; many .json files are JSONL, and are read as such."""
    try:
        text = Path(file).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield "the file", None, f"is not UTF-8 ({error})"
        return
    if not text.lstrip().startswith("["):
        yield from jsonl_rows(file)
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        yield f"line {error.lineno}", None, f"is not JSON: {error}"
        return
    for number, row in enumerate(rows, start=1):
        yield f"row {number}", row, "" if isinstance(row, dict) else f"is {type(row).__name__}, expected an object"


def csv_rows(file: str) -> Iterator[tuple[str, Any, str]]:
    """A header and a row per record; every value stays text."""
    csv.field_size_limit(LARGEST_FIELD)
    with open(file, encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, delimiter="\t" if file.endswith(".tsv") else ",")
        try:
            for row in reader:
                bad = None in row or None in row.values()
                yield f"line {reader.line_num}", row, "has another number of fields than the header" if bad else ""
        except (csv.Error, UnicodeDecodeError) as error:
            yield f"line {reader.line_num + 1}", None, f"cannot be read: {error}"


def text_rows(file: str) -> Iterator[tuple[str, Any, str]]:
    """A text per line."""
    for number, text, problem in lines_of(file):
        yield f"line {number}", {"text": text}, problem


def as_json_rows(rows: Dataset) -> Dataset:
    """The rows of any data set in the form of a text file's, so that sources can be joined."""
    if ROW in rows.column_names:
        return rows
    return rows.map(
        lambda row, index: {ROW: json.dumps(row, default=str), WHERE: f"row {index + 1}", PROBLEM: ""},
        with_indices=True,
        remove_columns=rows.column_names,
        features=datasets.Features({name: datasets.Value("large_string") for name in (ROW, WHERE, PROBLEM)}),
    )
