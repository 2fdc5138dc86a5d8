"""Rows of files: JSONL, JSON, CSV, TSV, plain text, Parquet, each with its file and line, bad ones with their problem.

Rows are kept as they were written, a JSON string each: Arrow's own readers retype dates and numbers, fill objects with
other rows' fields, and do not say which line was bad.
"""

import csv
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile

from .formats import PROBLEM, ROW, WHERE, without_filled_in
from .turns import FOREIGN

BLANK = re.compile(r"\s*")
LARGEST_FIELD = 2**30  # bytes of one CSV field
PARQUET_BATCH = 1000  # rows held in memory at a time
READER_VERSION = 2  # raise when a file would be read as other rows: cached ones are then read again


def digest_of(file: str) -> str:
    """A hash of a file's content and of the reader's version."""
    digest = hashlib.sha256(str(READER_VERSION).encode())
    with open(file, "rb") as content:
        for block in iter(lambda: content.read(2**20), b""):
            digest.update(block)
    return digest.hexdigest()


def all_rows(files: list[str], digest: str) -> Iterator[dict[str, str]]:
    """Every row of files, bad ones with their problem. The digest is for the cache alone.

    Raises:
        ValueError: a file without a row, or one whose rows cannot be told apart.
    """
    readers = {".csv": csv_rows, ".tsv": csv_rows, ".txt": text_rows, ".json": json_rows, ".parquet": parquet_rows}
    for file in files:
        is_empty = True
        for where, row, problem in readers.get(Path(file).suffix.lower(), jsonl_rows)(file):
            yield record_of(row, f"{file}, {where}", problem)
            is_empty = False
        if is_empty:
            raise ValueError(f"{file} is empty: no row was found.")


def record_of(row: Any, where: str, problem: str = "") -> dict[str, str]:
    """A row as all sources give it. What JSON cannot hold becomes its type's name: only a column in use may fail."""
    text = ""
    if not problem:
        text = json.dumps(row, ensure_ascii=False, default=lambda value: {FOREIGN: type(value).__name__})
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            text, problem = "", f"is not UTF-8, or holds half of a surrogate pair ({error})"
    return {ROW: text, WHERE: where, PROBLEM: problem}


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


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises KeyError if a key stands twice."""
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise KeyError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return row


def parse(text: str) -> Any:
    """JSON in which no key stands twice. Raises ValueError for what is not, whatever its kind."""
    try:
        return json.loads(text, object_pairs_hook=unique)
    except KeyError as error:
        raise ValueError(error.args[0]) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def array_items(text: str) -> Iterator[tuple[Any, str]]:
    """(item, problem) of each item of a JSON array.

    Raises:
        ValueError: an item whose end cannot be told, and so none after it; names its row.
    """
    strict, lenient = json.JSONDecoder(object_pairs_hook=unique), json.JSONDecoder()
    at, number, follows = text.index("[") + 1, 0, ","
    if text[at:].strip() == "]":
        return
    while follows == ",":
        at, number, problem = BLANK.match(text, at).end(), number + 1, ""
        try:
            try:
                item, at = strict.raw_decode(text, at)
            except KeyError as error:
                (item, at), problem = lenient.raw_decode(text, at), error.args[0]
        except (ValueError, RecursionError) as error:
            raise ValueError(f"row {number}: {error}") from error
        yield item, problem
        at = BLANK.match(text, at).end()
        follows, at = text[at : at + 1], at + 1
    if follows != "]" or text[at:].strip():
        raise ValueError(f"after row {number}: found {text[at - 1 : at + 40]!r}, expected a comma or the last bracket")


def jsonl_rows(file: str) -> Iterator[tuple[str, Any, str]]:
    """An object per line."""
    for number, text, problem in lines_of(file):
        row = None
        if not problem:
            try:
                row = parse(text)
            except ValueError as error:
                starts_array = number == 1 and text.lstrip().startswith("[")
                hint = "; a JSON array needs the ending .json" if starts_array else ""
                problem = f"is not JSON: {error}{hint}"
        if not problem and not isinstance(row, dict):
            problem = f"is {type(row).__name__}, expected an object per line"
            problem += "; a JSON array needs the ending .json" if isinstance(row, list) else ""
        yield f"line {number}", row, problem


def json_rows(file: str) -> Iterator[tuple[str, Any, str]]:
    """An array of objects; many .json files are JSONL, and are read as such.

    Raises:
        ValueError: the file is no JSON or no UTF-8 as a whole: its rows cannot be told apart, so none can be skipped.
    """
    try:
        text = Path(file).read_bytes().decode("utf-8-sig")
        is_array = text.lstrip().startswith("[")
        first_line = text.lstrip().partition("\n")[0].strip()
        if text.strip() and not is_array and not first_line.endswith("}"):
            raise ValueError("found one object over several lines; expected an array of objects, or one per line")
        for number, (row, problem) in enumerate(array_items(text) if is_array else (), start=1):
            wrong = "" if isinstance(row, dict) else f"is {type(row).__name__}, expected an object"
            yield f"row {number}", row, f"is not JSON: {problem}" if problem else wrong
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not is_array:
        yield from jsonl_rows(file)


def csv_rows(file: str) -> Iterator[tuple[str, Any, str]]:
    """A header and a row per record; every value stays text.

    Raises:
        ValueError: a header with a name twice, or quotes that do not close: what follows cannot be told apart.
    """
    csv.field_size_limit(LARGEST_FIELD)
    with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        reader = csv.DictReader(lines, delimiter="\t" if file.lower().endswith(".tsv") else ",", strict=True)
        try:
            names = reader.fieldnames or []
            if len(set(names)) < len(names):
                raise ValueError(f"a column name stands twice in the header: {', '.join(names)}")
            for row in reader:
                bad = None in row or None in row.values()
                yield f"line {reader.line_num}", row, "has another number of fields than the header" if bad else ""
        except (csv.Error, ValueError) as error:
            raise ValueError(f"{file}, after line {reader.line_num}: cannot be read: {error}") from error


def text_rows(file: str) -> Iterator[tuple[str, Any, str]]:
    """A text per line."""
    for number, text, problem in lines_of(file):
        yield f"line {number}", {"text": text}, problem


def parquet_rows(file: str) -> Iterator[tuple[str, Any, str]]:
    """A row per record, read some at a time. Raises ValueError for what is no Parquet, or has a column name twice."""
    try:
        parquet = ParquetFile(file)
        names = parquet.schema_arrow.names
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the column {twice!r} stands twice")
        number = 0
        for batch in parquet.iter_batches(PARQUET_BATCH):
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", without_filled_in(row), ""
    except (ArrowException, ValueError, OSError) as error:
        raise ValueError(f"{file} cannot be read as Parquet: {error}") from error
