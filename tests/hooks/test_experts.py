"""Weights whose first dim the ranks do not divide, as experts: what is gathered, how evenly ranks share, and that all
else follows where another dim is cut.

Two runs of experts_worker.py, in 4 and in 3 forked ranks, make the exact cases; the second loads what the first saved.
Tolerances are those of the proof (tests/scripts/test_exactness.py).
"""

import json
import shutil
from collections import Counter
from functools import cache, partial
from unittest import mock

import pytest
import torch
from cells import run_cells
from gathers import gathered
from hooks import live
from hooks.live import padding_share
from hooks.wrap import FEW_ELEMENTS, LITTLE_PADDING, padded_numel, placement_of
from in_process import finetune_in_process
from launching import RECIPES
from safetensors.torch import load_file
from tiny_models import count_all_padding, tiny_mixtral
from tools.export.exporting import export_checkpoint
from tools.proof.cases import WEIGHT_TOLERANCE
from torch import nn
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM, DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig

RANKS = (8, 16, 64, 128)
QWEN3_235B = {"hidden_size": 4096, "moe_intermediate_size": 1536, "num_attention_heads": 64, "head_dim": 128}
MIXTRAL_8X22B = {"hidden_size": 6144, "intermediate_size": 16384, "num_attention_heads": 48, "vocab_size": 32768}
FAMILIES = {  # in their real sizes, but for the number of layers: all kinds of them are there
    "Mixtral 8x7B": MixtralConfig(num_hidden_layers=2),
    "Mixtral 8x22B": MixtralConfig(**MIXTRAL_8X22B, num_hidden_layers=2),
    "Qwen3-30B-A3B": Qwen3MoeConfig(num_hidden_layers=2),
    "Qwen3-235B-A22B": Qwen3MoeConfig(**QWEN3_235B, num_hidden_layers=2),
    "gpt-oss-120b": GptOssConfig(num_local_experts=128, num_hidden_layers=2),
    "gpt-oss-20b": GptOssConfig(num_local_experts=32, num_hidden_layers=2),
    "DeepSeek-V3": DeepseekV3Config(num_hidden_layers=5),
}
EXPERTS = {  # of one layer
    "Mixtral 8x7B": {(8, 28672, 4096), (8, 4096, 14336)},
    "Mixtral 8x22B": {(8, 32768, 6144), (8, 6144, 16384)},
    "Qwen3-30B-A3B": {(128, 1536, 2048), (128, 2048, 768)},
    "Qwen3-235B-A22B": {(128, 3072, 4096), (128, 4096, 1536)},
    "gpt-oss-120b": {(128, 2880, 5760), (128, 2880, 2880)},
    "gpt-oss-20b": {(32, 2880, 5760), (32, 2880, 2880)},
    "DeepSeek-V3": {(256, 4096, 7168), (256, 7168, 2048)},
}
ONLY_ONE_THAT_CANNOT = ("gpt-oss-20b", 128)  # its down_proj (32, 2880, 2880): 128 divides neither


@cache
def model_of(name: str) -> nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(FAMILIES[name], dtype=torch.bfloat16)


def shapes_of(name: str) -> Counter:
    return Counter(tuple(parameter.shape) for parameter in model_of(name).parameters())


def along_dim_0(shape, num_shards):
    """As FSDP2 cuts by itself."""


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", FAMILIES)
def test_padding_of_mixtures_is_under_two_percent(name, ranks):
    shapes = shapes_of(name)
    assert EXPERTS[name] == {shape for shape in shapes if len(shape) == 3}
    found = padding_share(shapes, ranks)
    with mock.patch.object(live, "placement_of", along_dim_0):
        naive = padding_share(shapes, ranks)
    assert found <= naive
    if (name, ranks) == ONLY_ONE_THAT_CANNOT:
        assert 0.5 < found < 1 < naive
    else:
        assert found < 0.001
    if any(shape[0] % ranks for shape in EXPERTS[name]):
        assert naive > 0.5


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [
        ((8, 28672, 4096), 8, 0),
        ((8, 28672, 4096), 64, 1),
        ((32, 2880, 5760), 128, 2),
        ((32, 2880, 2880), 128, 0),  # FSDP2 pads no other dim
        ((2,), 64, 0),
        ((2880,), 128, 0),
        ((8, 4096), 64, 0),  # a router: its padding is nothing
        ((4096, 16), 3, 0),  # a little padding
        ((100, 65536), 64, 1),  # 28% of a large weight
        ((100, 4096), 64, 0),  # and of a small one
        ((0, 64), 64, 0),
        ((), 64, 0),
    ],
)
def test_dim_is_another_one_where_the_first_pads_much_and_the_ranks_divide_it(shape, ranks, dim):
    assert placement_of(shape, ranks) == (Shard(dim) if dim else None)


def test_padding_that_is_left_alone_is_a_little_of_the_parameter_or_a_few_elements():
    placed = 0
    for rows in (*range(1, 200), 1000, 2880, 28672):
        for ranks in (2, 3, 4, 7, 16, 64, 128):
            shape = (rows, 128 * 21, 64)
            padding = padded_numel(shape, ranks) / (rows * 128 * 21 * 64) - 1
            is_little = padding <= LITTLE_PADDING or padded_numel(shape, ranks) - rows * 128 * 21 * 64 <= FEW_ELEMENTS
            placement = placement_of(shape, ranks)
            assert (placement is None) == is_little and (is_little or shape[placement.dim] % ranks == 0)
            placed += placement is not None
    assert placed > 300


@pytest.mark.parametrize(("ranks", "times"), [(16, 1.9), (64, 7.5)])
def test_gather_of_a_block_of_8_experts_moves_the_block_alone(ranks, times):
    """Counted in a fake process group, on the first and on the last rank; the report says the same."""
    build = partial(AutoModelForCausalLM.from_config, MixtralConfig(num_hidden_layers=1), dtype=torch.bfloat16)
    naive, ours = (gathered(build, ranks, along_dim_0=is_naive) for is_naive in (True, False))
    last = gathered(build, ranks, rank=ranks - 1)
    assert naive["sent"] > times * naive["block"]
    assert ours["block"] <= ours["sent"] == last["sent"] < 1.001 * ours["block"]
    for found in (naive, ours):
        report, (block, _) = found["report"], found["report"]["units"]
        assert block["gathered_parameters"] == found["sent"] and block["parameters"] == found["block"]
        assert report["largest_share_of_a_rank"] == found["held"] / report["parameters"]
        assert report["padding"] == pytest.approx(report["largest_share_of_a_rank"] * ranks - 1, abs=1e-9)
    assert ours["report"]["smallest_share_of_a_rank"] == last["held"] / ours["report"]["parameters"]
    assert ours["report"]["smallest_share_of_a_rank"] > 0.999 / ranks > 5 * naive["report"]["smallest_share_of_a_rank"]
    assert not ours["notes"]


def test_report_names_the_weight_that_no_dim_serves_and_ranks_that_would():
    build = partial(AutoModelForCausalLM.from_config, FAMILIES["gpt-oss-20b"], dtype=torch.bfloat16)
    found = gathered(build, 128)
    (note,) = found["notes"]
    assert "no dim of model.layers.0.mlp.experts.down_proj (32, 2880, 2880) divides by 128 ranks" in note
    assert "120 or 144 ranks pad under 2%" in note
    share = found["report"]["padding"]
    assert f"gathers move {share:.0%} more" in note and 0.5 < share < 0.6
    for ranks in (120, 144):
        assert padding_share(shapes_of("gpt-oss-20b"), ranks) < LITTLE_PADDING
    of_32 = 2 * 32 * 2880 * 2880 / found["report"]["parameters"]  # of the first ranks; the others hold nothing of it
    smallest, largest = found["report"]["smallest_share_of_a_rank"], found["report"]["largest_share_of_a_rank"]
    # The 2880 rows of attention pad 2%, too few elements for another dim.
    assert smallest == pytest.approx((1 - of_32) / 128, rel=2e-2)
    assert largest == pytest.approx((1 - of_32) / 128 + of_32 / 32, rel=1e-2)
    held = f"a rank holds {smallest:.2%} to {largest:.2%} of them"
    assert f"padding: gathers move {share:.2%} more than the parameters; {held}" in live.summary_lines(found["report"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def on_4(folder):
    return run_cells(folder / "4.json", "save", folder, world_size=4, worker="experts_worker")


@pytest.fixture(scope="module")
def on_3(folder, on_4):
    return run_cells(folder / "3.json", "load", folder, world_size=3, worker="experts_worker")


def test_unsharded_training_is_equalled_whatever_dim_is_cut(on_4, on_3):
    assert on_4["cases"].keys() == on_3["cases"].keys() and len(on_4["cases"]) == 14
    for found in (on_4, on_3):
        for name, case in found["cases"].items():
            errors, is_in_bf16 = case["errors"], "bf16" in name
            assert case["is_passed"] and case["tolerance"] == 1e-6, (name, case["detail"])
            assert all(errors[kind] <= 1e-6 for kind in ("loss", "gradient", "norm", "later")), (name, errors)
            assert errors["weights"] <= WEIGHT_TOLERANCE["bf16" if is_in_bf16 else "fp32"], (name, errors)
            assert case["padding"] < 0.001, name


def dims_of_experts(case):
    """Of the experts' own weights, not of their biases and adapters."""
    names = (name for name in case["dims"] if "experts" in name and "lora" not in name and "bias" not in name)
    return {case["dims"][name] for name in names}


def test_experts_are_cut_along_the_dim_that_the_ranks_divide(on_4, on_3):
    for name, case in on_4["cases"].items():
        assert dims_of_experts(case) == ({0} if "8 experts" in name else {1}), name
    for name, case in on_3["cases"].items():
        assert dims_of_experts(case) == {1}, name
    tied = [case for name, case in on_3["cases"].items() if name == "gpt_oss, 5 experts, plain"]
    assert [(case["tied"], case["dims"]["model.embed_tokens.weight"]) for case in tied] == [(True, 1)]


def test_adapters_of_experts_are_trained_and_the_frozen_base_has_one_checksum(on_4, on_3):
    checked = 0
    for name in (name for name in on_4["cases"] if "LoRA" in name):
        for case in (on_4["cases"][name], on_3["cases"][name]):
            adapts_experts = {".lora_A." in key for key in case["trained"] if ".experts." in key}
            assert adapts_experts == ({True, False} if "mixtral" in name else set())
            assert all("lora" in key for key in case["trained"])
            assert list(case["frozen"].values()) == [case["frozen_unsharded"]]
            checked += 1
    assert checked == 8
    for found in (on_4, on_3):
        cases = found["cases"]
        assert cases["tiny_mixtral, 2 experts, LoRA, bf16"]["stored"] == ["torch.bfloat16", "torch.float32"]
        assert cases["tiny_mixtral, 2 experts, bf16"]["stored"] == ["torch.float32"]


def test_checkpoint_of_4_ranks_is_the_same_bits_on_3(on_3):
    """Weights and moments: experts cut along dim 0 or 1 there, along dim 1 here, under an offloaded optimizer."""
    assert len(on_3["loaded"]) == 3
    for name, found in on_3["loaded"].items():
        assert found["other"] == [] and sorted(found["changed"]) == sorted(found["same"]), name
        moments = [key for key in found["same"] if "exp_avg" in key and "experts" in key]
        assert len(moments) >= 8, name


def test_run_of_4_ranks_goes_on_with_3_and_exports_what_its_checkpoint_holds(tmp_path):
    """The script itself: 12 rows a step on both. Tolerances of another world size: tests/saving/test_checkpoint.py."""
    sample, model, one, other = RECIPES / "sample", tmp_path / "mixtral", tmp_path / "one", tmp_path / "other"
    torch.manual_seed(0)
    vocabulary = json.loads((sample / "model" / "config.json").read_text())["vocab_size"]
    tiny_mixtral(2, vocabulary).save_pretrained(model)
    for path in (sample / "model").iterdir():
        if "token" in path.name or "chat" in path.name:
            shutil.copy(path, model)
    arguments = ["--model_name_or_path", model, "--dataset_name", sample / "data" / "train.jsonl", "--max_steps", 4]
    arguments += ["--save_steps", 2, "--learning_rate", 1e-3, "--report_to", "none", "--max_length", 64]
    arguments += ["--logging_steps", 1, "--per_device_train_batch_size", 1, "--gradient_accumulation_steps"]

    def run(folder, ranks, *more):
        log = tmp_path / f"{folder.name}.log"
        words = [*arguments, 12 // ranks, "--output_dir", folder, *more]
        done = finetune_in_process(words, log, world_size=ranks, before=count_all_padding)
        assert not any(done.codes), done.output[-3000:]
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        report = json.loads((folder / "wrap_report.json").read_text())
        assert report["padding"] < 0.01 and "padding: gathers move" in done.output
        exported = folder.parent / f"{folder.name}-exported"
        export_checkpoint(folder / "checkpoint-4", exported)
        weights, expected = load_file(exported / "model.safetensors"), load_file(folder / "model" / "model.safetensors")
        assert weights.keys() == expected.keys() == load_file(model / "model.safetensors").keys()
        assert all(torch.equal(weights[name], expected[name]) for name in weights)
        assert any(".experts.1.w2." in name for name in weights)
        return {row["step"]: row for row in rows if "loss" in row}, weights

    expected, whole = run(one, 4)
    shutil.copytree(one / "checkpoint-2", other / "checkpoint-2")
    found, weights = run(other, 3, "--resume_from_checkpoint", "latest")
    assert set(expected) == {1, 2, 3, 4} and set(found) == {3, 4}
    for step in found:
        assert found[step]["loss"] == pytest.approx(expected[step]["loss"], rel=1e-6 if step == 3 else 1e-5)
        assert found[step]["grad_norm"] == pytest.approx(expected[step]["grad_norm"], rel=1e-5 if step == 3 else 1e-4)
    assert all(torch.allclose(weights[name], whole[name], atol=5e-5) for name in whole)
