"""Training from sources that are read while they are learnt, for what does not fit on disk (--streaming).

Every rank reads the whole stream in the same windows, tokenises them alike and keeps its share of each step, so that
the rows of a step, and where a resumed run goes on, do not depend on the number of ranks. A window is shuffled (and
packed) in itself; nothing waits for another rank.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from datasets import Dataset
from tqdm import tqdm

from .batches import FIRST_ROW, RankSteps, Share, Step, collate_rows
from .packing import pack_rows

WINDOW = 2000  # records read, tokenised and shuffled at a time
ENOUGH_READ = 1000  # records after which the share of lost rows is judged, or at the end of the stream
SHOWN = 5  # bad rows of a window that are listed

TokenRow = dict[str, list[int]]
Tokenised = tuple[list[TokenRow], Counter[str], list[str]]  # rows, what happened to how many, what is wrong with others


@dataclass
class Stream:
    """`open` starts the records anew; `tokenise` takes some of them and the number of the first."""

    open: Callable[[], Iterator[dict[str, Any]]]
    tokenise: Callable[[list[dict[str, Any]], int], Tokenised]
    packed_length: int = 0  # tokens per packed row; 0: not packed
    max_lost: float = 1.0  # share of records that may lose their whole answer


def stream_steps(
    stream: Stream, share: Share, position: dict[str, int] = FIRST_ROW, *, seed: int, pad_token_id: int
) -> Iterator[Step]:
    """Yield this rank's optimizer steps, without end, from a position on.

    Rows are numbered in the order in which an epoch brings them. A bad row in the middle of a run ends every rank with
    one message: all of them read it.
    """
    epoch, rows_seen = position["epoch"], position["rows_seen"]
    first_epoch = epoch
    while True:
        rows = window_rows(stream, seed, epoch, share.rank, is_reported=share.rank == 0 and epoch == first_epoch)
        rows = itertools.islice(rows, rows_seen, None)
        step = list(itertools.islice(rows, share.rows_per_step))
        if not step and not rows_seen:
            raise ValueError("the stream holds no row that can be learnt")
        while step:
            following = list(itertools.islice(rows, share.rows_per_step))
            first, rows_seen = rows_seen, rows_seen + len(step)
            position = {"epoch": epoch, "rows_seen": rows_seen} if following else {"epoch": epoch + 1, "rows_seen": 0}
            (mine,) = RankSteps(range(len(step)), share)
            numbers = [[first + index for index in batch] for batch in mine]
            yield Step([collate_rows(step, batch, pad_token_id) for batch in mine], position, numbers)
            step = following
        epoch, rows_seen = epoch + 1, 0


def window_rows(stream: Stream, seed: int, epoch: int, rank: int, is_reported: bool) -> Iterator[TokenRow]:
    """The rows of a stream, window by window, each in a random order that follows from seed, epoch and its number."""
    records, counts, num_read = stream.open(), Counter(), 0
    for number in itertools.count():
        try:
            window = list(itertools.islice(records, WINDOW))
            if not window:
                return
            rows, found, problems = stream.tokenise(window, number * WINDOW)
            num_read += len(window)
            lost = {"bad": len(problems), "lost": found["lost"] + found["dropped"]}
            counts.update(lost)
            line = describe_lost(counts, num_read)
            if is_reported and any(lost.values()):
                tqdm.write("\n- ".join([line, *problems[:SHOWN]]))
            is_judged = num_read >= ENOUGH_READ or len(window) < WINDOW
            if is_judged and counts["lost"] > stream.max_lost * num_read:
                raise ValueError(f"{line}.\nMore than {stream.max_lost:.0%} would not be learnt (--allow_lost_rows).")
        except (ValueError, OSError) as error:
            stop(error, rank)
        if stream.packed_length and rows:
            rows, _ = pack_rows(Dataset.from_list(rows), stream.packed_length)
        generator = torch.Generator().manual_seed(seed + 1_000_003 * epoch + 7919 * number)
        for index in torch.randperm(len(rows), generator=generator).tolist():
            yield rows[index]


def describe_lost(counts: Counter[str], num_read: int) -> str:
    """What became of the rows read so far that are not learnt."""
    line = f"train data: of the first {num_read:,} rows of the stream"
    line += f", {counts['bad']:,} bad row(s) left out" if counts["bad"] else ""
    return line + (f", {counts['lost']:,} lost their whole answer to --max_length" if counts["lost"] else "")


def stop(error: Exception, rank: int) -> NoReturn:
    """End this rank with a message. Most errors meet all ranks, and failures.py leaves rank 0 the first word; one that
    a single machine meets is printed with its rank."""
    where = f"rank {rank}: " if rank else ""
    raise SystemExit(f"\nError: {where}{error}\n")
