"""One training loop in one process (or rank), which runs a step when it is told to: what bench_turns.py starts.

Every loop trains the same Llama, made from the same random state, on the same rows, in fp32 with every block recomputed
(unless its YAML says otherwise), with fused AdamW, gradients clipped at 1.0, and a loss that is the mean over the
step's label tokens. What differs is who runs the loop: plain torch, Accelerate, transformers, TRL, or a recipe.
"""

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from bench_meter import StepMeter
from bench_work import IGNORE, LEARNING_RATE, SEED, STEPS, Loop, make_model, make_rows, my_batches
from rows.batches import collate, shuffled_order, training_steps
from rows.packing import collate_packed
from torch import nn
from torch.distributed.fsdp import fully_shard

ROOT = Path(__file__).parents[2]
RECOMPUTE = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


class Turns:
    """The other end of bench_turns.Contender: waits for a command on stdin, and answers with what the step gave."""

    def __init__(self) -> None:
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what a loop prints goes where errors go
        self.held: Callable[[], list[torch.Tensor]] = list
        self.losses: Callable[[], list[float]] = list
        self.log_steps: Callable[[bool], None] = lambda is_logging: None
        self.meter: StepMeter | None = None
        self.reports_losses = False

    def wait(self) -> None:
        """Between two steps: say that one is done, and wait for the next turn. Ends the process with the run."""
        answer: dict[str, Any] = {"losses": self.losses()} if self.reports_losses else {}
        if self.meter is not None:
            self.meter.__exit__(None, None, None)
            answer |= self.meter.read()
        self.answers.write(json.dumps(answer) + "\n")
        self.answers.flush()
        command = sys.stdin.readline().strip()
        if not command:
            os._exit(0)  # without the goodbyes of a process group whose other ranks are gone
        self.log_steps(command in ("check", "log"))
        self.reports_losses = command == "check"
        self.meter = StepMeter(self.held()) if command == "measure" else None
        if self.meter is not None:
            self.meter.__enter__()


def main() -> None:
    """Run the loop named on the command line."""
    loop = Loop(**json.loads(sys.argv[1]))
    rank = int(os.environ.get("RANK", "0"))
    loops = {"bare": bare, "accelerate": accelerate, "trainer": trainer, "sft_trainer": sft_trainer}
    with tempfile.TemporaryDirectory() as folder:
        loops.get(loop.runs, recipe)(loop, rank, folder, Turns())


def held_by(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What a run keeps between steps."""
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return [*model.parameters(), *model.buffers(), *states]


def bare(loop: Loop, rank: int, folder: str, turns: Turns) -> None:
    """Plain torch: the loop that one would write by hand, on one process or with `fully_shard` per block."""
    if loop.processes > 1:
        dist.init_process_group("gloo")
    elif loop.is_sharded:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = make_model(loop)
    model.gradient_checkpointing_enable(RECOMPUTE["gradient_checkpointing_kwargs"])
    if dist.is_initialized():
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    losses: list[float] = []
    turns.held, turns.losses = partial(held_by, model, optimizer), lambda: losses
    for micro_batches in turn_by_turn(my_batches(loop, rank), turns):
        label_tokens = sum((batch["labels"][:, 1:] != IGNORE).sum() for batch in micro_batches)
        if loop.processes > 1:
            dist.all_reduce(label_tokens)
        total = torch.zeros(())
        for batch in micro_batches:
            labels = F.pad(batch.pop("labels")[:, 1:], (0, 1), value=IGNORE).flatten()
            loss = bare_loss(model(**batch).logits, labels) / label_tokens
            (loss * loop.processes).backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if loop.processes > 1:
            dist.all_reduce(total)
        losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()


def bare_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy of the next tokens, in fp32. The labels are shifted and padded, so no logits are copied."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels, ignore_index=IGNORE, reduction="sum")


def write_config(loop: Loop, folder: str) -> str:
    """The contender's YAML: one of ours with this loop's dtype and keys; returns the path."""
    config = yaml.safe_load((ROOT / "accelerate_configs" / f"{loop.config}.yaml").read_text())
    config |= {"mixed_precision": {"fp32": "no"}.get(loop.dtype, loop.dtype), "num_processes": loop.processes}
    config["fsdp_config"] |= {"hook_reduce_dtype": "fp32", **loop.keys}
    path = Path(folder, "config.yaml")
    path.write_text(yaml.safe_dump(config))
    return str(path)


def accelerate(loop: Loop, rank: int, folder: str, turns: Turns) -> None:
    """Accelerate's own FSDP2: `prepare` wraps and recomputes, and the loop is that of its examples.

    launch.py only gets it onto a CPU, where Accelerate alone would not shard.
    """
    from hooks.config import read_hook_config
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    from training.launch import make_accelerator

    accelerator = make_accelerator(read_hook_config(write_config(loop, folder)), 1.0)
    plugin = accelerator.state.fsdp_plugin
    plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap = transformer_auto_wrap_policy, ["LlamaDecoderLayer"]
    plugin.activation_checkpointing = True
    model = make_model(loop)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses: list[float] = []
    is_logging = [True]
    turns.held, turns.losses = partial(held_by, model, optimizer), lambda: losses
    turns.log_steps = lambda is_on: is_logging.append(is_on)
    for micro_batches in turn_by_turn(my_batches(loop, rank), turns):
        loss = model(**micro_batches[0]).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if is_logging[-1]:
            losses.append(accelerator.reduce(loss.detach(), "mean").item())


def turn_by_turn(steps: Iterator[Any], turns: Turns) -> Iterator[Any]:
    """Hand on one step's batches per turn; fetching them is part of the turn."""
    while True:
        turns.wait()
        yield next(steps)


def recipe(loop: Loop, rank: int, folder: str, turns: Turns) -> None:
    """A recipe's hooks in its order, then its own `train`, data path and log lines included."""
    from datasets import Dataset
    from hooks.apply import apply_hooks, plan_hooks
    from hooks.config import read_hook_config
    from rows.batches import Share
    from saving.folder import START
    from saving.state import LiveState
    from training.launch import make_accelerator, make_device_mesh
    from training.metrics import MetricsLog
    from training.optimizer import make_optimizer, prepare
    from training.progress import Progress, follow_blocks
    from training.run_files import read_metrics
    from transformers import get_scheduler
    from utils import precision_policies

    script = importlib.import_module(loop.runs)
    config = read_hook_config(write_config(loop, folder))
    accelerator = make_accelerator(config)
    model = make_model(loop)
    if hasattr(script, "compute_loss_in_chunks"):
        script.compute_loss_in_chunks(model, script.LOSS_CHUNK_TOKENS)
    mesh, policies = make_device_mesh(accelerator), precision_policies(config)
    compiled = script.compile_blocks if loop.compiles_blocks else None
    apply_hooks(model, plan_hooks(model, config), config, mesh, policies, compile_blocks=compiled)
    kind = script.train.__annotations__["arguments"]
    arguments = kind(output_dir=folder, per_device_train_batch_size=loop.micro_batch_size)
    arguments.gradient_accumulation_steps, arguments.logging_steps = loop.accumulation, 1
    arguments.learning_rate = LEARNING_RATE
    optimizer = make_optimizer(model, arguments, config)
    model, prepared = prepare(accelerator, model, optimizer)
    log = MetricsLog(accelerator, folder, 10**9, 0)
    turns.held = partial(held_by, model, optimizer)
    turns.losses = lambda: [row["loss"] for row in read_metrics(log.path)]
    turns.log_steps = lambda is_logging: setattr(arguments, "logging_steps", 1 if is_logging else 10**9)
    ordered = make_rows(loop)
    rows: Any = [{} for _ in ordered]  # where the recipe's shuffle will look for them
    for row, place in zip(ordered, shuffled_order(len(ordered), SEED, 0)):
        rows[place] = row
    rows = rows if loop.rows == "packed" else Dataset.from_list(rows)
    share = Share(loop.micro_batch_size, loop.accumulation, rank, loop.processes)
    steps = turn_by_turn(training_steps(rows, share, seed=SEED, pad_token_id=0), turns)
    live = LiveState(accelerator, model, prepared, get_scheduler("constant", optimizer), dict(START))
    progress = follow_blocks(model, Progress())
    script.train(live, steps, [], log=log, progress=progress, writer=None, arguments=arguments, config=config)


def trainer(loop: Loop, rank: int, folder: str, turns: Turns) -> None:
    """transformers' Trainer on one process, with the recipes' collators."""
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    make_batch = partial(collate_packed if loop.rows == "packed" else collate, pad_token_id=0)
    options = trainer_options(loop, folder)
    rows = Dataset.from_list(make_rows(loop))
    run = Trainer(make_model(loop), TrainingArguments(**options), train_dataset=rows, data_collator=make_batch)
    run_by_turns(run, turns)


def sft_trainer(loop: Loop, rank: int, folder: str, turns: Turns) -> None:
    """TRL's SFTTrainer on one process; packed as bfd does it: rows flattened into one, positions restarting."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = make_rows(loop)
    for row in rows if loop.rows == "packed" else []:
        starts = [place for place, position in enumerate(row.pop("position_ids")) if position == 0]
        row["seq_lengths"] = [end - start for start, end in zip(starts, [*starts[1:], len(row["input_ids"])])]
    options = {**trainer_options(loop, folder), "packing": loop.rows == "packed", "max_length": loop.length}
    options |= {"packing_strategy": "bfd", "dataset_kwargs": {"skip_prepare_dataset": True}}
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes" / "sample" / "model")
    rows = Dataset.from_list(rows)
    run = SFTTrainer(make_model(loop), SFTConfig(**options), train_dataset=rows, processing_class=tokenizer)
    run_by_turns(run, turns)


def trainer_options(loop: Loop, folder: str) -> dict[str, Any]:
    """The same work for both Trainers."""
    options = {"output_dir": folder, "max_steps": STEPS, "learning_rate": LEARNING_RATE, "logging_steps": 1}
    options |= {"per_device_train_batch_size": loop.micro_batch_size, "lr_scheduler_type": "constant"}
    options |= {"gradient_accumulation_steps": loop.accumulation, "max_grad_norm": 1.0, "weight_decay": 0.0}
    options |= {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    return {**options, **RECOMPUTE, "train_sampling_strategy": "sequential", "dataloader_pin_memory": False}


def run_by_turns(run: Any, turns: Turns) -> None:
    """Train, one step per turn: from one on_step_begin to the next, so the log line and the next batch are inside."""
    from transformers import TrainerCallback

    class OneStep(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            turns.wait()

    turns.held = lambda: held_by(run.model, run.optimizer)
    turns.losses = lambda: [row["loss"] for row in run.state.log_history]
    turns.log_steps = lambda is_logging: setattr(run.state, "logging_steps", 1 if is_logging else 10**9)
    run.add_callback(OneStep())
    run.train()


if __name__ == "__main__":
    main()
