"""Token rows to batches: which rows each rank takes, from one global order, and padding."""

import math
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from .labels import IGNORE_INDEX
from .packing import PackedRows, collate_packed, length_grouped_order, list_lengths

FIRST_ROW = {"epoch": 0, "rows_seen": 0}


class BatchSizes(Protocol):
    """What a share needs of the script's arguments."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int


@dataclass(frozen=True)
class Share:
    """Which rows of each step a rank takes."""

    micro_batch_size: int
    accumulation: int  # micro-batches per optimizer step
    rank: int
    world_size: int

    @classmethod
    def of(cls, arguments: BatchSizes, rank: int, world_size: int) -> "Share":
        """A rank's share under the script's arguments."""
        return cls(arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps, rank, world_size)

    @property
    def rows_per_step(self) -> int:
        """Of all ranks: the global batch."""
        return self.micro_batch_size * self.accumulation * self.world_size


class Step(NamedTuple):
    """One optimizer step of a rank."""

    micro_batches: list[dict[str, torch.Tensor]]
    position: dict[str, Any]  # after it: epoch, rows_seen; rows_per_group where they have a length in common; stream
    rows: list[list[Any]]  # numbers of each micro-batch's rows; of a packed row the list of its documents' numbers


def collate(rows: Sequence[dict[str, list[int]]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Pad on the right to the longest row; (B, T) each. Padding is told by length, never by id (pad may be eos)."""
    length = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        size = len(row["input_ids"])
        batch["input_ids"].append(row["input_ids"] + [pad_token_id] * (length - size))
        batch["attention_mask"].append([1] * size + [0] * (length - size))
        batch["labels"].append(row["labels"] + [IGNORE_INDEX] * (length - size))
    return {name: torch.tensor(values) for name, values in batch.items()}


class RankSteps(Sequence):
    """This rank's rows as steps of micro-batches, cut from one global order when they are asked for.

    Each step takes the next `share.rows_per_step` rows, whatever the number of ranks. In the last, shorter step every
    rank runs as many micro-batches as the others; one without rows is an empty list.
    """

    def __init__(self, order: np.ndarray | Sequence[int], share: Share) -> None:
        self.order, self.share = np.asarray(order), share

    def __len__(self) -> int:
        return math.ceil(len(self.order) / self.share.rows_per_step)

    def __getitem__(self, number: int) -> list[list[int]]:
        size, rows_per_micro_step = self.share.micro_batch_size, self.share.micro_batch_size * self.share.world_size
        first = range(len(self))[number] * self.share.rows_per_step
        rows, micro_batches = self.order[first : first + self.share.rows_per_step].tolist(), []
        for start in range(0, len(rows), rows_per_micro_step):
            mine = start + self.share.rank * size
            micro_batches.append(rows[mine : min(mine + size, start + rows_per_micro_step)])
        return micro_batches


def shuffled_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """The global row order of an epoch: the same on any number of ranks. 8 bytes per row."""
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed + epoch)).numpy()


def count_steps(
    num_rows: int, share: Share, num_train_epochs: float, max_steps: int = -1, state: dict[str, int] | None = None
) -> int:
    """Optimizer steps of the run; the last step of an epoch may be shorter.

    After the `step`s of a state, perhaps of another size, what is left is counted from `rows_seen` of `epoch`.
    """
    if max_steps > 0:
        return max_steps
    done = {"step": 0, "epoch": 0, "rows_seen": 0, **(state or {})}
    per_epoch = math.ceil(num_rows / share.rows_per_step)
    behind = (done["epoch"] + 1) * per_epoch - math.ceil((num_rows - done["rows_seen"]) / share.rows_per_step)
    return done["step"] + max(0, math.ceil(num_train_epochs * per_epoch) - behind)


def training_steps(
    rows: Sequence[dict[str, list[int]]],
    share: Share,
    position: dict[str, int] = FIRST_ROW,
    *,
    seed: int,
    pad_token_id: int,
    num_workers: int = 0,
    group_by_length: bool = False,
) -> Iterator[Step]:
    """Yield this rank's optimizer steps, without end.

    Starts after `rows_seen` rows of `epoch` (the position): it continues the same global order on any number of ranks.
    With group_by_length a group is what a step takes; the position says how many rows that was as the epoch began, so
    that its order stays though it goes on with another global batch.
    """
    epoch, rows_seen, rows_per_group = (position.get(name, 0) for name in ("epoch", "rows_seen", "rows_per_group"))
    lengths = list_lengths(rows, "input_ids") if group_by_length else None
    while True:
        if group_by_length:
            rows_per_group = rows_per_group or share.rows_per_step
            order = length_grouped_order(lengths, rows_per_group, seed, epoch)
        else:
            order = shuffled_order(len(rows), seed, epoch)
        steps = RankSteps(order[rows_seen:], share)
        batches = iter(make_loader(rows, steps, pad_token_id, num_workers))
        for step in steps:
            rows_seen = min(rows_seen + share.rows_per_step, len(rows))
            position = {"epoch": epoch, "rows_seen": rows_seen}
            if group_by_length:
                position |= {"rows_per_group": rows_per_group}
            if rows_seen == len(rows):
                position = {"epoch": epoch + 1, "rows_seen": 0}
            yield Step([next(batches) for _ in step], position, [row_numbers(rows, batch) for batch in step])
        epoch, rows_seen, rows_per_group = epoch + 1, 0, 0


def row_numbers(rows: Sequence[dict[str, list[int]]], batch: list[int]) -> list[Any]:
    """The numbers of a micro-batch's rows; of a packed row, the list of its documents' numbers."""
    return [rows.documents_of(index) for index in batch] if isinstance(rows, PackedRows) else batch


def collate_rows(
    rows: Sequence[dict[str, list[int]]], indices: list[int], pad_token_id: int
) -> dict[str, torch.Tensor]:
    """One micro-batch of these rows, or of a filler without labels where there are none."""
    chosen = [rows[index] for index in indices] or [RowsAndFiller(rows)[len(rows)]]
    return (collate_packed if "position_ids" in chosen[0] else collate)(chosen, pad_token_id)


def evaluation_batches(
    rows: Sequence[dict[str, list[int]]] | None, batch_size: int, share: Share, pad_token_id: int
) -> DataLoader | list:
    """This rank's share of the rows: over all ranks every row once, and the same number of batches on each; none
    without rows."""
    if rows is None:
        return []
    steps = RankSteps(np.arange(len(rows)), Share(batch_size, 1, share.rank, share.world_size))
    return make_loader(rows, steps, pad_token_id)


class RowsAndFiller(Dataset):
    """Rows, and after the last one a row of two tokens without labels for a rank that has none."""

    def __init__(self, rows: Sequence[dict[str, list[int]]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows) + 1

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if index < len(self.rows):
            return self.rows[index]
        first = self.rows[0]
        filler = {"input_ids": (first["input_ids"] * 2)[:2], "labels": [IGNORE_INDEX] * 2}
        return {**filler, "position_ids": [0, 1]} if "position_ids" in first else filler


@dataclass(frozen=True)
class MicroBatches(Sequence):
    """What a loader reads, one micro-batch after the other; for an empty one the row after the last."""

    steps: RankSteps
    filler: int

    def __len__(self) -> int:
        return (len(self.steps) - 1) * self.steps.share.accumulation + len(self.steps[-1])

    def __getitem__(self, number: int) -> list[int]:
        step, micro = divmod(range(len(self))[number], self.steps.share.accumulation)
        return self.steps[step][micro] or [self.filler]

    def __iter__(self) -> Iterator[list[int]]:
        return (batch or [self.filler] for step in self.steps for batch in step)


def make_loader(
    rows: Sequence[dict[str, list[int]]], steps: RankSteps, pad_token_id: int, num_workers: int = 0
) -> DataLoader:
    """A loader of the micro-batches of these steps, in order. An empty one becomes a filler: a row of two tokens
    without labels."""
    return DataLoader(
        RowsAndFiller(rows),
        batch_sampler=MicroBatches(steps, len(rows)),
        collate_fn=partial(collate_packed if "position_ids" in rows[0] else collate, pad_token_id=pad_token_id),
        num_workers=num_workers,
        # Without its own generator every new iterator draws from the global one, so that an evaluation or a resume
        # would shift the dropout masks of the steps after it.
        generator=torch.Generator(),
        worker_init_fn=leave_stop_signals_to_the_rank,
    )


def leave_stop_signals_to_the_rank(_: int) -> None:
    """A signal to all processes of a job must not take the loader from a rank that has yet to save."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
