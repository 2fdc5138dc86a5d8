"""Measure what the recipes claim, ours and others side by side in one run.

    .venv/bin/python tests/bench.py packing

The packing section compares with TRL where it is installed, for instance beside the virtual environment:
    pip install --target /tmp/trl --no-deps trl==1.16.0
    PYTHONPATH=/tmp/trl .venv/bin/python tests/bench.py packing
"""

import argparse
import importlib.util
import platform
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import datasets
import numpy as np
import pyarrow as pa
from packing import plan_packing

MAX_LENGTH = 2048


def main() -> None:
    """Run the sections named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of: {', '.join(SECTIONS)}; none means all")
    chosen = parser.parse_args().sections or list(SECTIONS)
    unknown = [name for name in chosen if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are: {', '.join(SECTIONS)}")
    print(f"{date.today()} | {platform.processor() or platform.machine()} | Python {platform.python_version()}")
    for name in chosen:
        print(f"\n== {name} ==", flush=True)
        for line in SECTIONS[name]():
            print(line, flush=True)


def packing() -> Iterator[str]:
    """Rows and seconds of planning from lengths alone; the last two, TRL's pack_dataset, move the tokens as well."""
    if not has_trl():
        yield "TRL is not installed, so it is left out; the docstring of this file says how to add it."
    for kind, draw in DISTRIBUTIONS.items():
        for num_documents in (100_000, 1_000_000):
            lengths = np.clip(draw(np.random.default_rng(0), num_documents), 1, MAX_LENGTH).astype(np.int64)
            rows_needed = lengths.sum() / MAX_LENGTH
            yield f"\n{num_documents:,} documents, {kind}: {lengths.sum():,} tokens, rows of {MAX_LENGTH:,}"
            yield f"{'':44} {'rows':>9} {'filled':>8} {'/ ours':>8} {'time':>10} {'/ ours':>8}"
            ours = None
            for name, pack in packers(lengths).items():
                start = time.perf_counter()
                num_rows = pack()
                time_s = time.perf_counter() - start
                ours = ours or (num_rows, time_s)
                line = f"{name:44} {num_rows:9,} {rows_needed / num_rows:8.2%} {num_rows / ours[0]:8.4f} "
                yield line + f"{time_s:8.2f} s {time_s / ours[1]:8.1f}"


def packers(lengths: np.ndarray) -> dict[str, Callable[[], int]]:
    """What to measure, ours first: functions that return the number of rows, with their input made beforehand."""
    packers = {
        "plan_packing (ours)": lambda: len(plan_packing(lengths, MAX_LENGTH)),
        "first fit, in order": lambda: first_fit(lengths),
        "next fit, in order": lambda: next_fit(lengths),
    }
    if has_trl():
        from trl.data_utils import pack_dataset

        offsets = np.append(0, np.cumsum(lengths))
        tokens = pa.array(np.zeros(offsets[-1], dtype=np.int8))  # one byte each: as little to move as can be
        column = pa.LargeListArray.from_arrays(pa.array(offsets), tokens)
        documents = datasets.Dataset(pa.table({"input_ids": column}))
        packers[f"trl {version('trl')} bfd, its planning alone"] = lambda: trl_planning(lengths)
        for at_once, what in ((len(lengths), "all documents at once"), (1000, "1,000 at a time (default)")):
            options = {"batch_size": at_once, "keep_in_memory": True, "load_from_cache_file": False}
            packers[f"trl {version('trl')} bfd, {what}"] = lambda options=options: len(
                pack_dataset(documents, MAX_LENGTH, "bfd", options)
            )
    return packers


def has_trl() -> bool:
    """Whether TRL can be imported."""
    return importlib.util.find_spec("trl") is not None


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "chats (lognormal, median 403)": lambda draw, count: draw.lognormal(6, 1, count),
    "much the same length (normal, 683 +- 102)": lambda draw, count: draw.normal(
        MAX_LENGTH / 3, MAX_LENGTH / 20, count
    ),
}


def next_fit(lengths: np.ndarray) -> int:
    """Fill a row until the next document does not fit, then start another: what a streaming packer does."""
    num_rows, room = 0, 0
    for length in lengths.tolist():
        if length > room:
            num_rows, room = num_rows + 1, MAX_LENGTH
        room -= length
    return num_rows


def first_fit(lengths: np.ndarray) -> int:
    """Put each document, in order, into the first row that has room, found in a tree of the largest room."""
    size = 1 << len(lengths).bit_length()
    room = [MAX_LENGTH] * (2 * size)  # node n has children 2n and 2n + 1; the leaves are rows
    for length in lengths.tolist():
        node = 1
        while node < size:
            node *= 2
            if room[node] < length:
                node += 1
        room[node] -= length
        while node > 1:
            node //= 2
            left, right = room[2 * node], room[2 * node + 1]
            room[node] = left if left > right else right
    return sum(left < MAX_LENGTH for left in room[size:])


def trl_planning(lengths: np.ndarray) -> int:
    """The loop of TRL's _pack_bfd over its own segment tree, without the tokens around it."""
    from trl.data_utils import _SegmentTree

    tree = _SegmentTree(MAX_LENGTH)
    tree.add(MAX_LENGTH)
    bins: list[list[int]] = []
    bins_with = defaultdict(deque)
    order = np.argsort(-lengths, kind="stable")
    for length, document in zip(lengths[order].tolist(), order.tolist()):
        room = tree.search(length)
        if room < MAX_LENGTH:
            documents = bins_with[room].popleft()
            if not bins_with[room]:
                tree.remove(room)
        else:
            documents = []
            bins.append(documents)
        documents.append(document)
        bins_with[room - length].append(documents)
        if room > length:
            tree.add(room - length)
    return len(bins)


SECTIONS: dict[str, Callable[[], Iterator[str]]] = {"packing": packing}

if __name__ == "__main__":
    datasets.disable_progress_bars()
    main()
