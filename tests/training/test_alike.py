"""Ranks that were started otherwise, or see other files, end together with what differs; alike they train."""

import json
import re
import shutil
import socket

import pytest
from in_process import finetune_in_process
from launching import part_of_sample, small_model
from safetensors.torch import load_file, save_file
from training.alike import flat, versions


@pytest.fixture
def start(tmp_path):
    """Starts two ranks; returns the lines of what differs."""

    def run(*arguments, model=None, data=None):
        data = part_of_sample(tmp_path / "sample", 16) if data is None else data
        words = [
            "--model_name_or_path",
            model or small_model(),
            "--dataset_name",
            data,
            "--output_dir",
            tmp_path / "out",
        ]
        done = finetune_in_process([*words, "--max_steps", 1, *arguments], tmp_path / "log")
        assert done.codes == [1, 1] and done.output.count("The ranks differ:") == 1, done.output[-3000:]
        assert "Start every machine with the same YAML" in done.output and "step 1/1" not in done.output
        host = re.escape(socket.gethostname())
        return re.findall(rf"^- rank 1 \({host}\): (.*), .* on rank 0$", done.output, re.MULTILINE)

    return run


def test_arguments_that_differ_are_named_and_paths_and_processes_may(start):
    differ = ["--learning_rate", "1e-{own_rank}", "--seed", "{own_rank}", "--dataloader_num_workers", "{own_rank}"]
    assert start(*differ) == ["argument learning_rate: 0.1 here", "argument seed: 1 here"]


def test_rows_that_differ_are_named(start, tmp_path):
    """One label's worth: the last row of rank 1 has another answer."""
    for rank in (0, 1):
        folder = part_of_sample(tmp_path / str(rank), 16)
        lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
        chat = json.loads(lines[-1])
        chat["messages"][-1]["content"] += "!" * rank
        (folder / "train.jsonl").write_text("\n".join([*lines[:-1], json.dumps(chat)]) + "\n", encoding="utf-8")
    (line,) = start(data=tmp_path / "{own_rank}")
    assert re.fullmatch(r"data: '\w{64}' here", line)


def test_model_files_that_differ_are_named(start, tmp_path):
    for rank in (0, 1):
        folder = shutil.copytree(small_model(), tmp_path / f"model-{rank}")
        weights = load_file(folder / "model.safetensors")
        save_file(weights, folder / "model.safetensors", {"format": "pt", "note": "x" * 80 * rank})
    size = (folder / "model.safetensors").stat().st_size
    assert start(model=tmp_path / "model-{own_rank}") == [f"file model.safetensors: {size} here"]


def test_versions_name_the_libraries_and_our_own_files():
    found = versions()
    assert {"torch", "accelerate", "transformers", "peft", "the file of training.alike"} <= found.keys()
    assert all(found.values())


def test_facts_in_dictionaries_are_named_by_them_but_for_those_of_a_machine():
    facts = {"YAML": {"a": 1, "inner": {"b": 2}}, "argument": {"output_dir": "x", "seed": 0}}
    assert dict(flat(facts)) == {"YAML a": 1, "YAML inner b": 2, "argument seed": 0}
