"""What a run is, in the lines that it prints before its first step."""

from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from hook_config import HookConfig


def start_lines(config: HookConfig, arguments: Any, accelerator: Accelerator, total_steps: int) -> list[str]:
    """Where the YAML came from, ranks, every dtype, batch arithmetic."""
    micro, accumulation = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    ranks = accelerator.num_processes
    rows = micro * accumulation * ranks
    return [
        f"{config.path} (found by {config.found_by}) | {ranks} rank(s) on {accelerator.device.type}, "
        f"{dist.get_backend()}",
        f"compute {config.hook_param_dtype}, reduce {config.hook_reduce_dtype}, norms "
        f"{config.hook_norm_dtype or config.hook_param_dtype}, buffers {config.hook_buffer_dtype or 'as loaded'}, "
        "trained weights and optimizer fp32, loss fp32",
        f"micro-batch {micro} x accumulation {accumulation} x ranks {ranks} = global batch {rows} rows, "
        f"at most {rows * arguments.max_length:,} tokens per step | {total_steps} steps",
    ]
