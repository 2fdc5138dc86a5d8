"""Each rank reads its own slices of a model's files: the same weights, buffers and ties as a whole model has, no more
bytes than its shards need, and wrong files are refused before anything is allocated."""

import shutil

import pytest
import torch
from cells import run_cells
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import tiny_llama
from tools.proof.shrink import build_tiny_model
from training.arguments import FinetuneArguments
from training.launch import one_rank_at_a_time
from training.model import add_adapters, open_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

# A tensor per expert and block on disk, one for all in the model; merged already; split, transposed or renamed on the
# way; buffers that are saved; tied; a bias of its own; conv and state-space blocks.
FAMILIES = ("mixtral", "deepseek_v3", "gpt_oss", "bloom", "phi3", "gpt2", "gemma3_text", "mamba2", "opt")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in FAMILIES:
        build_tiny_model(CONFIG_MAPPING[name]()).save_pretrained(folder / name)
    torch.manual_seed(0)
    tiny_llama(tied=True).to(torch.bfloat16).save_pretrained(folder / "tied_bf16", max_shard_size="20KB")
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large") / "llama"
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 4096}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_hold_their_slices_of_the_whole_model(models, tmp_path, world_size):
    """Among them experts fewer than ranks, and tensors with fewer rows than ranks."""
    names = sorted(path.name for path in models.iterdir())
    found = run_cells(
        tmp_path / "found.json", *(models / n for n in names), world_size=world_size, worker="loading_worker"
    )
    assert {name: [rank["different"] for rank in found[name]] for name in names} == {
        n: [[]] * world_size for n in names
    }
    for name in names:
        assert all(rank["held_at_first"] == 0 and rank["shards"] for rank in found[name])


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_rank_reads_its_shard_and_holds_one_unit_more(large, tmp_path, world_size):
    found = run_cells(tmp_path / "found.json", large, world_size=world_size, worker="loading_worker")
    for rank in found["llama"]:
        assert not rank["different"]
        assert rank["read"] <= 1.1 * rank["shards"]
        assert rank["shards"] <= rank["rose"] <= 1.1 * rank["shards"] + rank["unit"]


def refused(folder):
    """What is said of a model's files, with nothing allocated."""
    with (
        pytest.raises(ValueError, match=str(folder)) as raised,
        open_model(FinetuneArguments(model_name_or_path=str(folder)), print),
    ):
        pass
    return str(raised.value)


def filled(folder, say=print):
    """The whole model on one rank."""
    with open_model(FinetuneArguments(model_name_or_path=str(folder)), say) as (model, weights):
        weights.fill(torch.device("cpu"), False)
    return model


def changed(models, tmp_path, change):
    """A copy of a model whose tensors were changed."""
    folder = shutil.copytree(models / "gpt2", tmp_path / "changed")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_missing_and_misshapen_tensors_are_named(models, tmp_path):
    name = "transformer.h.1.mlp.c_fc.weight"
    assert f"1 weights are missing or misshapen, such as {name}" in refused(
        changed(models, tmp_path / "missing", lambda tensors: tensors.pop(name))
    )
    said = refused(changed(models, tmp_path / "shape", lambda tensors: tensors.update({name: torch.zeros(3, 5)})))
    assert f"{name} is [3, 5] in its files and [64, 256] in the model" in said


def test_tensor_that_the_model_lacks_is_passed_over(models, tmp_path):
    model = filled(changed(models, tmp_path, lambda tensors: tensors.update(extra=torch.zeros(3))))
    whole = AutoModelForCausalLM.from_pretrained(models / "gpt2")
    assert all(torch.equal(p, whole.get_parameter(name)) for name, p in model.named_parameters())


@pytest.mark.parametrize("is_equal", [True, False])
def test_both_of_two_tied_tensors_on_disk_are_tied_if_they_are_equal(tmp_path, is_equal):
    model = tiny_llama(tied=True)
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    tensors["lm_head.weight"] += 0 if is_equal else 1
    model.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = filled(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == is_equal
    assert torch.equal(loaded.lm_head.weight, tensors["lm_head.weight"])
    assert torch.equal(loaded.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])


def test_files_that_are_not_safetensors_are_loaded_whole_in_turn_and_say_so(tmp_path, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    model, said = tiny_llama(), []
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with open_model(FinetuneArguments(model_name_or_path=str(tmp_path)), said.append) as (loaded, weights):
        assert weights.lock.is_locked
        weights.fill(torch.device("cpu"), False)
    assert not weights.lock.is_locked
    assert "has no safetensors files" in "".join(said)
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in loaded.named_parameters())


def test_rank_that_fails_in_its_turn_lets_the_others_load(tmp_path, monkeypatch):
    """They would wait for the lock, and it for them to agree."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    model = tiny_llama()
    model.config.save_pretrained(tmp_path)
    tensors = model.state_dict()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with (
        pytest.raises(KeyError) as raised,
        open_model(FinetuneArguments(model_name_or_path=str(tmp_path)), print) as (_, weights),
    ):
        raise KeyError("a row that does not fit")
    assert raised.value and not weights.lock.is_locked
    del tensors["model.norm.weight"]
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert "such as model.norm.weight" in refused(tmp_path)
    other = one_rank_at_a_time()
    other.acquire(blocking=False)
    other.release()


def test_model_with_an_adapter_beside_it_is_refused(models, tmp_path):
    folder = shutil.copytree(models / "tied_bf16", tmp_path / "both")
    get_peft_model(tiny_llama(), LoraConfig(target_modules="all-linear")).save_pretrained(folder)
    assert "a model and an adapter" in refused(folder)


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "embed_tokens"]])
def test_adapters_are_those_of_a_model_that_is_whole(models, targets):
    arguments = FinetuneArguments(
        model_name_or_path=str(models / "tied_bf16"), use_peft=True, lora_target_modules=targets
    )
    torch.manual_seed(1)
    whole = add_adapters(AutoModelForCausalLM.from_pretrained(models / "tied_bf16", dtype="auto"), arguments)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    with open_model(arguments, print) as (model, weights):
        model = add_adapters(model, arguments)
        assert torch.equal(torch.rand(1), drawn)
        weights.fill(torch.device("cpu"), False)
    expected = dict(whole.named_parameters())
    assert expected.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]) and parameter.dtype == expected[name].dtype, name
        assert parameter.requires_grad == expected[name].requires_grad == ("lora_" in name)
