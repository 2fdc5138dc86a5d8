"""What a start costs as the rows grow: seconds and private memory of each stage, and the exponents. And what a block of
8 experts costs as the ranks grow.

    make bench ARGS=scale
    python tests/bench/bench_scale.py 1000 10000000        other numbers of rows; ten million take about ten minutes
    python tests/bench/bench_scale.py streams              --streaming alone: 1, 2 and 4 ranks, and a resume

Measured is a second start, in which the tokens are on disk, in a process of its own for each number of rows. The first
one reads the file as a run does; a stand-in for the tokenizer makes its tokens, since no later start sees how they were
made. Private memory is what is not a file's: the rows of a data set that lies on disk are shared by all ranks.
"""

import json
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import datasets
import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from bench_loading import loading
from gathers import gathered
from launching import private_bytes
from rows import tokenizing
from rows.batches import Share, shuffled_order, training_steps
from rows.packing import length_grouped_order, pack_rows
from rows.prepare import prepare_data
from rows.sources import load_rows
from rows.streaming import WINDOW
from saving.state import data_hash
from training.arguments import parse_arguments
from training.launch import connect_ranks, gather
from training.model import check_rows, load_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, MixtralConfig

SAMPLE = Path(__file__).parents[2] / "recipes" / "sample"
MODEL = SAMPLE / "model"
SIZES = (1000, 10_000, 100_000, 1_000_000)
LOST = 1000  # every so many'th row has no label left, as in most data
MAX_LENGTH, VOCABULARY = 1024, 1000
RANKS, MICRO = 64, 4
STREAMED, WINDOWS = (1, 2, 4), 8  # ranks; windows of a stream, and its records up to the middle of the last one
RECORDS = WINDOWS * WINDOW - WINDOW // 2


def scale(sizes: tuple[int, ...] = SIZES) -> Iterator[str]:
    """Seconds and bytes of each stage of a second start, by number of rows."""
    found = {}
    yield "second start | rows, then s of each stage | peak of private memory above an empty process"
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder, "rows.jsonl")
            with rows.open("w") as file:
                file.writelines(f'{{"text": "row {number}"}}\n' for number in range(size))
            first, found[size] = run("first", rows), run("second", rows)
        stages, peak = found[size]["seconds"], found[size]["peak"]
        line = f"{size:>12,} | " + " | ".join(f"{name} {seconds:.2f}" for name, seconds in stages.items())
        yield f"{line} | sum {sum(stages.values()):.2f} s (the first {sum(first['seconds'].values()):.0f} s)"
        yield f"{'':12} | {peak / 2**20:,.0f} MiB private, {peak / size:,.0f} bytes per row"
    smallest, *_, largest = sizes
    yield f"from {smallest:,} to {largest:,} rows: exponent of the seconds (1: as many times as long; 0: no longer)"
    few, many = found[smallest]["seconds"], found[largest]["seconds"]
    slope = 1 / np.log(largest / smallest)
    yield "  " + " | ".join(f"{name} {slope * np.log(many[name] / few[name]):.2f}" for name in many)
    more_s, more = sum(many.values()) - sum(few.values()), found[largest]["peak"] - found[smallest]["peak"]
    yield f"  above the smallest: {more_s:.1f} s, {more_s / largest * 1e6:.2f} us and {more / largest:.0f} bytes a row"
    yield from longest_rows()
    yield from loading()
    yield from experts()
    yield from streams()


def longest_rows() -> Iterator[str]:
    """The tokens that a rank waits for in each micro-step, where rows are grouped by length, beside random order."""
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 200_000), 1, 8192).astype(np.int32)

    def padded(order: np.ndarray) -> float:  # above what the rows hold: the longest row of all ranks sets the pace
        whole = order[: len(order) // (RANKS * MICRO) * RANKS * MICRO].reshape(-1, RANKS * MICRO)
        return lengths[whole].max(1).sum() / lengths[whole].mean(1).sum()

    random = padded(shuffled_order(len(lengths), 0, 0))
    yield f"group_by_length, {RANKS} ranks of {MICRO} rows: the longest row of a step, beside random order"
    for size in (64, RANKS * MICRO):
        yield f"  groups of {size}: {padded(length_grouped_order(lengths, size, 0, 0)) / random:.2f}"


def experts() -> Iterator[str]:
    """What ranks gather of a block of Mixtral 8x7B and hold of it with its embeddings, counted in a fake group."""
    yield "8 experts | gathered of a block, in its own bytes; the most that a rank holds, in even shares"
    build = partial(AutoModelForCausalLM.from_config, MixtralConfig(num_hidden_layers=1), dtype=torch.bfloat16)
    for ranks in (16, 64):
        line = f"  {ranks} ranks"
        for name, along_dim_0 in (("all cut along dim 0", True), ("ours", False)):
            found = gathered(build, ranks, along_dim_0=along_dim_0)
            share = found["report"]["largest_share_of_a_rank"] * ranks
            line += f" | {name}: {found['sent'] / found['block']:.4f}, {share:.4f}"
        yield line


def streams() -> Iterator[str]:
    """Records that reach the loops of some ranks, which do nothing else, and what a resume near the end costs.

    Where there are more processes than cores, what each rank's process tokenises, and its CPU time (two windows ahead
    and its start included), say what cores of their own would gain.
    """
    yield "stream of chats | ranks, records/s (beside one rank), what each rank's process tokenised in CPU s"
    with tempfile.TemporaryDirectory() as folder:
        rows, first, alone = Path(folder, "rows.jsonl"), {"epoch": 0, "rows_seen": 0}, {}
        lines = (SAMPLE / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        rows.write_text("".join(islice(cycle(lines), WINDOWS * WINDOW)), encoding="utf-8")
        for ranks in STREAMED:
            found = run_ranks(ranks, rows, first, RECORDS)
            speed = RECORDS / max(one["seconds"] for one in found)
            alone = alone or found[0]
            shares = ", ".join(f"{one['tokenised']:,} in {one['cpu']:.1f} s" for one in found)
            yield f"{ranks:>12} | {speed:,.0f} ({speed * alone['seconds'] / RECORDS:.2f}) | {shares}"
        positions = {"at its window": alone["late"], "from the epoch's start": {**alone["late"], "stream": {}}}
        yield f"resume after {alone['late']['rows_seen']:,} records | s to the first step, records tokenised before it"
        for name, position in positions.items():
            (found,) = run_ranks(1, rows, position, 1)
            yield f"{'':12} | {name}: {found['seconds']:.2f} s, {found['tokenised']:,}"


def run_ranks(ranks: int, rows: Path, position: dict[str, Any], records: int) -> list[dict[str, Any]]:
    """What `measure_stream` finds on each of some ranks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": server.getsockname()[1]}
    shared |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1}
    command, processes = [sys.executable, __file__, "stream", str(rows), json.dumps(position), str(records)], []
    for rank in range(ranks):
        own = {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **own}))
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]


def measure_stream(rows: str, position: dict[str, Any], records: int) -> dict[str, Any]:
    """Take so many records of a stream on this rank: seconds, what it tokenised of them, the last position."""
    words = f"--dataset_name {rows} --streaming --max_steps 1 --max_length 1024 --output_dir {rows}.run "
    words += f"--model_name_or_path {MODEL} --per_device_train_batch_size 8 --gradient_accumulation_steps 1"
    arguments = parse_arguments(words.split())
    connect_ranks()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data, tokenised, taken = prepare_data(arguments, load_tokenizer(arguments), rank, ranks), 0, 0

    def counted(own: Any) -> list[Any]:
        nonlocal tokenised
        tokenised += len(own.rows)
        return gather(own)

    gather([])  # all are there
    start, steps = time.perf_counter(), data.steps(position, counted)
    while taken < records:
        step, taken = next(steps), taken + data.share.rows_per_step
    seconds = time.perf_counter() - start
    steps.close()
    while multiprocessing.active_children():
        time.sleep(0.01)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    gather([])  # none leaves before the others
    found = {"seconds": seconds, "tokenised": tokenised, "late": step.position, "cpu": usage.ru_utime + usage.ru_stime}
    dist.destroy_process_group()
    return found


def run(which: str, rows: Path) -> dict[str, Any]:
    """What `measure` finds in a process of its own, and the most private bytes it held above those before."""
    peak = 0
    with subprocess.Popen([sys.executable, __file__, which, str(rows)], stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, private_bytes(process.pid))
            time.sleep(0.005)
        found = json.loads(process.stdout.read().splitlines()[-1])
    return found | {"peak": peak - found["before"]}


def measure(which: str, rows: Path) -> dict[str, Any]:
    """A start: {seconds: of each stage, before: private bytes before the first}."""
    datasets.config.HF_DATASETS_CACHE = rows.parent
    datasets.disable_progress_bars()
    if which == "first":
        tokenizing.tokenize_batch = stand_in
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY))
    share, options = Share(MICRO, 1, 1, RANKS), {"seed": 0, "pad_token_id": 0}
    seconds: dict[str, float] = {}

    def timed(name: str, function: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = function()
        seconds[name] = time.perf_counter() - start
        return result

    before = private_bytes()
    records, _ = timed("read", lambda: load_rows([str(rows)], "train", "test"))
    kept, _ = timed("tokens", lambda: tokenizing.tokenize_rows(records, tokenizer, MAX_LENGTH, "train"))
    if which == "second":
        timed("hash", lambda: data_hash(kept))
        timed("check", lambda: check_rows(model, kept))
        timed("step", lambda: next(training_steps(kept, share, **options)))
        timed("grouped step", lambda: next(training_steps(kept, share, group_by_length=True, **options)))
        packed, _ = timed("packing", lambda: pack_rows(kept, MAX_LENGTH))
        timed("packed step", lambda: next(training_steps(packed, share, **options)))
    return {"seconds": seconds, "before": before}


def stand_in(batch: dict[str, list], indices: list[int], *args: Any, **kwargs: Any) -> pa.Table:
    """Rows of 8 to 31 tokens, of which the first quarter has no labels."""
    number = np.array(indices)
    lengths = 8 + number % 24
    ids = np.arange(lengths.sum(), dtype=np.int32) % VOCABULARY
    within = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    is_lost = number % LOST == LOST - 1
    is_label = (within >= np.repeat(lengths // 4, lengths)) & ~np.repeat(is_lost, lengths)
    offsets = pa.array(np.append(0, np.cumsum(lengths)), pa.int32())
    columns = {"input_ids": ids, "labels": np.where(is_label, ids, -100).astype(np.int32)}
    table = {name: pa.ListArray.from_arrays(offsets, pa.array(values)) for name, values in columns.items()}
    table |= {"state": pa.array(np.where(is_lost, "lost text", "kept text"))}
    return pa.table({**table, "problem": pa.array([""] * len(number), pa.large_string())})


def main() -> None:
    """Print the section, or a part of it, or measure one start or one rank for it."""
    if sys.argv[1:2] == ["stream"]:
        print(json.dumps(measure_stream(sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]))))
        return
    if sys.argv[1:2] in (["first"], ["second"]):
        print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]))))
        return
    is_part = sys.argv[1:2] == ["streams"]
    for line in streams() if is_part else scale(tuple(map(int, sys.argv[1:])) or SIZES):
        print(line, flush=True)


if __name__ == "__main__":
    main()
