"""Where rows come from: files, folders, saved data sets, the hub; several of them, with weights.

Every row becomes a record of files.py, a JSON string with where it stood: sources of any kind can be joined, and a
bad row is named by its own file and number, however the rows were split and repeated.
"""

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, DatasetDict, concatenate_datasets, load_dataset, load_from_disk
from datasets.fingerprint import Hasher
from filelock import FileLock

from .files import (
    AT_ONCE,
    READER_VERSION,
    Place,
    Unread,
    all_rows,
    kept_digest,
    read_row,
    record_of,
    row_at,
    unread_rows,
)
from .folders import DATA_FILES, files_by_split, find_split, ignored_files, is_saved
from .formats import PROBLEM, ROW, WHERE, without_filled_in
from .private_datasets import fingerprint

LARGEST_WEIGHT = 1000
BATCH = 1000  # rows of a saved data set made into records at a time
RECORD = datasets.Features({name: datasets.Value("large_string") for name in (ROW, WHERE, PROBLEM)})

Part = list[Path] | Dataset | datasets.IterableDataset  # the rows of a split before they are read


def load_rows(
    names: list[str],
    train_split: str,
    test_split: str,
    *,
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
    found = [find_parts(name, train_split) for name in names]
    picked = [pick_split(name, splits, train_split) for name, splits in zip(names, found)]
    trains = [read_part(name, part) for name, part in zip(names, picked)]
    held_out = [(name, splits, find_split(splits, test_split, train_split)) for name, splits in zip(names, found)]
    tests = [read_part(name, splits[split]) for name, splits, split in held_out if split]
    if not tests and validation_percentage:
        parts = [hold_out(name, rows, validation_percentage, seed) for name, rows in zip(names, trains)]
        trains, tests = [part["train"] for part in parts], [part["test"] for part in parts]
    generator = np.random.default_rng(seed)
    repeated = [repeat(name, rows, weight, generator) for name, rows, weight in zip(names, trains, weights)]
    return concatenate_datasets(repeated), concatenate_datasets(tests) if tests else None


def pick_split(name: str, splits: dict[str, Part], wanted: str) -> Part:
    """The rows of a split. Raises ValueError if there is none of that name."""
    found = find_split(splits, wanted)
    if found is None:
        raise ValueError(f"--dataset_name {name} has no split {wanted!r}; it has: {', '.join(splits)}.")
    return splits[found]


def hold_out(name: str, rows: Dataset, percentage: float, seed: int) -> DatasetDict:
    """A random part of the rows as test split."""
    count = max(1, round(len(rows) * percentage / 100))
    if len(rows) * percentage / 100 < 0.5 or count >= len(rows):
        raise ValueError(
            f"--validation_split_percentage {percentage}: of the {len(rows)} rows of {name} it should leave at least "
            "one to train on and one to test on; use another percentage or more rows"
        )
    return rows.train_test_split(test_size=count, seed=seed)


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
    return concatenate_datasets([rows] * int(weight) + [rows.select(np.sort(rest))] * (len(rest) > 0))


def find_parts(name: str, train_split: str, is_streamed: bool = False) -> dict[str, Part]:
    """One file, folder of files, `save_to_disk` folder, or hub data set: split name -> its rows, not yet read."""
    path = Path(name)
    if not name:
        raise ValueError("--dataset_name: an empty name between commas")
    if path.is_file():
        if path.suffix.lower() not in DATA_FILES:
            allowed = ", ".join(DATA_FILES)
            raise ValueError(f"--dataset_name {name}: found a {path.suffix or 'nameless'} file, allowed: {allowed}")
        return {train_split: [path]}
    if path.is_dir() and is_saved(path):
        saved = load_from_disk(name)
        return dict(saved) if isinstance(saved, DatasetDict) else {train_split: saved}
    if path.is_dir():
        return files_by_split(path)
    try:
        return dict(load_dataset(name, streaming=is_streamed))
    except Exception as error:  # datasets raises many kinds; all of them mean that nothing was loaded
        raise ValueError(
            f"--dataset_name {name}: no such file or folder, and as a hub name it could not be "
            f"{'streamed' if is_streamed else 'loaded'}: {type(error).__name__}: {error}"
        ) from error


def source_notes(names: list[str], train_split: str, test_split: str) -> list[str]:
    """What local sources hold and a run does not read: splits beside the two in use, files of other kinds."""
    notes = []
    for name in names:
        if not Path(name).is_dir():
            continue
        splits = find_parts(name, train_split)
        used = {find_split(splits, train_split), find_split(splits, test_split, train_split)}
        unused = {split: part for split, part in splits.items() if split not in used}
        for split, part in unused.items():
            files = f" ({', '.join(file.name for file in part)})" if isinstance(part, list) else ""
            notes.append(f"note: the split {split!r} of {name}{files} is not used")
        ignored = [] if is_saved(Path(name)) else ignored_files(Path(name))
        if ignored:
            rest = f" and {len(ignored) - 5} more" if len(ignored) > 5 else ""
            notes.append(f"note: not read in {name}: {', '.join(ignored[:5])}{rest}")
    return notes


def open_stream(names: list[str], wanted: str, train_split: str) -> Iterator[dict[str, str]]:
    """The records of one split of all sources, one source after the other, none of it kept. Raises as unread_stream
    does."""
    return (read() for read in unread_stream(names, wanted, train_split, {}))


def unread_stream(names: list[str], wanted: str, train_split: str, place: Place) -> Iterator[Unread]:
    """The same from a place on, each record to be read when it is called; `place` is kept where the next one stands.

    Raises:
        ValueError: a source that is not there, cannot be streamed, or is empty.
    """
    for number in range(place.setdefault("source", 0), len(names)):
        name = names[number]
        splits = find_parts(name, train_split, is_streamed=True)
        split = find_split(splits, wanted, None if wanted == train_split else train_split)
        if split is None and wanted == train_split:
            pick_split(name, splits, wanted)  # raises
        part = splits[split] if split else []
        if isinstance(part, list):
            yield from unread_rows([os_path(file) for file in part], place)
        else:
            yield from unread_set(name, part, place)
        place.clear()
        place["source"] = number + 1


def unread_set(name: str, rows: Dataset | datasets.IterableDataset, place: Place) -> Iterator[Unread]:
    """The rows of a saved data set, or of one that is streamed, from a place on: of the latter, its own state.

    They are as Arrow holds them: images and the like are not decoded, nobody learns them.
    """
    first = index = place.setdefault("rows", 0)
    if isinstance(rows, datasets.IterableDataset):
        if first:
            rows.load_state_dict(place["state"])
        for row in rows:
            index += 1
            place |= {"rows": index, "state": rows.state_dict()}
            yield partial(read_row, f"{name}, row {index}", partial(row_at, [row].copy, 0))
    elif first < len(rows):
        for batch in rows.with_format("arrow").skip(first).iter(AT_ONCE):
            parsed = cache(batch.to_pylist)
            for within in range(len(batch)):
                index = place["rows"] = index + 1
                yield partial(read_row, f"{name}, row {index}", partial(row_at, parsed, within))
    if not index:
        raise ValueError(f"{name} is empty: no row was found.")


def os_path(file: Path) -> str:
    """The absolute name of a file, not that of what it links to: its ending says how it is read."""
    return str(file.absolute())


def read_part(name: str, part: Part) -> Dataset:
    """Read the rows of one split. Raises ValueError where a file cannot be read, or holds no row."""
    if not isinstance(part, list):
        return as_records(name, part)
    files, cache = [os_path(file) for file in part], cache_folder()
    digest = "".join(kept_digest(file, cache) for file in files)  # a changed file is another data set for the cache
    try:
        return Dataset.from_generator(all_rows, gen_kwargs={"files": files, "digest": digest}, features=RECORD)
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, (ValueError, OSError)):
            raise ValueError(str(cause)) from error
        raise


def cache_folder() -> Path:
    """Where rows that were read, and files' digests, are kept."""
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def as_records(name: str, rows: Dataset) -> Dataset:
    """The rows of a saved data set as records, cached beside other rows and never in the user's folder."""
    if not len(rows):
        raise ValueError(f"{name} is empty: no row was found.")
    key = Hasher.hash([READER_VERSION, fingerprint(rows), name])
    cache = cache_folder()
    with FileLock(cache / f"records-{key}.lock"):
        made = rows.with_format("arrow").map(
            partial(records_of, name=name),
            batched=True,
            batch_size=BATCH,
            with_indices=True,
            remove_columns=rows.column_names,
            features=RECORD,
            new_fingerprint=key,
            cache_file_name=str(cache / f"records-{key}.arrow"),
        )
    return made.with_format(None)


def records_of(table: Any, indices: list[int], name: str) -> dict[str, list[str]]:
    """Records of some rows of an Arrow table, as columns."""
    rows = zip(table.to_pylist(), indices)
    records = [record_of(without_filled_in(row), f"{name}, row {index + 1}") for row, index in rows]
    return {column: [record[column] for record in records] for column in RECORD}
