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


def changed_yaml(path, **changes):
    values = yaml.safe_load((CONFIGS / "default.yaml").read_text())
    values["mixed_precision"] = changes.pop("mixed_precision", values["mixed_precision"])
    values["num_processes"] = 1
    values["fsdp_config"].update(changes)
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def train(config, folder, *arguments):
    done = accelerate_launch(RECIPE, "--output_dir", folder, *arguments, config=config)
    assert done.returncode == 0, done.stdout[-4000:]
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_fp16_skips_overflowing_steps_lowers_the_scale_and_learns(tmp_path):
    config = changed_yaml(tmp_path / "fp16.yaml", mixed_precision="fp16", hook_reduce_dtype="fp32")
    rows = train(config, tmp_path / "out", "--fp16_initial_scale", 2.0**40, "--logging_steps", 1)
    steps = [row for row in rows if "loss" in row]
    assert steps[0]["skipped_steps"] == 1 and steps[0]["loss_scale"] == 2.0**39
    assert steps[1]["learning_rate"] == steps[0]["learning_rate"]  # a skipped step does not advance the schedule
    assert steps[-1]["skipped_steps"] < 30 and steps[-1]["loss"] < 0.1 * steps[0]["loss"]


@pytest.mark.parametrize(
    "key", ["fsdp_offload_params", "hook_offload_optimizer", "fsdp_activation_checkpointing_offload"]
)
def test_offload_changes_nothing_but_memory(tmp_path, key):
    short = ("--max_steps", 6, "--logging_steps", 1, "--predict_with_generate", "false")
    plain = train(changed_yaml(tmp_path / "plain.yaml", mixed_precision="no"), tmp_path / "plain", *short)
    offloaded = train(
        changed_yaml(tmp_path / "offloaded.yaml", mixed_precision="no", **{key: True}), tmp_path / "offloaded", *short
    )
    for row, other in zip(plain, offloaded, strict=True):
        assert other.get("loss") == pytest.approx(row.get("loss"), rel=1e-5)


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


@pytest.mark.parametrize("yaml_name", ["default.yaml", "performance.yaml", "mem_limit.yaml"])
def test_planned_memory_is_what_a_run_takes(tmp_path, yaml_name):
    """Allocated to 2%, reserved to 5%: a model large enough that cuBLAS' workspaces are small beside it."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "vocab_size": 32000}
    config = LlamaConfig(**sizes, num_attention_heads=16, max_position_embeddings=2048)
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(RECIPES / "sample" / "model" / name, tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"text": "one two three four five " * 2000}) + "\n") * 16)
    yaml_path = tmp_path / "one.yaml"
    values = yaml.safe_load((CONFIGS / yaml_name).read_text())
    yaml_path.write_text(yaml.safe_dump({**values, "num_processes": 1}, sort_keys=False))
    arguments = ["--model_name_or_path", tmp_path / "model", "--dataset_name", rows, "--max_length", 2048]
    arguments += ["--gradient_accumulation_steps", 2, "--max_steps", 3, "--logging_steps", 1, "--report_to", "none"]
    measured = train(yaml_path, tmp_path / "out", *arguments)[-1]
    run([sys.executable, str(RECIPES / "report.py"), str(tmp_path / "out"), "--plan"])
    planned = json.loads((tmp_path / "out" / "plan.json").read_text())["step"]
    assert planned["peak"] / 2**30 == pytest.approx(measured["peak_allocated_gib"], rel=0.02)
    assert planned["reserved"] / 2**30 == pytest.approx(measured["peak_mem_gib"], rel=0.05)
