"""Training from sources that are read while they are learnt, for what does not fit on disk (--streaming).

A stream is taken window by window; each is shuffled (and packed) in itself. Beside every rank a process reads ahead of
need and tokenises this rank's part of each window. The ranks exchange their parts when a window begins, so that the
rows of a step, and where a resumed run goes on, do not depend on the number of ranks. Every process passes over the
whole stream, but where a row can be told from the next one unread (a line, a batch of Parquet) it reads its part alone.

A checkpoint holds where the window of its next row begins, and how many of its rows were taken. JSONL and text open at
a byte, Parquet at a row group, a hub's data set at its own state; CSV and JSON arrays are parsed up to there.

A process and not a thread: a thread that runs Python holds up the loop, which gives its turn away at every operation.
"""

import atexit
import copy
import itertools
import multiprocessing
import os
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa
import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from tqdm import tqdm

from .batches import FIRST_ROW, RankSteps, Share, Step, collate_rows, leave_stop_signals_to_the_rank
from .packing import pack_rows

WINDOW = 2000  # records read, tokenised and shuffled at a time
AHEAD = 2  # windows that are tokenised ahead, beside those that a step takes
ENOUGH_READ = 1000  # records after which the share of lost rows is judged, or at the end of the stream
POLL_S = 2.0  # how often a rank looks whether the process beside it lives, while it waits
SHOWN = 5  # bad rows of a window that are listed
ROWS = pa.schema({name: pa.list_(pa.int32()) for name in ("input_ids", "labels")})

TokenRow = dict[str, list[int]]
Tokenised = tuple[list[TokenRow], Counter[str], list[str]]  # rows, what happened to how many, what is wrong with others
Gather = Callable[[Any], list[Any]]  # what each rank holds, in their order, of what this one holds


@dataclass
class Stream:
    """`open` gives the records from a place on, {} being the first, and keeps the place where the next one stands, as
    JSON can hold it; `tokenise` takes some of them and the number of the first."""

    open: Callable[[dict[str, Any]], Iterator[Any]]
    tokenise: Callable[[list[Any], int], Tokenised]
    packed_length: int = 0  # tokens per packed row; 0: not packed
    max_lost: float = 1.0  # share of records that may lose their whole answer
    skips_bad: bool = True  # whether bad rows are left out, or end the run


@dataclass
class Part:
    """A rank's part of a window, or why the window could not be read."""

    epoch: int
    number: int
    place: dict[str, Any]  # of the window's first record
    num_records: int = 0  # of the whole window; fewer than WINDOW: the last of the epoch
    rows: pa.Table | None = None
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    failure: str = ""


class Row(NamedTuple):
    """A row of an epoch, not yet looked up."""

    epoch: int
    rows: Sequence[TokenRow]  # of its window
    index: int
    start: dict[str, Any]  # where the stream opens to go on with this row


def stream_steps(
    stream: Stream,
    share: Share,
    position: dict[str, Any] = FIRST_ROW,
    *,
    seed: int,
    pad_token_id: int,
    gather: Gather | None = None,
) -> Iterator[Step]:
    """Yield this rank's optimizer steps, without end, from a position on.

    Rows are numbered in the order in which an epoch brings them. What one rank cannot read, and a bad row, end every
    rank with one message. Without `gather` each rank tokenises whole windows, and waits for no other.
    """
    rows = stream_rows(stream, share, position, seed, gather)
    for epoch, of_epoch in itertools.groupby(rows, key=lambda row: row.epoch):
        rows_seen = position["rows_seen"] if epoch == position["epoch"] else 0
        step = list(itertools.islice(of_epoch, share.rows_per_step))
        while step:
            following = list(itertools.islice(of_epoch, share.rows_per_step))  # noqa: B031 (it goes on)
            first, rows_seen = rows_seen, rows_seen + len(step)
            position = {"epoch": epoch + 1, "rows_seen": 0, "stream": {}}
            if following:
                position = {"epoch": epoch, "rows_seen": rows_seen, "stream": following[0].start}
            (mine,) = RankSteps(range(len(step)), share)
            batches = []
            for batch in mine:
                chosen = [step[number].rows[step[number].index] for number in batch or [0]]
                batches.append(collate_rows(chosen, list(range(len(batch))), pad_token_id))
            yield Step(batches, position, [[first + number for number in batch] for batch in mine])
            step = following


def stream_rows(
    stream: Stream, share: Share, position: dict[str, Any], seed: int, gather: Gather | None
) -> Iterator[Row]:
    """The rows from a position on, without end: each window in a random order that follows from seed, epoch and its
    number. A checkpoint that does not say where to open is counted from the start of its epoch."""
    start = position.get("stream") or {}
    to_skip, counts = start.get("taken", position["rows_seen"]), Counter(start.get("lost", {}))
    found_rows = position["rows_seen"]
    for parts in gathered_parts(stream, share, position, gather):
        part, problems = parts[0], [problem for part in parts for problem in part.problems]
        start = {"window": part.number, "place": part.place, "lost": dict(counts)}
        is_last, num_read = part.num_records < WINDOW, part.number * WINDOW + part.num_records
        found = sum((part.counts for part in parts), Counter())
        lost = {"bad": len(problems), "lost": found["lost"] + found["dropped"]}
        counts.update(lost)
        line = describe_lost(counts, num_read)
        if problems and not stream.skips_bad:
            shown = "\n- ".join(problems[:SHOWN])
            stop(f"train data: {len(problems)} bad row(s) in the stream:\n- {shown}")
        if share.rank == 0 and part.epoch == position["epoch"] and any(lost.values()):
            tqdm.write("\n- ".join([line, *problems[:SHOWN]]))
        if (num_read >= ENOUGH_READ or is_last) and counts["lost"] > stream.max_lost * num_read:
            stop(f"{line}.\nMore than {stream.max_lost:.0%} would not be learnt (--allow_lost_rows).")
        table = InMemoryTable(pa.concat_tables(part.rows for part in parts))
        rows: Sequence[TokenRow] = Dataset(table, fingerprint=f"{part.epoch}-{part.number}")
        if stream.packed_length and len(rows):
            rows, _ = pack_rows(rows, stream.packed_length)
        generator = torch.Generator().manual_seed(seed + 1_000_003 * part.epoch + 7919 * part.number)
        order = torch.randperm(len(rows), generator=generator).tolist()
        for taken in range(min(to_skip, len(order)), len(order)):
            yield Row(part.epoch, rows, order[taken], {**start, "taken": taken})
        to_skip, found_rows = max(0, to_skip - len(order)), found_rows + len(order)
        if is_last:
            if not found_rows:
                raise ValueError("the stream holds no row that can be learnt")
            to_skip, found_rows, counts = 0, 0, Counter()


def gathered_parts(
    stream: Stream, share: Share, position: dict[str, Any], gather: Gather | None
) -> Iterator[list[Part]]:
    """The parts of all ranks, window by window. What one of them could not read ends all."""
    number, count = (share.rank, share.world_size) if gather else (0, 1)
    for own in parts_ahead(AHEAD + share.rows_per_step // WINDOW, stream, position, number, count):
        parts = gather(own) if gather else [own]
        failed = {rank: part.failure for rank, part in enumerate(parts) if part.failure}
        if failed:
            rank, failure = min(failed.items()) if gather else (share.rank, own.failure)
            is_common = list(failed.values()) == [failure] * len(parts) if gather else rank == 0
            stop(failure if is_common else f"rank {rank}: {failure}")
        for rank, part in enumerate(parts):
            if (part.place, part.num_records) != (parts[0].place, parts[0].num_records):
                found = [f"{p.num_records} records from {p.place}" for p in (parts[0], part)]
                stop(
                    f"the ranks read other streams: window {part.number} of epoch {part.epoch} has {found[0]} on "
                    f"rank 0, {found[1]} on rank {rank}. Give every machine the same files."
                )
        yield parts


def parts_ahead(ahead: int, *arguments: Any) -> Iterator[Part]:
    """What read_parts yields, made by a process that is at most so many windows ahead. It ends with this one; one that
    was killed is a failure to read, which the ranks exchange as any other."""
    queue: Any = multiprocessing.Queue(maxsize=ahead)
    process = multiprocessing.Process(target=send_parts, args=(queue, *arguments), daemon=True)
    process.start()
    atexit.register(process.kill)  # where nobody closes this generator; a polite signal is ignored
    try:
        while True:
            is_alive = process.is_alive()  # before: what it left is still there
            try:
                yield queue.get(timeout=POLL_S)
            except Empty:
                if not is_alive:
                    reason = f"exit code {process.exitcode}; -9: it was killed, mostly for want of memory"
                    yield Part(0, 0, {}, failure=f"the process that reads the stream has ended ({reason})")
                    return
    finally:
        process.kill()
        atexit.unregister(process.kill)


def send_parts(queue: Any, *arguments: Any) -> None:
    """What the process beside a rank does."""
    leave_stop_signals_to_the_rank(0)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not exist in a process that was forked
    threading.Thread(target=end_with_parent, daemon=True).start()
    for part in read_parts(*arguments):
        queue.put(part)


def end_with_parent() -> None:
    """Wait for the rank's end, which may be a kill, and end this process: it may hold the lock of the run's folder."""
    multiprocessing.parent_process().join()
    os._exit(1)


def read_parts(stream: Stream, position: dict[str, Any], number: int, count: int) -> Iterator[Part]:
    """Part `number` of `count` of each window from a position on, epoch after epoch, until one cannot be read."""
    start = position.get("stream") or {}
    epoch, window, place = position["epoch"], start.get("window", 0), copy.deepcopy(start.get("place", {}))
    while True:
        records, size = stream.open(place), WINDOW
        while size == WINDOW:
            part = Part(epoch, window, copy.deepcopy(place))
            try:
                held = list(itertools.islice(records, WINDOW))
                first, end = (len(held) * edge // count for edge in (number, number + 1))
                rows, part.counts, part.problems = stream.tokenise(held[first:end], window * WINDOW + first)
            except Exception as error:
                is_for_the_user = isinstance(error, (ValueError, OSError))
                part.failure = str(error) if is_for_the_user else traceback.format_exc()
                yield part
                return
            size = part.num_records = len(held)
            part.rows = pa.Table.from_pylist(rows, schema=ROWS)
            yield part
            window += 1
        epoch, window, place = epoch + 1, 0, {}


def describe_lost(counts: Counter[str], num_read: int) -> str:
    """What became of the rows read so far that are not learnt."""
    line = f"train data: of the first {num_read:,} rows of the stream"
    line += f", {counts['bad']:,} bad row(s) left out" if counts["bad"] else ""
    return line + (f", {counts['lost']:,} lost their whole answer to --max_length" if counts["lost"] else "")


def stop(message: str) -> NoReturn:
    """End this rank with a message. All ranks meet it, and failures.py leaves rank 0 the first word."""
    raise SystemExit(f"\nError: {message}\n")
