"""What the script's arguments may be: every problem at once, each with the rule."""

import importlib.util
import os
from pathlib import Path
from typing import Any

TRUNCATION_MODES = ("keep_start", "keep_end", "drop", "split")


def check_arguments(arguments: Any) -> list[str]:
    """Return every problem with these values, each with the rule."""
    problems = []
    for name in ("model_name_or_path", "dataset_name"):
        if getattr(arguments, name) is None:
            problems.append(f"--{name} is required (this folder has no sample/, or the other of the two was given)")
    at_least = {
        "max_length": 2,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "logging_steps": 1,
        "max_new_tokens": 1,
        "dataset_num_proc": 1,
        "lora_r": 1,
        "save_total_limit": 1,
        "warmup_steps": 0,
        "weight_decay": 0,
        "lora_dropout": 0,
        "eval_steps": 0,
        "save_steps": 0,
        "dataloader_num_workers": 0,
        "hang_timeout": 0,
        "profile": 0,
    }
    for name, least in at_least.items():
        value = getattr(arguments, name)
        if value is not None and not value >= least:  # written so that nan is refused too
            problems.append(f"--{name}: found {value}, allowed: {least} or more")
    for name in ("learning_rate", "max_grad_norm", "fp16_initial_scale"):
        if not getattr(arguments, name) > 0:
            problems.append(f"--{name}: found {getattr(arguments, name)}, allowed: above 0")
    if arguments.max_steps <= 0 and arguments.num_train_epochs <= 0:
        problems.append("--max_steps or --num_train_epochs must be above 0")
    problems += check_data_arguments(arguments)
    if arguments.lora_dropout >= 1:
        problems.append(f"--lora_dropout: found {arguments.lora_dropout}, allowed: below 1")
    for name in arguments.report_to:
        if name not in ("none", "all") and importlib.util.find_spec(name) is None:
            problems.append(f"--report_to {name}: not installed (pip install {name}), or use none")
    if arguments.on_save_error not in ("stop", "continue"):
        problems.append(f"--on_save_error: found {arguments.on_save_error}, allowed: stop, continue")
    if arguments.on_non_finite not in ("stop", "skip"):
        problems.append(f"--on_non_finite: found {arguments.on_non_finite}, allowed: stop, skip")
    save_steps, eval_steps = arguments.save_steps, arguments.eval_steps
    if arguments.load_best_model_at_end and (not save_steps or not eval_steps or save_steps % eval_steps):
        problems.append(
            f"--load_best_model_at_end needs each checkpoint evaluated: --save_steps (found {save_steps}) a multiple "
            f"of --eval_steps (found {eval_steps}), both above 0"
        )
    folder = Path(arguments.output_dir)
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        problems.append(f"--output_dir {folder}: {existing} is not a folder that can be written to")
    if arguments.dtype not in ("auto", "float32", "bfloat16", "float16"):
        problems.append(f"--dtype: found {arguments.dtype}, allowed: auto, float32, bfloat16, float16")
    return problems


def check_data_arguments(arguments: Any) -> list[str]:
    """Return every problem with how data is read, cut and packed."""
    problems = []
    for name in ("preview", "validation_split_percentage"):
        if not getattr(arguments, name) >= 0:
            problems.append(f"--{name}: found {getattr(arguments, name)}, allowed: 0 or more")
    uses_flash = (arguments.attn_implementation or "").startswith("flash")
    if arguments.packing and uses_flash and arguments.per_device_train_batch_size > 1:
        problems.append(
            "--packing with flash attention: it tells documents apart in a batch of one row only; set "
            "--per_device_train_batch_size 1 and raise --max_length instead"
        )
    if arguments.streaming and (
        arguments.max_steps <= 0
        or arguments.group_by_length
        or arguments.dataset_weights
        or arguments.validation_split_percentage
    ):
        problems.append(
            "--streaming needs --max_steps, and cannot be combined with --group_by_length, --dataset_weights or "
            "--validation_split_percentage: the length of a stream is not known"
        )
    if arguments.packing and arguments.group_by_length:
        problems.append("--group_by_length has nothing to do under --packing; leave one out (--no_packing)")
    if arguments.truncation_mode not in TRUNCATION_MODES:
        modes = ", ".join(TRUNCATION_MODES)
        problems.append(f"--truncation_mode: found {arguments.truncation_mode}, allowed: {modes}")
    if arguments.validation_split_percentage >= 100:
        problems.append(f"--validation_split_percentage: found {arguments.validation_split_percentage}, below 100")
    if any(not weight > 0 for weight in arguments.dataset_weights or ()):
        problems.append(f"--dataset_weights: found {arguments.dataset_weights}, allowed: above 0")
    return problems
