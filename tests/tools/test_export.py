"""A checkpoint becomes a folder that plain transformers or peft loads, with the logits of the trained model.

Equal means to the last bit unless a tolerance is given.
"""

import json
import shutil

import pytest
import torch
from in_process import finetune_in_process
from launching import RECIPES, small_model
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_models import tiny_llama
from tools.export.exporting import export_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, MixtralConfig

SAMPLE, MODEL = RECIPES / "sample", small_model()
ROWS = SAMPLE / "data" / "train.jsonl"
IDS = torch.arange(5, 45).view(2, 20)


def trained(folder, model=MODEL, *more):
    """Two steps, a checkpoint at each end of them."""
    arguments = ["--model_name_or_path", model, "--dataset_name", ROWS, "--max_steps", 2, "--save_steps", 2]
    arguments += ["--learning_rate", 1e-2, "--report_to", "none", "--output_dir", folder, "--max_length", 128, *more]
    done = finetune_in_process(arguments, folder.parent / "log")
    assert not any(done.codes), done.output[-3000:]
    return folder / "checkpoint-2"


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A checkpoint of full fine-tuning, with the folder that the run itself exported beside it."""
    return trained(tmp_path_factory.mktemp("full") / "run")


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    """A checkpoint of LoRA."""
    return trained(tmp_path_factory.mktemp("lora") / "run", MODEL, "--use_peft")


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def all_weights(folder):
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def with_sample_tokenizer(model, folder):
    model.resize_token_embeddings(json.loads((MODEL / "config.json").read_text())["vocab_size"])
    model.save_pretrained(folder)
    for path in MODEL.iterdir():
        if "token" in path.name or "chat" in path.name:
            shutil.copy(path, folder)
    return folder


def test_exported_checkpoint_is_what_the_run_itself_exported(full, tmp_path):
    export_checkpoint(full, tmp_path / "out")
    expected, found = full.parent / "model", tmp_path / "out"
    one, other = all_weights(expected), all_weights(found)
    assert set(one) == set(other) == set(all_weights(MODEL))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert json.loads((expected / "config.json").read_text()) | {"use_cache": True} == json.loads(
        (found / "config.json").read_text()
    ) | {"use_cache": True}
    names = {path.name for path in expected.iterdir()}
    assert names <= {path.name for path in found.iterdir()}
    assert AutoTokenizer.from_pretrained(found).chat_template
    card = (found / "README.md").read_text()
    assert "base_model:" in card and "| step | 2 |" in card and '"learning_rate": 0.01' in card


def test_dtype_and_shard_size_are_as_asked(full, tmp_path):
    export_checkpoint(full, tmp_path / "out", dtype="fp32", max_shard_size="1MB")
    out = tmp_path / "out"
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) >= 4 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    largest = max(value.nbytes for value in all_weights(out).values())
    assert all(path.stat().st_size <= max(10**6, largest) + 10_000 for path in out.glob("*.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.float32
    run = AutoModelForCausalLM.from_pretrained(full.parent / "model", dtype=torch.float32)
    assert not torch.equal(logits(model), logits(run))  # the run exported bf16; here nothing is rounded
    assert torch.equal(logits(model.to(torch.bfloat16)), logits(run.to(torch.bfloat16)))


def test_adapter_loads_in_plain_peft(lora, tmp_path):
    export_checkpoint(lora, tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(MODEL)
    without = logits(base)
    found = logits(PeftModel.from_pretrained(base, tmp_path / "out"))
    base = AutoModelForCausalLM.from_pretrained(MODEL)
    assert torch.equal(found, logits(PeftModel.from_pretrained(base, lora.parent / "model")))
    assert not torch.equal(found, without)
    assert not list((tmp_path / "out").glob("model*.safetensors"))


def test_merged_adapter_equals_pefts_own_merge(lora, tmp_path):
    """In fp32, where peft rounds no more than we do: 1e-5 of the logits' size."""
    export_checkpoint(lora, tmp_path / "out", merge_adapter=True, dtype="fp32", max_shard_size="1MB")
    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    expected = logits(PeftModel.from_pretrained(base, lora.parent / "model").merge_and_unload())
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    unmerged = logits(AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32))
    assert (unmerged - expected).norm() > 1e-3 * expected.norm()


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_square_transposed_weights_merge_right_also_from_files_without_the_decoders_name(tmp_path, prefix):
    """GPT-2: attn.c_proj is square and stored (in, out); its files on the hub leave `transformer.` out."""
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=128, dtype="float32")
    torch.manual_seed(0)
    base = with_sample_tokenizer(AutoModelForCausalLM.from_config(config), tmp_path / "gpt2")
    weights = {
        name.replace("transformer.", prefix): value for name, value in load_file(base / "model.safetensors").items()
    }
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    checkpoint = trained(tmp_path / "run", base, "--use_peft", "--lora_target_modules", "c_attn", "c_proj")
    export_checkpoint(checkpoint, tmp_path / "out", merge_adapter=True, dtype="fp32")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    unmerged = logits(plain).clone()
    expected = logits(PeftModel.from_pretrained(plain, checkpoint.parent / "model").merge_and_unload())
    found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert (found - expected).norm() <= 1e-5 * expected.norm() < 1e-2 * (unmerged - expected).norm()


def test_adapter_that_cannot_be_merged_file_by_file_is_refused(tmp_path):
    targets = ("--use_peft", "--lora_target_modules", "embed_tokens", "q_proj")
    checkpoint = trained(tmp_path / "run", MODEL, *targets)
    with pytest.raises(ValueError, match=r"embed_tokens.*merge_and_unload"):
        export_checkpoint(checkpoint, tmp_path / "out", merge_adapter=True)
    export_checkpoint(checkpoint, tmp_path / "out")


def test_file_whose_content_changed_is_not_exported(full, tmp_path):
    copy = tmp_path / "checkpoint-2"
    shutil.copytree(full, copy)
    path = copy / "model" / "shard-00002-model-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"shard-00002-model-00001-of-00001.safetensors: its content"):
        export_checkpoint(copy, tmp_path / "out")


@pytest.mark.parametrize("size", ["0", "abc", "-1", "5XB"])
def test_shard_size_that_is_none_is_one_error(full, tmp_path, size):
    with pytest.raises(ValueError, match=f"--max_shard_size: found {size}, allowed"):
        export_checkpoint(full, tmp_path / "out", max_shard_size=size)


def test_tied_head_is_stored_once_and_experts_under_the_names_of_their_family(tmp_path):
    tied = with_sample_tokenizer(tiny_llama(tied=True), tmp_path / "tied")
    checkpoint = trained(tmp_path / "run", tied)
    export_checkpoint(checkpoint, tmp_path / "out")
    names = set(all_weights(tmp_path / "out"))
    assert "lm_head.weight" not in names and "model.embed_tokens.weight" in names
    run = AutoModelForCausalLM.from_pretrained(checkpoint.parent / "model")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(run))

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4, vocab_size=64, dtype="float32")
    mixtral = with_sample_tokenizer(AutoModelForCausalLM.from_config(config), tmp_path / "mixtral")
    checkpoint = trained(tmp_path / "experts", mixtral)
    export_checkpoint(checkpoint, tmp_path / "out2", max_shard_size="100KB")
    found = all_weights(tmp_path / "out2")
    assert set(found) == set(all_weights(mixtral)) and any(".experts.3.w2." in name for name in found)
    run = AutoModelForCausalLM.from_pretrained(checkpoint.parent / "model")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out2")), logits(run))


def test_half_checkpoints_and_other_bases_are_refused(full, lora, tmp_path):
    half = tmp_path / "checkpoint-2"
    shutil.copytree(full, half)
    (half / "manifest.json").unlink()
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        export_checkpoint(half, tmp_path / "out")
    shutil.copy(full / "manifest.json", half)
    (half / "model" / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard-00002-model-00001-of-00001.safetensors: missing"):
        export_checkpoint(half, tmp_path / "out")
    other = with_sample_tokenizer(tiny_llama(), tmp_path / "other")
    with pytest.raises(ValueError, match="are not the same"):
        export_checkpoint(full, tmp_path / "out2", model_name_or_path=str(other))
    changed = tmp_path / "changed"
    shutil.copytree(MODEL, changed)
    weights = load_file(changed / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][3, 3] += 1
    save_file(weights, changed / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="are not those that the adapter was trained on"):
        export_checkpoint(lora, tmp_path / "out3", merge_adapter=True, model_name_or_path=str(changed))
    with pytest.raises(ValueError, match="no adapter to merge"):
        export_checkpoint(full, tmp_path / "out4", merge_adapter=True)
    (tmp_path / "taken").mkdir()
    with pytest.raises(ValueError, match="exists"):
        export_checkpoint(full, tmp_path / "taken")
    assert not any((tmp_path / name).exists() for name in ("out", "out2", "out3", "out4"))
