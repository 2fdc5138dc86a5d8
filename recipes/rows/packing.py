"""Rows by their lengths: several documents packed into one row, or rows of similar length next to one another.

A document is one row of tokenizing.py, however many end-of-text tokens it holds. Nothing here cuts or drops a token.
B rows of a batch, T the longest of them in tokens.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset

from .labels import IGNORE_INDEX

MEGA_BATCH_GROUPS = 50  # groups sorted together, as in transformers: more is less padding and less random
ROWS_TOGETHER, LENGTH_NOISE = 8, 0.5  # rows sorted by length within a group, and by how much of it they change places
GOOD_ENOUGH = 1.01  # times the lower bound: at most one row in a hundred is left for a search to save
ROWS_AT_ONCE = 100_000  # whose lengths are looked up, or sorted
SEARCH_LENGTH = 2048  # the search counts a row in at most so many units; its cost grows with their square

# Documents of this size, into bins from this one on, so many bins, so many documents in each.
Fill = tuple[int, int, int, int]


class PackedRows(Sequence):
    """Rows of several documents each, put together when they are read: kept are the numbers of plan_packing alone.

    Positions restart at 0 with each document, which is how the model tells documents apart. The label at a document's
    first position is IGNORE_INDEX: the loss shifts by one, so it would train the end of one document to predict the
    start of the next (pytorch/torchtitan#4075). Every other label is kept: as many are trained as without packing.
    """

    def __init__(self, rows: Dataset, documents: np.ndarray, starts: np.ndarray) -> None:
        self.rows = rows.select_columns(["input_ids", "labels"]).with_format("arrow")  # stay where they are: on disk
        self.documents, self.starts = documents, starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        documents = self.documents_of(index)
        table = self.rows[documents]
        lengths = pc.list_value_length(table["input_ids"]).to_numpy()
        firsts = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) - np.repeat(firsts, lengths)
        ids, labels = (pc.list_flatten(column).to_numpy() for column in table.columns)
        row = {"input_ids": ids, "labels": np.where(positions, labels, IGNORE_INDEX), "position_ids": positions}
        return {**{name: values.tolist() for name, values in row.items()}, "documents": documents}

    def documents_of(self, index: int) -> list[int]:
        """The numbers of a row's documents."""
        index = range(len(self))[index]
        return self.documents[self.starts[index] : self.starts[index + 1]].tolist()


def pack_rows(rows: Dataset, max_length: int) -> tuple[PackedRows, str]:
    """Return (rows of {input_ids, labels, position_ids, documents: their numbers}, one line on what happened).

    Raises:
        ValueError: a document that plan_packing refuses, or one whose labels are not as many as its tokens.
    """
    lengths, num_labels = list_lengths(rows, "input_ids"), list_lengths(rows, "labels")
    for index in np.flatnonzero(lengths != num_labels)[:1]:
        raise ValueError(
            f"The document at index {index} has {lengths[index]} tokens and {num_labels[index]} labels; "
            "packing needs one label per token. Put IGNORE_INDEX where nothing is learnt."
        )
    packed, tokens = PackedRows(rows, *plan_packing(lengths, max_length)), lengths.sum()
    line = f"packing: {len(rows):,} rows into {len(packed):,} rows of at most {max_length:,} tokens, "
    return packed, line + f"{tokens:,} tokens, {tokens / (len(packed) * max_length):.1%} filled"


def list_lengths(rows: Dataset, column: str) -> np.ndarray:
    """How many values each row has in a column of lists, by Arrow's offsets: no row is read."""
    batches = rows.select_columns(column).with_format("arrow").iter(ROWS_AT_ONCE)
    lengths = [pc.list_value_length(batch[column]).to_numpy() for batch in batches]
    return np.concatenate([np.empty(0, dtype=np.int32), *lengths])


def collate_packed(rows: list[dict[str, list[int]]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Pad packed rows on the right to the longest; (B, T) each. The padding is a document of its own, without labels.

    There is no attention_mask on purpose. transformers' eager and sdpa attention read the documents off the positions
    only if no mask is given and the cache is off; otherwise the documents see one another, and nothing is said
    (huggingface/transformers#46634). Flash attention does so in batches of one row only, unless it is handed where they
    begin (training/sending.py).
    """
    length = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": []}
    for row in rows:
        missing = length - len(row["input_ids"])
        batch["input_ids"].append(row["input_ids"] + [pad_token_id] * missing)
        batch["labels"].append(row["labels"] + [IGNORE_INDEX] * missing)
        batch["position_ids"].append(row["position_ids"] + list(range(missing)))
    return {name: torch.tensor(values) for name, values in batch.items()}


def plan_packing(lengths: Sequence[int] | np.ndarray, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (the documents of the packed rows, row after row; where among them each row starts, and where all end).

    Numbers of documents ascend within a row, rows ascend by their first document.

    Best fit decreasing (the longest document first, each into the fullest row that has room), which wastes next to
    nothing on documents of many lengths. Where it stays away from the lower bound, as on documents of much the same
    length, exact_fills searches for better rows, and the plan with the fewest is taken. Deterministic; a million
    documents take a second or two on one CPU core, at most 50 bytes for each meanwhile and 12 for the plan.

    Raises:
        ValueError: no document, an empty one, or one longer than max_length.
    """
    sizes = np.asarray(lengths)
    wrong = np.flatnonzero((sizes < 1) | (sizes > max_length))
    if wrong.size:
        raise ValueError(
            f"The document at index {wrong[0]} has {sizes[wrong[0]]:,} tokens ({wrong.size:,} in all are out of range);"
            f" packing takes 1 to max_length {max_length:,}. Cut, split or drop them before, or raise max_length."
        )
    if not sizes.size:
        raise ValueError("There are no documents to pack; packing needs one or more. Check the data.")
    fills = best_fit_fills(*count_sizes(sizes), max_length)
    lower_bound = max(math.ceil(sizes.sum() / max_length), np.count_nonzero(sizes > max_length // 2))
    if num_bins(fills) > GOOD_ENOUGH * lower_bound:
        unit = math.ceil(max_length / SEARCH_LENGTH)
        # Sizes round up and the limit down, so what fits in units fits in tokens; one over the limit fills it alone.
        coarse = count_sizes(np.minimum(-(-sizes // unit), max_length // unit))
        searched = (exact_fills(*coarse, max_length // unit, longest_first) for longest_first in (True, False))
        fills = min(fills, *searched, key=num_bins)  # the first of equals
    return assign_documents(sizes, fills)


def count_sizes(sizes: np.ndarray) -> tuple[list[int], list[int]]:
    """Return (distinct sizes, the largest first; how many there are of each)."""
    distinct, counts = np.unique(sizes, return_counts=True)
    return distinct[::-1].tolist(), counts[::-1].tolist()


def num_bins(fills: list[Fill]) -> int:
    """Number of bins that the fills use."""
    return max(first_bin + bins for _, first_bin, bins, _ in fills)


def assign_documents(sizes: np.ndarray, fills: list[Fill]) -> tuple[np.ndarray, np.ndarray]:
    """Hand out the documents, the largest first, to the fills, the largest size first; returns what plan_packing does.

    Sizes that were rounded up keep their order, so these fills serve for the documents themselves.
    """
    number = np.int32 if sizes.size < 2**31 else np.int64  # there may be many documents, and many ranks
    numbers = np.arange(sizes.size, dtype=number)
    _, first_bin, bins, per_bin = np.array(sorted(fills, key=lambda fill: -fill[0]), dtype=number).T
    taken = bins * per_bin  # documents of each fill
    bin_of_next = numbers - np.repeat(np.cumsum(taken, dtype=number) - taken, taken)
    bin_of_next //= np.repeat(per_bin, taken)
    bin_of_next += np.repeat(first_bin, taken)
    bin_of = np.empty_like(numbers)
    bin_of[np.argsort(-sizes, kind="stable")] = bin_of_next
    counts = np.bincount(bin_of)
    first_document = np.empty(len(counts), dtype=number)
    first_document[bin_of[::-1]] = numbers[::-1]  # of several that are written to one place the last stays
    by_first = np.argsort(first_document)
    place = np.empty_like(first_document)
    place[by_first] = np.arange(len(counts))  # bins are now numbered by their first document
    documents = np.argsort(place[bin_of], kind="stable").astype(number)
    return documents, np.append(0, np.cumsum(counts[by_first]))


def best_fit_fills(sizes: list[int], counts: list[int], max_length: int) -> list[Fill]:
    """Best fit decreasing by groups of equal size, the largest first.

    Equal documents go into equal bins at once: a bin just used, if it has room for another, is now the fullest that
    has, so best fit fills one such bin after the other. A step uses up its group or a range of bins: never more steps
    than documents, and a few thousand for a million chats.

    Source: Johnson, "Near-optimal bin packing algorithms" (1973); for documents, https://arxiv.org/abs/2404.10830
    """
    ranges: dict[int, list[tuple[int, int]]] = {}  # room left -> ranges of bins that have it
    rooms: list[int] = []  # the keys of `ranges`, ascending
    fills, num_opened = [], 0
    for size, left in zip(sizes, counts):
        while left:
            at = bisect_left(rooms, size)
            if at < len(rooms):
                room = rooms[at]
                first, end = ranges[room].pop()
                if not ranges[room]:
                    del ranges[room], rooms[at]
            else:
                room = max_length
                first, end = num_opened, num_opened + max(1, left // (max_length // size))
                num_opened = end
            per_bin = min(room // size, left)
            middle = min(end, first + left // per_bin)
            fills.append((size, first, middle - first, per_bin))
            left -= (middle - first) * per_bin
            for start, stop, rest in ((first, middle, room - per_bin * size), (middle, end, room)):
                if start == stop or not rest:
                    continue
                if rest not in ranges:
                    ranges[rest] = []
                    insort(rooms, rest)
                ranges[rest].append((start, stop))
    return fills


def exact_fills(sizes: list[int], counts: list[int], max_length: int, longest_first: bool) -> list[Fill]:
    """Fill one bin as exactly as the documents left allow, repeat it while they last, and so on.

    Source: the minimum-bin-slack heuristic, Gupta and Ho (1999); with the longest document first, Fleszar and Hindi
    (2002). Taking the commonest sizes is ours: it keeps the mix of sizes, so that late bins can be filled as well.
    """
    all_sizes, left = np.array(sizes), np.array(counts)
    closest, is_stale = closest_sums(all_sizes, left, max_length), False
    fills, num_opened = [], 0
    while left.any():
        in_bin, room = fill_bin(all_sizes, left, closest, max_length, longest_first)
        if room and is_stale:  # perhaps only because `closest` counts on documents that are gone by now
            all_sizes, left = all_sizes[left > 0], left[left > 0]
            closest, is_stale = closest_sums(all_sizes, left, max_length), False
            continue
        used = np.flatnonzero(in_bin)
        bins = int((left[used] // in_bin[used]).min())
        fills += [(int(all_sizes[i]), num_opened, bins, int(in_bin[i])) for i in used]
        left[used] -= bins * in_bin[used]
        num_opened, is_stale = num_opened + bins, True
    return fills


def fill_bin(
    sizes: np.ndarray, counts: np.ndarray, closest: np.ndarray, max_length: int, longest_first: bool
) -> tuple[np.ndarray, int]:
    """Return (how many documents of each size go into a bin, the room that stays empty)."""
    left, in_bin, room = counts.copy(), np.zeros_like(counts), max_length
    while True:
        fitting = np.flatnonzero((sizes <= room) & (left > 0))
        if not fitting.size:
            return in_bin, room
        if longest_first and room == max_length:
            choice = fitting[0]
        else:
            after = room - sizes[fitting]
            slack = after - closest[after]
            best = fitting[slack == slack.min()]
            choice = best[np.argmax(left[best] * sizes[best])]
        in_bin[choice] += 1
        left[choice] -= 1
        room -= int(sizes[choice])


def closest_sums(sizes: np.ndarray, counts: np.ndarray, max_length: int) -> np.ndarray:
    """Return, for each room from 0 to max_length, the largest sum of documents that fits into it; (max_length + 1,)."""
    sums, mask = 1, (1 << (max_length + 1)) - 1  # bit n of `sums`: some documents add up to n
    for size, count in zip(sizes.tolist(), counts.tolist()):
        left, step = min(count, max_length // size), 1
        while left:  # 1, 2, 4, ... and the rest: any number of them up to `count` is a sum of these
            step = min(step, left)
            sums |= (sums << (size * step)) & mask
            left, step = left - step, step * 2
    octets = np.frombuffer(sums.to_bytes(max_length // 8 + 1, "little"), dtype=np.uint8)
    is_sum = np.unpackbits(octets, bitorder="little")[: max_length + 1].astype(bool)
    return np.maximum.accumulate(np.where(is_sum, np.arange(max_length + 1), 0))


def length_grouped_order(lengths: np.ndarray, rows_per_group: int, seed: int, epoch: int) -> np.ndarray:
    """The global row order of an epoch in which each group of rows_per_group has rows of similar length.

    For rows that are not packed: less padding. A group is what one optimizer step takes over all ranks; the order does
    not depend on how many ranks share it. Random rows are sorted by length, MEGA_BATCH_GROUPS groups at a time. The
    group with the longest row comes first, so that running out of memory does too; the others, and inside each group
    parts of ROWS_TOGETHER rows, come in random order (transformers leaves both sorted: a sawtooth of lengths). Ten
    million rows take a few seconds on one CPU core, and 16 bytes each meanwhile.

    Source: get_length_grouped_indices in transformers' trainer_pt_utils.py, which --group_by_length uses.
    """
    generator = torch.Generator().manual_seed(seed + epoch)

    def random(*shape: int) -> np.ndarray:
        return torch.rand(shape, generator=generator).numpy()

    def by(values: np.ndarray, groups: np.ndarray) -> np.ndarray:  # each group sorted; in one way on every processor
        return np.take_along_axis(groups, values.argsort(1, kind="stable"), 1)

    def mixed(groups: np.ndarray) -> np.ndarray:  # (groups, rows of each)
        num_groups, size = groups.shape
        noise = 1 + LENGTH_NOISE * random(num_groups, size)
        groups = by(lengths[groups].astype(np.float32) * noise, groups)
        parts = random(num_groups, math.ceil(size / ROWS_TOGETHER)).argsort(1, kind="stable").repeat(ROWS_TOGETHER, 1)
        return by(parts[:, :size] + random(num_groups, size), groups)

    order = torch.randperm(len(lengths), generator=generator).numpy()
    longest = lengths[order].argmax()
    order[[0, longest]] = order[[longest, 0]]
    # Few rows are cut into four mega-batches or more, as in transformers: one would be the same groups every epoch.
    groups_at_once = max(1, min(len(lengths) // (4 * rows_per_group), MEGA_BATCH_GROUPS))
    for rows in in_blocks(order, groups_at_once * rows_per_group):
        rows[:] = by(-lengths[rows], rows)
    for groups in in_blocks(order, rows_per_group):
        groups[:] = mixed(groups)
    end = len(order) // rows_per_group * rows_per_group  # a shorter group stays last: it would shift those after it
    others = order[rows_per_group:end].reshape(-1, rows_per_group)
    others[:] = others[torch.randperm(len(others), generator=generator).numpy()]
    return order


def in_blocks(order: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Views of an order as blocks of that size, a row each, some at a time; what is left is the last, shorter one."""
    end, at_once = len(order) // size * size, max(1, ROWS_AT_ONCE // size) * size
    for first in range(0, end, at_once):
        yield order[first : min(first + at_once, end)].reshape(-1, size)
    yield order[None, end:]
