"""What saving and loading a checkpoint costs beside a plain copy of the same bytes (a section of bench.py)."""

import dataclasses
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from hooks.apply import apply_hooks, plan_hooks
from hooks.config import read_hook_config
from saving.checkpoint import CheckpointWriter
from saving.folder import START
from saving.resume import load_checkpoint
from saving.state import LiveState
from tools.proof.cpu_ranks import run_on_cpu_ranks
from training.arguments import FinetuneArguments
from training.launch import end, make_accelerator, make_device_mesh
from training.optimizer import make_optimizer
from transformers import LlamaConfig, LlamaForCausalLM
from utils import precision_policies

CONFIG = Path(__file__).parents[2] / "accelerate_configs" / "default.yaml"
SIZES = {"vocab_size": 16_000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8}
TIMES = 3
MIB = 2**20


def checkpoints() -> Iterator[str]:
    """Two gloo ranks, AdamW's state in fp32; each figure is the median of three, ours and the copy in turn."""
    with tempfile.TemporaryDirectory() as folder:
        run_on_cpu_ranks(measure, folder, 2)
        yield from Path(folder, "lines").read_text().splitlines()


def measure(folder: str) -> None:
    """One rank."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the rest of the process)
    config = dataclasses.replace(read_hook_config(str(CONFIG)), num_processes=None)
    accelerator = make_accelerator(config)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=12))
    plan = plan_hooks(model, config)
    apply_hooks(model, plan, config, make_device_mesh(accelerator), precision_policies(config))
    optimizer = make_optimizer(model, FinetuneArguments(learning_rate=1e-3), config)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    live = LiveState(accelerator, model, optimizer, scheduler, dict(START))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    state_bytes = 12 * parameters

    def writer(name: str, is_async: bool) -> CheckpointWriter:
        Path(folder, name).mkdir(exist_ok=True)
        options = {"output_dir": Path(folder, name), "save_total_limit": 1, "load_best_model_at_end": False}
        options |= {"async_save": is_async, "on_save_error": "stop"}
        return CheckpointWriter(live, SimpleNamespace(**options), {})

    blocking, beside = writer("blocking", False), writer("beside", True)
    seconds: dict[str, list[float]] = {name: [] for name in ("save", "copy", "stall", "beside", "load", "read")}
    for i in range(1, TIMES + 1):
        live.state["step"] = i
        seconds["save"].append(timed(blocking.save))
        checkpoint = Path(folder, "blocking", f"checkpoint-{i}")
        mine = sorted(checkpoint.glob(f"*/shard-{dist.get_rank() + 1:05}-*"))
        seconds["copy"].append(timed(copy_synced, mine, Path(folder, f"copy-{dist.get_rank()}")))
        seconds["stall"].append(timed(beside.save))
        seconds["beside"].append(timed(beside.wait))
        seconds["read"].append(timed(list, map(Path.read_bytes, mine)))
        seconds["load"].append(timed(load_checkpoint, live, checkpoint))
    written = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    took = {name: sorted(values)[len(values) // 2] for name, values in seconds.items()}
    lines = [
        f"{parameters / 1e6:.0f}M parameters, fp32 weights and two moments: {state_bytes / MIB:,.0f} MiB of state, "
        f"{written / MIB:,.0f} MiB written ({written / state_bytes:.3f} of it)",
        f"save, hashed and synced: {took['save']:.2f} s; a plain copy of its files, synced: {took['copy']:.2f} s "
        f"(ratio {took['save'] / took['copy']:.2f})",
        f"load into the shards: {took['load']:.2f} s; reading its files: {took['read']:.2f} s "
        f"(ratio {took['load'] / took['read']:.2f})",
        f"--async_save: training waits {took['stall']:.2f} s ({took['stall'] / took['save']:.2f} of the blocking "
        f"save), and the rest takes {took['beside']:.2f} s beside it",
    ]
    if accelerator.is_main_process:
        Path(folder, "lines").write_text("\n".join(lines))
    end(accelerator)


def timed(function: Callable[..., object], *arguments: object) -> float:
    """Seconds until every rank has done it."""
    dist.barrier()
    started = time.perf_counter()
    function(*arguments)
    dist.barrier()
    return time.perf_counter() - started


def copy_synced(files: list[Path], folder: Path) -> None:
    """A copy of files that the disk has."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in files:
        target = folder / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        with open(target, "rb+") as file:
            os.fsync(file.fileno())
