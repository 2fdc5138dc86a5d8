"""Training from sources that are read while they are learnt, for what does not fit on disk (--streaming).

Every rank reads the whole stream in the same windows, tokenises them alike and keeps its share of each step, so that
the rows of a step, and where a resumed run goes on, do not depend on the number of ranks. A window is shuffled (and
packed) in itself; nothing waits for another rank.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from batches import collate_rows, split_rows
from packing import pack_rows

WINDOW = 2000  # records read, tokenised and shuffled at a time

TokenRow = dict[str, list[int]]


@dataclass
class Stream:
    """`open` starts the records anew; `tokenise` takes some of them and the number of the first."""

    open: Callable[[], Iterator[dict[str, Any]]]
    tokenise: Callable[[list[dict[str, Any]], int], list[TokenRow]]
    packed_length: int = 0  # tokens per packed row; 0: not packed


def stream_steps(
    stream: Stream,
    micro_batch_size: int,
    accumulation: int,
    rank: int,
    world_size: int,
    seed: int,
    pad_token_id: int,
    epoch: int = 0,
    rows_seen: int = 0,
) -> Iterator[tuple[list[dict[str, torch.Tensor]], dict[str, int]]]:
    """Yield (this rank's micro-batches of one optimizer step, the position after it), without end.

    A bad row in the middle of a run ends every rank with its message: all of them read it.
    """
    rows_per_step = micro_batch_size * accumulation * world_size
    while True:
        rows = window_rows(stream, seed, epoch)
        rows = itertools.islice(rows, rows_seen, None)
        step = list(itertools.islice(rows, rows_per_step))
        if not step and not rows_seen:
            raise ValueError("the stream holds no row that can be learnt")
        while step:
            following = list(itertools.islice(rows, rows_per_step))
            rows_seen += len(step)
            position = {"epoch": epoch, "rows_seen": rows_seen} if following else {"epoch": epoch + 1, "rows_seen": 0}
            (mine,) = split_rows(list(range(len(step))), micro_batch_size, accumulation, rank, world_size)
            yield [collate_rows(step, batch, pad_token_id) for batch in mine], position
            step = following
        epoch, rows_seen = epoch + 1, 0


def window_rows(stream: Stream, seed: int, epoch: int) -> Iterator[TokenRow]:
    """The rows of a stream, window by window, each in a random order that follows from seed, epoch and its number."""
    records = stream.open()
    for number in itertools.count():
        window = list(itertools.islice(records, WINDOW))
        if not window:
            return
        try:
            rows = stream.tokenise(window, number * WINDOW)
        except ValueError as error:
            print(f"\nError: {error}\n", file=sys.stderr, flush=True)
            sys.exit(1)
        if stream.packed_length and rows:
            rows, _ = pack_rows(rows, stream.packed_length)
        generator = torch.Generator().manual_seed(seed + 1_000_003 * epoch + 7919 * number)
        for index in torch.randperm(len(rows), generator=generator).tolist():
            yield rows[index]
