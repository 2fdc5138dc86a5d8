"""The folder that a run ends with is the one that save_pretrained would write, though no rank ever holds the model.

Equal means to the last byte.
"""

import gc
import json
import os
from functools import partial
from types import SimpleNamespace

import pytest
import saving.huggingface
import torch
import torch.distributed as dist
from in_process import Run
from launching import RECIPES, small_model
from planner_worker import NOT_OURS, highest_rise
from safetensors.torch import load_file
from saving.folder import check_files, complete_checkpoints, patient_group
from saving.huggingface import write_folder
from tiny_models import tiny_llama
from tools.export.exporting import export_checkpoint
from tools.proof.cpu_ranks import run_on_cpu_ranks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.profiler import record_function
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, MixtralConfig

MODEL = small_model()
DTYPES = (torch.bfloat16, torch.float32)


def sample():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def mixture(hidden_size=32, intermediate_size=48):
    """Experts are merged in the model, and one by one in its files."""
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=96,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def with_a_buffer():
    model = mixture()
    model.register_buffer("statistics", torch.arange(5), persistent=True)  # integers are not cast
    return model


def sharded(model):
    """Each block a unit; a weight along its second dimension, and one that two ranks cannot split evenly."""
    for block in model.model.layers:
        fully_shard(block, shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 and p.shape[0] != p.shape[1] else None)
    return fully_shard(model)


def written(argument):
    """Each rank: the folder of a sharded model, and on rank 0 what save_pretrained makes of one that never was."""
    make, dtype, folder, limit = argument
    saving.huggingface.FILE_BYTES = limit
    torch.manual_seed(0)
    model, tokenizer = make(), AutoTokenizer.from_pretrained(MODEL)
    live, group = sharded(model), patient_group()
    assert write_folder(live, tokenizer, folder / "found", dtype, group) == ""
    assert type(live).__name__.startswith("FSDP")
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        whole = make()
        weights = {n: w.to(dtype) if w.is_floating_point() else w for n, w in whole.state_dict().items()}
        for name in whole.all_tied_weights_keys:
            weights.pop(name)
        whole.save_pretrained(folder / "expected", state_dict=weights, max_shard_size=limit)
        whole.config.dtype = dtype
        whole.config.save_pretrained(folder / "expected")
        tokenizer.save_pretrained(folder / "expected")
    dist.barrier()


@pytest.mark.parametrize("make", [sample, partial(tiny_llama, tied=True), with_a_buffer], ids=["sample", "tied", "moe"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_folder_is_the_one_that_save_pretrained_writes_of_an_unsharded_model(make, dtype, tmp_path):
    assert run_on_cpu_ranks(written, (make, dtype, tmp_path, 10**9), 2) == 0
    expected, found = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("expected", "found"))
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= expected.keys()
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    assert [path.name for path in tmp_path.iterdir() if "incomplete" in path.name] == []


def test_several_files_hold_the_same_tensors_and_none_is_larger_than_the_limit(tmp_path):
    limit = 20_000
    assert run_on_cpu_ranks(written, (with_a_buffer, torch.bfloat16, tmp_path, limit), 2) == 0
    index = json.loads((tmp_path / "found" / "model.safetensors.index.json").read_text())
    tensors, files = {}, sorted((tmp_path / "found").glob("*.safetensors"))
    for number, path in enumerate(files, 1):
        assert path.name == f"model-{number:05}-of-{len(files):05}.safetensors"
        held = load_file(path)
        assert {index["weight_map"][name] for name in held} == {path.name}
        assert sum(tensor.nbytes for tensor in held.values()) <= limit
        tensors |= held
    expected = {n: t for path in (tmp_path / "expected").glob("*.safetensors") for n, t in load_file(path).items()}
    assert len(files) > 3 and tensors.keys() == expected.keys() == index["weight_map"].keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "found").state_dict()
    own = with_a_buffer().bfloat16().state_dict()
    assert all(torch.equal(loaded[name], own[name]) for name in own.keys() - {"statistics"})


# -- memory --

LIMIT = 2 * 10**6


def large():
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12, "vocab_size": 512}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def large_mixture():
    return mixture(hidden_size=128, intermediate_size=352)


def measured(argument):
    """Each rank: by how much its host memory rises during an export, as the events of torch's allocator say.

    As on a GPU: what is gathered lies elsewhere (here gloo's threads would keep some of it), and is copied to the host.
    """
    make, dtype, folder = argument
    saving.huggingface.FILE_BYTES, own = LIMIT, saving.huggingface.whole

    def whole(value, dtype):
        with record_function(f"{NOT_OURS[0]} on a GPU"):
            tensor = own(value, dtype)
        return tensor.clone()

    saving.huggingface.whole = whole
    model = make()
    units = [sum(p.nbytes for p in block.parameters()) for block in model.model.layers]
    total = sum(p.nbytes for p in model.parameters())
    units.append(total - sum(units))
    largest = max(p.nbytes for p in model.parameters())
    live, group = sharded(model), patient_group()
    tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
    gc.collect()
    rise, _, _ = highest_rise(lambda: write_folder(live, tokenizer, folder / "model", dtype, group))
    facts = {"rise": rise, "unit": max(units), "total": total, "largest": largest}
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(facts))


@pytest.mark.parametrize("make", [large, large_mixture])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rank_0_holds_a_file_and_a_unit_and_the_others_less(make, dtype, tmp_path):
    """Of fp32 masters. Taking experts apart copies them, which in bf16 is within the unit of the masters."""
    assert run_on_cpu_ranks(measured, (make, dtype, tmp_path), 2) == 0
    first, other = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    copied = first["unit"] if make is large_mixture and dtype is torch.float32 else 0
    assert LIMIT < first["rise"] <= LIMIT + first["unit"] + copied < first["total"] / 2, first
    assert first["largest"] * dtype.itemsize / 4 <= other["rise"] <= first["largest"], other


# -- failure --


def full_disk():
    """In a rank: the disk takes the first file of the exported model and no more."""
    own, files = saving.huggingface.save_file, []

    def save_file(*arguments, **options):
        files.append(arguments)
        if len(files) > 1:
            raise OSError(28, "No space left on device")
        own(*arguments, **options)

    saving.huggingface.FILE_BYTES = 100_000
    saving.huggingface.save_file = save_file


def exits():
    """In a rank: code of the model's exits, on rank 0."""

    def save_pretrained(*arguments, **options):
        raise SystemExit(0)

    if os.environ["RANK"] == "0":
        LlamaForCausalLM.save_pretrained = save_pretrained


@pytest.mark.parametrize(("before", "save_steps", "why"), [(full_disk, 0, "OSError: "), (exits, 2, "SystemExit: 0")])
def test_run_whose_export_fails_keeps_its_last_state_and_says_how_to_export_it(before, save_steps, why, tmp_path):
    run = tmp_path / "run"
    arguments = ["--model_name_or_path", MODEL, "--dataset_name", RECIPES / "sample" / "data" / "train.jsonl"]
    arguments += ["--max_steps", 2, "--save_steps", save_steps, "--report_to", "none", "--max_length", 128]
    arguments += ["--dtype", "float32", "--output_dir", run]
    done = Run(arguments, tmp_path / "log", before=before).wait()
    assert done.codes == [1, 1], done.output[-3000:]
    (line,) = [line for line in done.output.splitlines() if "could not be written" in line]
    assert line.startswith(f"Error: {run / 'model'} could not be written: {why}") and "Traceback" not in done.output
    assert f"export.py {run / 'checkpoint-2'} --output_dir" in line
    assert not list(run.glob("model*"))
    (checkpoint,) = complete_checkpoints(run)
    check_files(checkpoint, "")
    export_checkpoint(checkpoint, tmp_path / "out")
    again = Run([*arguments, "--resume_from_checkpoint", "latest"], tmp_path / "log").wait()
    assert again.codes == [0, 0], again.output[-3000:]
    one, other = (load_file(folder / "model.safetensors") for folder in (run / "model", tmp_path / "out"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
