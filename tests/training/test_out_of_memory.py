"""finetune_mem_limit.py: a rank that runs out of memory anywhere in a step changes nothing but the micro-batches.

One run of out_of_memory_worker.py in 2 processes makes every run, the fault injected into rank 1 alone (once into
both). The step that is done again equals the reference of the unsplit micro-batches as closely as an undisturbed run
does (tolerances: see test_exactness.py).
"""

import json
import shutil
from types import SimpleNamespace

import out_of_memory_worker
import pytest
import torch
import torch.distributed as dist
from cells import check_cell, run_cells
from in_process import Run
from launching import part_of_sample, small_model
from training.memory_errors import is_out_of_memory
from training.out_of_memory import SentInStep, SmallerMicroBatches, filler


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_cells(tmp_path_factory.mktemp("out_of_memory") / "results.json", worker="out_of_memory_worker")


def test_step_that_ran_out_of_memory_anywhere_equals_the_undisturbed_one(results):
    cells = results["cells"]
    assert len(cells) == 5 + 3 * 3 - 1 + 2 + 1 + 2, list(cells)
    for name, cell in cells.items():
        check_cell(name, cell)


def test_smaller_micro_batches_are_said_once_with_the_rank(results):
    for name, cell in results["cells"].items():
        (said,) = cell["said"]
        ranks = ("rank 0: ", "rank 1: ") if name.startswith("both") else ("rank 1: ",)
        assert all(rank in said for rank in ranks) and said.count("rank ") == len(ranks), said
        assert "micro-batches of 1 instead of 2 row(s), 2 times as many" in said
        assert "total capacity" not in said  # of the allocator's statistics nothing is repeated


def test_step_that_is_done_again_draws_the_same_random_numbers(results):
    assert results["dropout"] is True and results["dropout, after an evaluation"] is True
    assert results["dropout, not rewound"] is False


def test_one_row_that_is_too_long_ends_every_rank_with_the_next_things_to_try(results):
    assert results["ends"]["one row"] == [1, 1]
    assert results["output"].count("Error: rank 1: out of memory in forward or backward") == 1
    assert "a shorter --max_length" in results["output"]


def test_optimizer_step_out_of_memory_ends_every_rank_with_the_next_things_to_try(results):
    assert results["ends"]["optimizer"] == [1, 1]
    assert results["output"].count("Error: rank 1: out of memory in the optimizer's step") == 1
    assert "hook_offload_optimizer: true" in results["output"]


def test_run_that_goes_on_keeps_the_smaller_micro_batches_and_is_equal_to_the_last_bit(tmp_path):
    """Dropout draws other masks for other shapes: with whole micro-batches it would be another run."""
    arguments = ["--model_name_or_path", small_model(), "--dataset_name", part_of_sample(tmp_path / "data", 8)]
    arguments += ["--use_peft", "--lora_dropout", 0.1, "--max_steps", 4, "--max_length", 128, "--logging_steps", 1]
    arguments += [
        "--report_to",
        "none",
        "--per_device_train_batch_size",
        2,
        "--save_steps",
        2,
        "--eval_steps",
        0,
        "--max_new_tokens",
        1,
    ]
    arguments += ["--output_dir", tmp_path / "out"]

    def run(*more, **kwargs):
        done = Run([*arguments, *more], tmp_path / "log", script="finetune_mem_limit", **kwargs).wait()
        assert done.codes == [0, 0], done.output[-3000:]
        rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
        return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row], done.output

    undisturbed, said = run(before=out_of_memory_worker.one_row_fits)
    assert "in micro-batches of 1 instead of 2 row(s)" in said
    manifest = tmp_path / "out" / "checkpoint-2" / "manifest.json"
    facts = json.loads(manifest.read_text())
    assert facts["rows_per_piece"] == 1
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    resumed, said = run("--resume_from_checkpoint", manifest.parent)
    assert "micro-batches of 1 instead of 2 row(s): it was out of memory" in said
    assert resumed == undisturbed and len(resumed) == 4
    manifest.write_text(json.dumps({name: value for name, value in facts.items() if name != "rows_per_piece"}))
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    assert run("--resume_from_checkpoint", manifest.parent)[0] != undisturbed


def test_pieces_of_a_checkpoint_are_never_more_than_the_rows_asked_for():
    asked = SimpleNamespace(per_device_train_batch_size=2)
    said, model = [], torch.nn.Linear(1, 1)
    for saved, rows in ((0, 2), (1, 1), (2, 2), (4, 2)):
        smaller = SmallerMicroBatches(None, model, asked, state={"rows_per_piece": saved}, say=said.append)
        assert smaller.rows == rows and smaller.state == {"rows_per_piece": 1 if rows == 1 else 0}
    assert len(said) == 1


def batch_of(rows, length=4):
    ids = torch.arange(2, 2 + rows * length).view(rows, length)
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.tensor([[1] * (length - 1) + [0]] * rows)}


@pytest.mark.parametrize(("asked", "rows", "limit", "sizes"), [(5, 5, 2, [2, 2, 1]), (4, 1, 2, [1, 1]), (4, 4, 4, [4])])
def test_pieces_hold_every_row_once_and_are_as_many_on_every_rank(asked, rows, limit, sizes):
    smaller = SmallerMicroBatches.__new__(SmallerMicroBatches)
    smaller.rows_asked, smaller.rows = asked, limit
    batch = batch_of(rows)
    pieces = smaller.split(batch)
    assert [len(piece["input_ids"]) for piece in pieces] == sizes
    with_labels = [piece for piece in pieces if (piece["labels"] != -100).any()]
    assert torch.equal(torch.cat([piece["input_ids"] for piece in with_labels]), batch["input_ids"])


def test_filler_has_no_label_and_leaves_the_rows_alone():
    batch = batch_of(3)
    small = filler(batch)
    assert {name: tuple(values.shape) for name, values in small.items()} == dict.fromkeys(batch, (1, 2))
    assert (small["labels"] == -100).all() and (small["attention_mask"] == 1).all()
    assert torch.equal(batch["labels"], batch["input_ids"])


def test_out_of_memory_is_told_from_other_errors():
    """The messages of torch's allocators; the first comes from a real allocation."""
    with pytest.raises(RuntimeError) as real:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(real.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    for text in (
        "CUDA error: out of memory\nCUDA kernel errors might be",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
    ):
        assert is_out_of_memory(RuntimeError(text)), text
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(dist.DistBackendError("NCCL error: Cuda failure 2 'out of memory'"))  # sent or not?


def test_rank_that_cannot_even_go_through_two_tokens_says_so_and_ends():
    smaller = SmallerMicroBatches.__new__(SmallerMicroBatches)
    smaller.accelerator, smaller.sent = SimpleNamespace(num_processes=2, process_index=1), SentInStep()
    batches = []

    def too_much(pieces):
        batches.extend(pieces)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    with pytest.raises(SystemExit, match=r"rank 1: out of memory \(first\), and with rows of two tokens too"):
        smaller.send_the_rest(too_much, [batch_of(3)], "first")
    assert batches[0]["input_ids"].shape == (1, 2)
