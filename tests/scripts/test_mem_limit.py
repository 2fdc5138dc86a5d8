"""finetune_mem_limit.py: the loss in chunks is the plain loss, and no whole logits exist."""

import copy
import difflib
import json
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from bench_meter import StepMeter
from cells import check_cell, run_cells
from in_process import finetune_in_process
from launching import RECIPES, part_of_sample, small_model
from offload_worker import note_places
from tiny_models import tiny_llama
from tools.proof.shrink import build_tiny_model
from torch import nn
from training import chunked_loss
from training.arguments import MemLimitArguments, parse_arguments
from training.chunked_loss import compute_loss_in_chunks
from training.losses import micro_batch_loss
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

CHUNK = 7
# Soft caps; logit scale; logit divisor; untied conv; experts whose balancing loss counts; a head that takes no labels.
FAMILIES = ("llama", "gemma2", "cohere", "granite", "gpt2", "mixtral", "opt", "qwen3_next", "mamba2")


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_loss_and_gradients_are_those_of_the_plain_loss(family):
    """fp32: 1e-6 of the loss; gradients to 1e-5 of the largest, for another order of additions."""
    torch.manual_seed(0)
    plain = build_tiny_model(CONFIG_MAPPING[family]()).train()
    plain.config.use_cache = False
    if family == "mixtral":
        plain.config.output_router_logits = True
    chunked = copy.deepcopy(plain)
    compute_loss_in_chunks(chunked, CHUNK)
    ids = torch.randint(67, 96, (2, 16))
    labels = ids.clone()
    labels[0, :5] = -100
    batch = {"input_ids": ids, "labels": labels}
    sizes = []
    own = F.cross_entropy

    def recorded(logits, *args, **kwargs):
        sizes.append(logits.shape[0])
        return own(logits, *args, **kwargs)

    loss, loss_sum = micro_batch_loss(plain, dict(batch), 20, 2)
    with mock.patch.object(F, "cross_entropy", recorded):
        found_loss, chunked_sum = chunked_loss.micro_batch_loss(chunked, dict(batch), 20, 2)
    assert max(sizes) == CHUNK and sum(sizes) == 2 * 15
    assert chunked_sum.item() == pytest.approx(loss_sum.item(), rel=1e-6)
    assert found_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    loss.backward()
    found_loss.backward()
    expected, found = gradients(plain), gradients(chunked)
    assert expected.keys() == found.keys()
    largest = max(gradient.norm() for gradient in expected.values())
    assert all((found[name] - gradient).norm() <= 1e-5 * largest for name, gradient in expected.items())
    with torch.no_grad():  # without labels it is the model it was
        assert torch.equal(chunked.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits)


def peak_bytes(model, loss_of, rows=4):
    """The most bytes of tensors that live at once in a forward and backward, weights and gradients included."""
    ids = torch.arange(rows * 256).view(rows, 256) % model.config.vocab_size
    with StepMeter(model.parameters()) as meter:
        loss, _ = loss_of(model, {"input_ids": ids, "labels": ids}, 1, 1)
        loss.backward()
    return meter.read()["peak_bytes"]


def test_loss_in_chunks_takes_less_than_half_the_memory_where_logits_dominate():
    """1024 tokens, a vocabulary of 8192: 32 MiB of logits, of which the plain loss holds three copies."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 8192}
    plain = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**sizes, num_hidden_layers=2, use_cache=False))
    chunked = copy.deepcopy(plain)
    compute_loss_in_chunks(chunked, 128)
    whole, in_chunks = peak_bytes(plain, micro_batch_loss), peak_bytes(chunked, chunked_loss.micro_batch_loss)
    assert whole > 3 * 1024 * 8192 * 4
    assert in_chunks < 0.5 * whole
    assert peak_bytes(chunked, chunked_loss.micro_batch_loss, rows=2) < 0.9 * in_chunks  # what smaller pieces return


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return run_cells(tmp_path_factory.mktemp("chunked") / "results.json", "chunked")


def test_loss_in_chunks_is_as_exact_as_the_plain_loss(sharded):
    """2 processes. In bf16 with LoRA the head is frozen, so nothing is rounded once more."""
    assert len(sharded["cells"]) == 7 and any("hook_norm_dtype=fp32" in name for name in sharded["cells"])
    for name, cell in sharded["cells"].items():
        check_cell(name, cell)


def test_loss_in_chunks_gathers_the_head_no_more_often(sharded):
    assert set(sharded["collectives"]) == {"block", "embeddings"}
    for plain, chunked in sharded["collectives"].values():
        assert plain == chunked and min(plain) > 0


def test_optimizer_step_in_slices_is_bit_equal(sharded):
    assert sharded["offloaded_same_bits"] == [True, True]
    for plain, offloaded in sharded["slices"]:
        assert plain == 0 and offloaded > 1


@pytest.mark.parametrize("family", ["bert", "rwkv"])
def test_model_whose_head_is_not_the_end_of_its_forward_is_refused(family):
    with pytest.raises(ValueError, match="its loss cannot be computed in chunks"):
        compute_loss_in_chunks(build_tiny_model(CONFIG_MAPPING[family]()), CHUNK)


def test_head_that_is_finished_by_a_parameter_is_taken_before_weights_are_read():
    class Scaled(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.scale = nn.Parameter(torch.ones(config.vocab_size))

        def forward(self, input_ids=None, **kwargs):
            hidden = self.model(input_ids, **kwargs).last_hidden_state
            return CausalLMOutput(logits=self.lm_head(hidden) * self.scale)

    with torch.device("meta"):
        model = Scaled(tiny_llama().config)
    compute_loss_in_chunks(model, CHUNK)


def test_diff_to_finetune_is_the_scenario():
    lines = [
        (RECIPES / name).read_text().split('"""', 2)[2].splitlines()
        for name in ("finetune.py", "finetune_mem_limit.py")
    ]
    changed = [line for line in difflib.unified_diff(*lines, n=0, lineterm="") if line[0] in "+-"][2:]
    assert 0 < len(changed) <= 30, changed


def test_auto_find_batch_size_starts_with_the_rows_of_a_step():
    named = ["--model_name_or_path", "m", "--dataset_name", "d"]
    sizes = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4"]
    plain = parse_arguments([*named, *sizes], kind=MemLimitArguments)
    assert (plain.per_device_train_batch_size, plain.gradient_accumulation_steps) == (2, 4)
    found = parse_arguments([*named, *sizes, "--auto_find_batch_size"], kind=MemLimitArguments)
    assert (found.per_device_train_batch_size, found.gradient_accumulation_steps) == (8, 1)
    wrong = ["--per_device_train_batch_size", "-3", "--gradient_accumulation_steps", "-2", "--auto_find_batch_size"]
    with pytest.raises(ValueError, match=r"--per_device_train_batch_size: found -3"):
        parse_arguments([*named, *wrong], kind=MemLimitArguments)
    with pytest.raises(ValueError, match=r"--auto_find_batch_size \(an argument of finetune_mem_limit.py\)"):
        parse_arguments([*named, "--auto_find_batch_size"])


def test_script_learns_the_sample_under_its_yaml_with_an_optimizer_that_is_offloaded(tmp_path):
    sample = RECIPES / "sample"
    arguments = ["--config", sample / "arguments.yaml", "--model_name_or_path", small_model(), "--eval_steps", 0]
    arguments += ["--dataset_name", part_of_sample(tmp_path / "data", 32), "--max_steps", 16, "--output_dir", tmp_path]
    arguments += ["--max_new_tokens", 8]
    options = {"config": "mem_limit", "script": "finetune_mem_limit", "before": note_places}
    done = finetune_in_process(arguments, tmp_path / "log", **options)
    assert not any(done.codes), done.output[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    before, after = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert after < 0.5 * before
    assert [row["slices"] for row in rows if "loss" in row] == [1] * 4  # a small model's state is one slice
    assert "exact_match_before" in rows[-1]  # it answered, before and after
