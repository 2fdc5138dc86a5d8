"""Measure what the recipes claim, ours and others side by side in one run.

    make bench                    the training loops beside others (contenders), about 15 minutes on 2 cores
    make bench ARGS=preparing     other sections
    make bench-ladder             what each dial of the scenario scripts buys and costs

All but checkpoints, ladder, planner and scale compare with TRL where it is installed, for instance beside the virtual
environment:
    pip install --target trl-for-bench --no-deps trl==1.16.0
    PYTHONPATH=trl-for-bench make bench
"""

import argparse
import importlib.util
import platform
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import datasets
import numpy as np
import pyarrow as pa
from bench_checkpoint import checkpoints
from bench_contenders import contenders
from bench_ladder import ladder
from bench_planner import planner
from bench_scale import scale
from rows.packing import pack_rows, plan_packing
from rows.sources import load_rows
from rows.tokenizing import tokenize_rows
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

MAX_LENGTH = 2048
ROOT = Path(__file__).parents[2]
RECIPES, SHARED_DATA = ROOT / "recipes", ROOT.parent / "shared" / "cases" / "data"
PREPARED = (  # name, file, how many times over
    ("sample chats", RECIPES / "sample" / "data" / "train.jsonl", 3),
    ("gsm8k pairs", SHARED_DATA / "gsm8k_test.jsonl", 8),
    ("mlx pairs", SHARED_DATA / "mlx_prompt_completion_valid.jsonl", 20),
)


def main() -> None:
    """Run the sections named on the command line, or contenders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sections", nargs="*", metavar="section", help=f"of: {', '.join(SECTIONS)}; none means contenders"
    )
    chosen = parser.parse_args().sections or ["contenders"]
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
        "plan_packing (ours)": lambda: len(plan_packing(lengths, MAX_LENGTH)[1]) - 1,
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


def preparing() -> Iterator[str]:
    """Seconds from raw rows to packed rows of tokens and masks, in one process each, caches empty.

    TRL's is what SFTTrainer's constructor takes longer with raw rows than with rows that are tokens already.
    """
    if not has_trl():
        yield "TRL is not installed, so it is left out; the docstring of this file says how to add it."
    tokenizer = AutoTokenizer.from_pretrained(RECIPES / "sample" / "model")
    for name, file, repeats in PREPARED:
        if not file.is_file():
            yield f"{file} is not part of a clone; left out"
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows_file = Path(folder, file.name)
            rows_file.write_bytes(file.read_bytes() * repeats)
            datasets.config.HF_DATASETS_CACHE = Path(folder)
            columns = {"prompt": "question", "completion": "answer"} if name.startswith("gsm8k") else {}
            start = time.perf_counter()
            rows, _ = load_rows([str(rows_file)], "train", "test")
            kept, _ = tokenize_rows(rows, tokenizer, 1024, "train", columns=columns)
            read_s = time.perf_counter() - start
            packed, _ = pack_rows(kept, 1024)
            ours_s = time.perf_counter() - start
            line = (
                f"{name}: {len(rows):,} rows into {len(packed):,} | ours {ours_s:.2f} s ({read_s:.2f} before packing)"
            )
            if has_trl():
                theirs_s = trl_preparation(rows_file, columns, tokenizer, Path(folder))
                line += f" | trl {version('trl')} {theirs_s:.2f} s | trl / ours {theirs_s / ours_s:.2f}"
            yield line


def trl_preparation(file: Path, columns: dict[str, str], tokenizer: PreTrainedTokenizerBase, folder: Path) -> float:
    """Seconds that SFTTrainer takes for reading, tokenising and packing, what the rest of it takes left out."""
    from trl import SFTConfig, SFTTrainer

    def construct(rows: datasets.Dataset) -> float:
        options = {"max_length": 1024, "packing": True, "report_to": "none", "use_cpu": True, "bf16": False}
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=2048))
        start = time.perf_counter()
        config = SFTConfig(output_dir=str(folder), completion_only_loss=None, **options)
        SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer)
        return time.perf_counter() - start

    construct(datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]]}))  # what is imported the first time
    rest_s = construct(datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]]}))
    start = time.perf_counter()
    rows = datasets.load_dataset("json", data_files=str(file), cache_dir=str(folder))["train"]
    rows = rows.rename_columns({theirs: ours for ours, theirs in columns.items()})
    return time.perf_counter() - start + construct(rows) - rest_s


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


SECTIONS: dict[str, Callable[[], Iterator[str]]] = {
    "contenders": contenders,
    "ladder": ladder,
    "packing": packing,
    "preparing": preparing,
    "checkpoints": checkpoints,
    "planner": planner,
    "scale": scale,
}

if __name__ == "__main__":
    datasets.disable_progress_bars()
    main()
