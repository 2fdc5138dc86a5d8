"""What only a GPU can show. Skipped, with the reason, on a machine without one."""

import json
import shutil
import sys

import pytest
import torch
import yaml
from launching import CONFIGS, RECIPES, ROOT, accelerate_launch, run
from training.optimizer import OffloadedAdamW
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
MIB = 2**20
RECIPE = RECIPES / "finetune.py"
PROCESSES = min(2, max(1, torch.cuda.device_count()))  # one per GPU; two where there are


def changed_yaml(path, name="default", **changes):
    values = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    values["mixed_precision"] = changes.pop("mixed_precision", values["mixed_precision"])
    values["num_processes"] = PROCESSES
    values["fsdp_config"].update(changes)
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def train(config, folder, *arguments, script=RECIPE):
    done = accelerate_launch(script, "--output_dir", folder, *arguments, config=config)
    assert done.returncode == 0, done.stdout[-4000:]
    run = json.loads((folder / "run.json").read_text())
    assert run["num_processes"] == PROCESSES
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def llama(folder, num_tokens, **sizes):
    """(a random Llama with the sample's tokenizer, 32 rows of at least so many tokens; its number of parameters)."""
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=16, max_position_embeddings=2048)).bfloat16()
    model.save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RECIPES / "sample" / "model" / name, folder / "model")
    rows = folder / "rows.jsonl"
    rows.write_text((json.dumps({"text": "one two three four five " * num_tokens}) + "\n") * 32)
    arguments = ["--model_name_or_path", folder / "model", "--dataset_name", rows, "--report_to", "none"]
    return [*arguments, "--logging_steps", 1], model.num_parameters()


def test_fp16_skips_overflowing_steps_lowers_the_scale_and_learns(tmp_path):
    config = changed_yaml(tmp_path / "fp16.yaml", mixed_precision="fp16", hook_reduce_dtype="fp32")
    rows = train(config, tmp_path / "out", "--fp16_initial_scale", 2.0**40, "--logging_steps", 1)
    steps = [row for row in rows if "loss" in row]
    assert steps[0]["skipped_steps"] == 1 and steps[0]["loss_scale"] == 2.0**39
    assert steps[1]["learning_rate"] == steps[0]["learning_rate"]  # a skipped step does not advance the schedule
    assert steps[-1]["skipped_steps"] < 30 and steps[-1]["loss"] < 0.1 * steps[0]["loss"]


@pytest.mark.parametrize("packing", ["true", "false"])
@pytest.mark.parametrize("script", ["finetune", "finetune_performance", "finetune_mem_limit"])
def test_step_waits_for_the_gpu_once(tmp_path, script, packing):
    """torch raises at any other wait; the optimizer's state stays on the GPU, whose slices would be waited for."""
    config = changed_yaml(tmp_path / "config.yaml", hook_offload_optimizer=False)
    arguments = ["--packing", packing, "--max_length", 256, "--max_steps", 4, "--eval_steps", 0, "--report_to", "none"]
    arguments += ["--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2, "--max_new_tokens", 1]
    worker = ROOT / "tests" / "waits.py"
    done = accelerate_launch(worker, script, "--output_dir", tmp_path / "out", *arguments, config=config)
    assert done.returncode == 0 and done.stdout.count("READS 1\n") == PROCESSES, done.stdout[-4000:]


ROWS, LENGTH, HIDDEN, LAYERS = 16, 1024, 512, 16  # each block's input: 32 MiB


@pytest.fixture(scope="module")
def not_offloaded(tmp_path_factory):
    """(arguments, parameters, metrics) of four steps in fp32 with everything on the GPU. Memory is highest at the loss:
    the inputs of 16 recomputed blocks are 512 MiB, parameters 120 MiB on one GPU, moments twice that; there are no
    gradients yet."""
    folder = tmp_path_factory.mktemp("plain")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": 2048}
    arguments, parameters = llama(folder, LENGTH, **sizes)
    arguments += ["--per_device_train_batch_size", ROWS, "--max_length", LENGTH, "--max_steps", 4]
    arguments += ["--gradient_accumulation_steps", 1, "--learning_rate", 1e-4]
    config = changed_yaml(folder / "plain.yaml", mixed_precision="no")
    rows = train(config, folder / "out", *arguments, script=ROOT / "tests" / "offload_worker.py")
    assert len(rows) == 4 and {(*row["parameters_on"], *row["moments_on"]) for row in rows} == {("cuda", "cuda")}
    return arguments, parameters, rows


@pytest.mark.parametrize(
    ("key", "parameters_on", "moments_on"),
    [
        ("fsdp_offload_params", "cpu", "cpu"),
        ("hook_offload_optimizer", "cuda", "cpu, pinned"),
        ("fsdp_activation_checkpointing_offload", "cuda", "cuda"),
    ],
)
def test_offload_puts_what_it_names_into_host_memory_and_changes_nothing_else(
    not_offloaded, tmp_path, key, parameters_on, moments_on
):
    """Losses to 1e-5, for AdamW's fused kernels of two devices round otherwise. Memory, allocated and reserved, falls
    by half at least of what leaves; the planner says 0.7 to 1.0 of it: some of it visits, or the peak moves."""
    arguments, parameters, plain = not_offloaded
    config = changed_yaml(tmp_path / "offloaded.yaml", mixed_precision="no", **{key: True})
    rows = train(config, tmp_path / "out", *arguments, script=ROOT / "tests" / "offload_worker.py")
    assert len(rows) == len(plain) == 4
    for row, other in zip(plain, rows):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-4)
        assert [kind.removesuffix(", pinned") for kind in other["parameters_on"]] == [parameters_on]  # between steps
        assert other["moments_on"] == [moments_on]
        assert (other["slices"] > 1) == (key == "hook_offload_optimizer")
    moments = 2 * 4 * parameters / PROCESSES
    leaves = {
        "fsdp_offload_params": moments + 4 * parameters / PROCESSES,
        "hook_offload_optimizer": moments,
        "fsdp_activation_checkpointing_offload": LAYERS * ROWS * LENGTH * HIDDEN * 4,
    }[key]
    saved = {name: (plain[-1][name] - rows[-1][name]) * 2**30 for name in ("peak_allocated_gib", "peak_mem_gib")}
    assert min(saved.values()) >= 0.5 * leaves, saved


def test_optimizer_state_is_on_the_device_a_slice_at_a_time(monkeypatch):
    monkeypatch.setattr(OffloadedAdamW, "slice_bytes", 64 * MIB)
    peaks, weights = [], []
    for kind in (torch.optim.AdamW, OffloadedAdamW):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(4096, 1024, device="cuda")) for _ in range(16)]  # 16 MiB each
        optimizer = kind([{"params": parameters, "weight_decay": 0.1}], lr=1e-3, fused=True)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = parameter.detach().sin()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
        # active: memory that is freed, but waits for a copy to end, counts
        peaks.append(torch.cuda.memory_stats()["active_bytes.all.peak"] - before)
        assert kind is torch.optim.AdamW or torch.cuda.memory_allocated() <= before
        weights.append([parameter.detach().cpu() for parameter in parameters])
        held = sum(value.numel() * 4 for state in optimizer.state.values() for value in state.values() if value.is_cuda)
        assert (held > 500 * MIB) == (kind is torch.optim.AdamW)
        del parameters, optimizer
    assert peaks[1] <= 3 * 64 * MIB  # two slices, and one that is being made
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_offload_asks_for_a_cpu_backend_beside_nccl(tmp_path):
    """Clipping offloaded gradients runs collectives on CPU tensors: NCCL alone ends in "no backend for cpu"."""
    config = changed_yaml(tmp_path / "offload.yaml", fsdp_offload_params=True)
    done = accelerate_launch(ROOT / "tests" / "launch_worker.py", config=config)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert "cpu" in json.loads(line.removeprefix("FOUND "))["backend"]


@pytest.mark.parametrize("yaml_name", ["default", "performance", "mem_limit"])
def test_planned_memory_is_what_a_run_takes(tmp_path, yaml_name):
    """Allocated to 2%, reserved to 5%: a model large enough that cuBLAS' workspaces are small beside it."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "vocab_size": 32000}
    arguments, _ = llama(tmp_path, 2000, **sizes)
    yaml_path = changed_yaml(tmp_path / "same.yaml", yaml_name)
    arguments += ["--max_length", 2048, "--gradient_accumulation_steps", 2, "--max_steps", 3]
    measured = train(yaml_path, tmp_path / "out", *arguments)[-1]
    run([sys.executable, str(RECIPES / "report.py"), str(tmp_path / "out"), "--plan"])
    planned = json.loads((tmp_path / "out" / "plan.json").read_text())["step"]
    assert planned["peak"] / 2**30 == pytest.approx(measured["peak_allocated_gib"], rel=0.02)
    assert planned["reserved"] / 2**30 == pytest.approx(measured["peak_mem_gib"], rel=0.05)
