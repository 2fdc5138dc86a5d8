"""finetune_performance.py: the same numbers as finetune.py, in another order of work."""

import difflib
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from cells import check_cell, run_cells
from in_process import finetune_in_process
from launching import CONFIGS, RECIPES, part_of_sample, small_model
from rows.batches import Step
from tiny_models import tiny_llama
from tools.proof.architecture import check_architecture, flash_isolation, packed_isolation
from tools.proof.shrink import build_tiny_model
from training.ahead import fetch_ahead
from training.arguments import PerformanceArguments, parse_arguments
from training.kernels import check_kernels, use_kernels
from transformers import CONFIG_MAPPING


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return run_cells(tmp_path_factory.mktemp("performance") / "results.json", "performance")


def test_loop_equals_the_replica_and_finetunes_own_to_the_last_bit(sharded):
    assert len(sharded["cells"]) == len(sharded["same_bits"]) == 3 and all(sharded["same_bits"])
    for name, cell in sharded["cells"].items():
        check_cell(name, cell)


def test_compiled_blocks_are_exact_and_recompute_to_the_same_bits(sharded):
    """Fused kernels round elsewhere: a gradient to 1e-6, as uncompiled; later steps 5e-6."""
    ((name, cell),) = sharded["compiled"].items()
    check_cell(name, cell)
    assert sharded["compiled_recompute_same_bits"]
    assert sharded["graphs"] > 0 and sharded["graph_breaks"] == 0


def test_diff_to_finetune_is_the_scenario():
    lines = [
        (RECIPES / name).read_text().split('"""', 2)[2].splitlines()
        for name in ("finetune.py", "finetune_performance.py")
    ]
    changed = [line for line in difflib.unified_diff(*lines, n=0, lineterm="") if line[0] in "+-"][2:]
    assert 0 < len(changed) <= 50, changed


def test_script_learns_the_sample_under_its_yaml(tmp_path):
    sample = RECIPES / "sample"
    arguments = ["--config", sample / "arguments.yaml", "--model_name_or_path", small_model(), "--eval_steps", 0]
    arguments += ["--dataset_name", part_of_sample(tmp_path / "data", 16), "--output_dir", tmp_path, "--max_steps", 12]
    arguments += [
        "--max_new_tokens",
        8,
        "--per_device_train_batch_size",
        2,
        "--learning_rate",
        2e-3,
        "--warmup_steps",
        2,
    ]
    config = CONFIGS / "performance.yaml"
    done = finetune_in_process(arguments, tmp_path / "log", config=config, script="finetune_performance")
    assert not any(done.codes), done.output[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    before, after = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert after < 0.5 * before
    assert "exact_match_before" in rows[-1]  # it answered, before and after


def test_packing_and_saving_aside_are_the_scripts_defaults():
    named = ["--model_name_or_path", "m", "--dataset_name", "d"]
    arguments = parse_arguments(named, kind=PerformanceArguments)
    assert arguments.packing and arguments.async_save and not arguments.torch_compile
    assert not parse_arguments([*named, "--no_packing"], kind=PerformanceArguments).packing
    with pytest.raises(ValueError, match=r"--torch_compile \(an argument of finetune_performance.py\)"):
        parse_arguments([*named, "--torch_compile"])


def test_kernels_that_cannot_run_here_are_refused_with_the_reason(monkeypatch):
    arguments = PerformanceArguments(use_liger_kernel=True)
    with pytest.raises(ValueError, match="pip install liger-kernel"):
        check_kernels(arguments, torch.device("cpu"))
    monkeypatch.setattr("training.kernels.is_liger_kernel_available", lambda: True)
    with pytest.raises(ValueError, match="need a GPU"):
        check_kernels(arguments, torch.device("cpu"))
    check_kernels(PerformanceArguments(), torch.device("cpu"))


@pytest.mark.parametrize(
    "options", [{"packing": False}, {"attn_implementation": "sdpa"}, {"per_device_train_batch_size": 2}]
)
def test_flash_attention_is_chosen_for_packed_single_rows_that_name_no_other(monkeypatch, options):
    monkeypatch.setattr("training.kernels.is_flash_attn_2_available", lambda: True)
    model = tiny_llama()

    def set_attention(self, name):
        self.config._attn_implementation = name

    monkeypatch.setattr(type(model), "set_attn_implementation", set_attention)
    monkeypatch.setattr("tools.proof.architecture.flash_isolation", lambda config: "isolated")
    assert use_kernels(model, PerformanceArguments(**options), "bf16") == []
    assert use_kernels(model, PerformanceArguments(), "fp32") == []
    assert model.config._attn_implementation == "sdpa"
    monkeypatch.setattr("tools.proof.architecture.flash_isolation", lambda config: "packed documents see each other")
    assert use_kernels(model, PerformanceArguments(), "bf16") == []
    monkeypatch.setattr("tools.proof.architecture.flash_isolation", lambda config: "isolated")
    assert use_kernels(model, PerformanceArguments(), "bf16") == ["attention of packed rows: flash_attention_2"]


def test_family_that_does_not_hand_its_positions_on_would_leak_under_flash_attention():
    """Its mask keeps documents apart; flash attention takes no mask and reads the positions."""
    assert flash_isolation(CONFIG_MAPPING["llama"]()) == "isolated"
    leaky = CONFIG_MAPPING["gpt_bigcode"]()
    assert packed_isolation(build_tiny_model(leaky)) == "isolated"
    assert "packed documents see each other" in flash_isolation(leaky)
    check_architecture(leaky, packing=True)
    leaky._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="packed documents see each other"):
        check_architecture(leaky, packing=True)
    assert "chooses its attention by itself" in flash_isolation(CONFIG_MAPPING["falcon"]())


def test_liger_that_knows_no_such_family_is_an_error(monkeypatch):
    known = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"mistral": None})
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", known)
    with pytest.raises(ValueError, match="no kernels for llama; it knows: mistral"):
        use_kernels(tiny_llama(), PerformanceArguments(use_liger_kernel=True), "bf16")


def test_error_in_the_next_steps_rows_waits_for_that_step():
    labels = torch.tensor([[-100, 5, 6]])

    def steps():
        yield Step([{"input_ids": labels, "labels": labels}], {"epoch": 0, "rows_seen": 1}, [[7]])
        raise ValueError("row 2 is bad")

    rows = steps()
    step, counts = fetch_ahead(rows, torch.device("cpu")).result()
    (batch,) = step.micro_batches
    assert torch.equal(batch["labels"], labels) and step.position["rows_seen"] == 1 and counts.tolist() == [2, 3]
    assert step.rows == [[7]]
    ahead = fetch_ahead(rows, torch.device("cpu"))  # does not raise
    with pytest.raises(ValueError, match="row 2 is bad"):
        ahead.result()
