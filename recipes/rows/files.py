"""Rows of files: JSONL, JSON, CSV, TSV, plain text, Parquet, each with its file and line, bad ones with their problem.

Rows are kept as they were written, a JSON string each: Arrow's own readers retype dates and numbers, fill objects with
other rows' fields, and do not say which line was bad.
"""

import csv
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from filelock import FileLock
from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile

from .formats import PROBLEM, ROW, WHERE, without_filled_in
from .turns import FOREIGN

Place = dict[str, Any]  # where the next row stands: {} is the first; JSON can hold it
Parse = Callable[[], tuple[Any, str]]  # gives a row and its problem
Found = tuple[str, Parse]  # where in its file a row stands
Unread = Callable[[], dict[str, str]]  # reads a row's record

BLANK = re.compile(r"\s*")
LARGEST_FIELD = 2**30  # bytes of one CSV field
SETTLED_S = 2.0  # seconds since a file's last change after which another one shows another time
AT_ONCE = 100  # rows of Parquet that are parsed together
VISIBLE = frozenset(bytes([byte]) for byte in range(33, 127))  # ASCII that is no blank
READER_VERSION = 2  # raise when a file would be read as other rows: cached ones are then read again


def digest_of(file: str) -> str:
    """A hash of a file's content and of the reader's version."""
    digest = hashlib.sha256(str(READER_VERSION).encode())
    with open(file, "rb") as content:
        for block in iter(lambda: content.read(2**20), b""):
            digest.update(block)
    return digest.hexdigest()


def kept_digest(file: str, folder: Path) -> str:
    """The same, read by one rank of a machine and kept in a folder for the others and for later starts, which wait at a
    file lock and in no collective; any write to the file makes another of it. A file that was just written is read by
    all: the next write might show the same time."""
    found = os.stat(file)
    if time.time() - max(found.st_mtime, found.st_ctime) < SETTLED_S:
        return digest_of(file)
    facts = [file, READER_VERSION, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    kept = folder / f"digest-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}"
    with FileLock(f"{kept}.lock"):
        if not kept.is_file():
            beside = kept.with_suffix(".new")
            beside.write_text(digest_of(file), encoding="ascii")
            beside.replace(kept)
        return kept.read_text(encoding="ascii")


def all_rows(files: list[str], digest: str) -> Iterator[dict[str, str]]:
    """Every row of files, bad ones with their problem; raises as unread_rows does. The digest is for the cache."""
    return (read() for read in unread_rows(files, {}))


def unread_rows(files: list[str], place: Place) -> Iterator[Unread]:
    """The rows of files from a place on, each to be read when it is called; `place` is kept where the next one stands.

    Raises:
        ValueError: a file without a row, or one whose rows cannot be told apart.
    """
    readers = {".csv": csv_rows, ".tsv": csv_rows, ".txt": text_rows, ".json": json_rows, ".parquet": parquet_rows}
    for number in range(place.setdefault("file", 0), len(files)):
        file, count = files[number], place.setdefault("rows", 0)
        for where, parse in readers.get(Path(file).suffix.lower(), jsonl_rows)(file, place):
            count = place["rows"] = count + 1
            yield partial(read_row, f"{file}, {where}", parse)
        if not count:
            raise ValueError(f"{file} is empty: no row was found.")
        place |= {"file": number + 1, "rows": 0, "byte": 0, "line": 0}


def read_row(where: str, parse: Parse) -> dict[str, str]:
    """The record of a row that is parsed now."""
    row, problem = parse()
    return record_of(row, where, problem)


def known(row: Any, problem: str = "") -> tuple[Any, str]:
    """A row that was parsed on the way to it."""
    return row, problem


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


def lines_of(file: str, place: Place) -> Iterator[tuple[int, bytes]]:
    """(line number, bytes) of each line that is not blank, from a place on; only \\n ends one.

    Raises:
        ValueError: the place is at no line's beginning: the file was another one when it was noted.
    """
    at, number = place.get("byte", 0), place.get("line", 0)
    with open(file, "rb") as lines:
        if at:
            lines.seek(at - 1)
            if lines.read(1) != b"\n" and at != os.fstat(lines.fileno()).st_size:
                raise ValueError(
                    f"{file} is not what it was when the checkpoint was written: no line ends at byte {at}"
                )
        for line in lines:
            at, number = at + len(line), number + 1
            place |= {"byte": at, "line": number}
            if line[:1] in VISIBLE or text_of(number, line) != ("", ""):
                yield number, line


def text_of(number: int, line: bytes) -> tuple[str, str]:
    """(text, problem) of a line; a byte-order mark and \\r\\n are no text, and blanks alone are none."""
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        return "", f"is not UTF-8 ({error})"
    return text if text.strip() else "", ""


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


def jsonl_rows(file: str, place: Place) -> Iterator[Found]:
    """An object per line."""
    return ((f"line {number}", partial(parse_line, number, line)) for number, line in lines_of(file, place))


def parse_line(number: int, line: bytes) -> tuple[Any, str]:
    """(row, problem) of a line of JSONL."""
    text, problem = text_of(number, line)
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
    return row, problem


def json_rows(file: str, place: Place) -> Iterator[Found]:
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
        items = enumerate(array_items(text) if is_array else (), start=1)
        for number, (row, problem) in islice(items, place["rows"], None):
            wrong = "" if isinstance(row, dict) else f"is {type(row).__name__}, expected an object"
            yield f"row {number}", partial(known, row, f"is not JSON: {problem}" if problem else wrong)
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not is_array:
        yield from jsonl_rows(file, place)


def csv_rows(file: str, place: Place) -> Iterator[Found]:
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
            for row in islice(reader, place["rows"], None):
                bad = None in row or None in row.values()
                problem = "has another number of fields than the header" if bad else ""
                yield f"line {reader.line_num}", partial(known, row, problem)
        except (csv.Error, ValueError) as error:
            raise ValueError(f"{file}, after line {reader.line_num}: cannot be read: {error}") from error


def text_rows(file: str, place: Place) -> Iterator[Found]:
    """A text per line."""
    return ((f"line {number}", partial(parse_text, number, line)) for number, line in lines_of(file, place))


def parse_text(number: int, line: bytes) -> tuple[Any, str]:
    """(row, problem) of a line of text."""
    text, problem = text_of(number, line)
    return {"text": text}, problem


def parquet_rows(file: str, place: Place) -> Iterator[Found]:
    """A row per record, read some at a time. Raises ValueError for what is no Parquet, or has a column name twice."""
    try:
        parquet = ParquetFile(file)
        names = parquet.schema_arrow.names
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the column {twice!r} stands twice")
        ends = list(accumulate(parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)))
        done = sum(end <= place["rows"] for end in ends)  # row groups that are passed over unread
        number, skipped = ([0, *ends][done], place["rows"])
        for batch in parquet.iter_batches(AT_ONCE, row_groups=range(done, len(ends))):
            rows = cache(batch.to_pylist)
            for index in range(len(batch)):
                number += 1
                if number > skipped:
                    yield f"row {number}", partial(row_at, rows, index)
    except (ArrowException, ValueError, OSError) as error:
        raise ValueError(f"{file} cannot be read as Parquet: {error}") from error


def row_at(rows: Callable[[], list[dict[str, Any]]], index: int) -> tuple[Any, str]:
    """(row, problem) of one of some rows that become Python's together."""
    return without_filled_in(rows()[index]), ""
