"""What a run is, in the lines that it prints before its first step."""

from itertools import groupby
from operator import itemgetter

import torch
import torch.distributed as dist
from accelerate import Accelerator
from datasets import Dataset
from hooks.config import HookConfig
from hooks.dtypes import DTYPES, EMULATED, cost_beside_fp32
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from .arguments import FinetuneArguments
from .losses import IGNORE_INDEX


def start_lines(
    config: HookConfig, arguments: FinetuneArguments, accelerator: Accelerator, scheduler: LRScheduler, total_steps: int
) -> list[str]:
    """Where the YAML came from, ranks, every dtype, batch arithmetic; a compute dtype that is emulated, and a schedule
    that is at its end."""
    micro, accumulation = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    ranks = accelerator.num_processes
    rows = micro * accumulation * ranks
    lines = [
        f"{config.path} (found by {config.found_by}) | {ranks} rank(s) on {accelerator.device.type}, "
        f"{dist.get_backend()}",
        f"compute {config.hook_param_dtype}, reduce {config.hook_reduce_dtype}, norms "
        f"{config.hook_norm_dtype or config.hook_param_dtype}, buffers {config.hook_buffer_dtype or 'as loaded'}, "
        "trained weights and optimizer fp32, loss fp32",
        f"micro-batch {micro} x accumulation {accumulation} x ranks {ranks} = global batch {rows} rows, "
        f"at most {rows * arguments.max_length:,} tokens per step | {total_steps} steps",
    ]
    if accelerator.is_main_process and config.hook_param_dtype != "fp32":
        lines += emulation_line(config, accelerator.device)
    done = scheduler.last_epoch
    if not any(scheduler.get_last_lr()) and (done or total_steps == 1):  # a warm-up begins with 0 too
        lines.append(
            f"note: the learning rate is 0 at step {done} of a schedule of {total_steps}, and nothing is learnt from "
            "here on: raise --max_steps or --num_train_epochs, or lower --warmup_steps"
        )
    return lines


def emulation_line(config: HookConfig, device: torch.device) -> list[str]:
    """A note where this device has no instructions for the compute dtype, with what that costs and the way out."""
    dtype, cost = config.hook_param_dtype, cost_beside_fp32(DTYPES[config.hook_param_dtype], device)
    if cost <= EMULATED:
        return []
    way_out = "accelerate launch --mixed_precision no ... (under torchrun mixed_precision: 'no' in the YAML)"
    if config.origins["hook_param_dtype"] == "YAML":
        way_out = "hook_param_dtype: fp32 in the YAML"
    return [
        f"note: {dtype} is emulated on this {device.type}: a matrix product takes {cost:.1f} times as long as in fp32 "
        f"(measured just now). To train in fp32: {way_out}"
    ]


def preview(rows: Dataset, tokenizer: PreTrainedTokenizerBase, count: int) -> str:
    """The first rows as text, what is learnt between >>> and <<<."""
    shown = []
    for index in range(min(count, len(rows))):
        row, text = rows[index], ""
        learnt = [label != IGNORE_INDEX and position > 0 for position, label in enumerate(row["labels"])]
        for is_learnt, run in groupby(zip(row["input_ids"], learnt), key=itemgetter(1)):
            part = tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
            text += f">>>{part}<<<" if is_learnt else part
        shown.append(f"row {index + 1} ({len(row['input_ids'])} tokens):\n{text}")
    return "\n\n".join(shown)
