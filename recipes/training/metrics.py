"""What is measured per step, and where it is written: the log line, metrics.jsonl, the trackers."""

import contextlib
import gc
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from hooks.config import HookConfig
from torch.distributed.tensor import DTensor
from torch.profiler import record_function
from tqdm import tqdm

from .arguments import FinetuneArguments
from .run_files import read_metrics, write_whole
from .run_record import RunRecord, run_facts

GIB = 2**30
TENSOR_TYPES = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, DTensor}


class StepMeter:
    """Adds up what happens between two log lines."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start a new log window."""
        self.started, self.data_s = time.perf_counter(), 0.0
        self.steps = self.tokens = self.label_tokens = 0
        self.loss_sum = 0.0

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Time a block that reads rows."""
        started = time.perf_counter()
        yield
        self.data_s += time.perf_counter() - started

    def add_step(self, tokens: int) -> None:
        """Add one optimizer step, in which all ranks ran so many tokens."""
        self.steps += 1
        self.tokens += tokens

    def add_loss(self, loss_sum: float, label_tokens: int) -> None:
        """Add the loss of a step that was taken: sums over all ranks."""
        self.loss_sum += loss_sum
        self.label_tokens += label_tokens

    def read(self, world_size: int) -> dict[str, float]:
        """Averages of the window. Tokens are all tokens run, padding included; label tokens are those learnt."""
        seconds = time.perf_counter() - self.started
        return {
            "loss": self.loss_sum / self.label_tokens if self.label_tokens else math.nan,
            "step_time_s": seconds / max(self.steps, 1),
            "data_share": self.data_s / seconds,
            "tokens_per_second_per_gpu": self.tokens / seconds / world_size,
            "label_tokens_per_second_per_gpu": self.label_tokens / seconds / world_size,
        }


@record_function("recipe: memory")
def memory(device: torch.device) -> dict[str, float]:
    """Of this rank: on a GPU peak reserved and allocated memory since the last call, and how often so far the allocator
    had to free its cache and try again; on a CPU bytes of live tensors, and of the process, now (named so)."""
    if device.type == "cuda":
        peak, allocated = torch.cuda.max_memory_reserved(device), torch.cuda.max_memory_allocated(device)
        retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
        torch.cuda.reset_peak_memory_stats(device)
        return {"peak_mem_gib": peak / GIB, "peak_allocated_gib": allocated / GIB, "num_alloc_retries": retries}
    storages = {}
    for value in gc.get_objects():
        if type(value) in TENSOR_TYPES and value.device.type == "cpu":  # exact types: isinstance is far slower here
            value = value.to_local() if isinstance(value, DTensor) else value
            if type(value) in TENSOR_TYPES:  # else it is made of other tensors, which are in the list themselves
                storage = value.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return {"live_tensors_gib": sum(storages.values()) / GIB, "process_gib": psutil.Process().memory_info().rss / GIB}


def format_line(step: int, total_steps: int, values: dict[str, float]) -> str:
    """The log line: name, value, unit, in a fixed order."""
    memory_name = "peak_mem_gib" if "peak_mem_gib" in values else "live_tensors_gib"
    tokens, labels = values["tokens_per_second_per_gpu"], values["label_tokens_per_second_per_gpu"]
    fields = [
        f"step {step}/{total_steps}",
        f"loss {values['loss']:.4f}",
        f"lr {values['learning_rate']:.2e}",
        f"grad_norm {values['grad_norm']:.2f}",
        f"step_time {values['step_time_s']:.3f} s (data {values['data_share']:.0%})",
        f"tok/s/gpu {tokens:,.0f} (label {labels:,.0f})",
        f"{memory_name.removesuffix('_gib')} {values[memory_name]:.3f} GiB",
    ]
    if "loss_scale" in values:
        fields.append(f"loss_scale {values['loss_scale']:.0f} (skipped {values['skipped_steps']})")
    elif "skipped_steps" in values:
        fields.append(f"skipped {values['skipped_steps']}")
    return " | ".join(fields)


class MetricsLog:
    """metrics.jsonl, the trackers of --report_to, the progress bar of a terminal, and from `start` on the run's record
    and report. Writes on the main process."""

    def __init__(self, accelerator: Accelerator, output_dir: str, total_steps: int, first_step: int) -> None:
        self.accelerator = accelerator
        self.path = Path(output_dir, "metrics.jsonl")
        self.total_steps, self.first_step = total_steps, first_step
        self.record: RunRecord | None = None
        disable = None if accelerator.is_main_process else True  # None: a bar on a terminal, nothing in a log file
        self.bar = tqdm(total=total_steps, initial=first_step, desc="training", unit="step", disable=disable)
        if accelerator.is_main_process:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def start(self, arguments: FinetuneArguments, config: HookConfig, lines: list[str]) -> None:
        """Print what the run is, write run.json and open the trackers; however the run ends now, it leaves a report.

        What metrics.jsonl holds of later steps than the first, which run again, is taken out.
        """
        self.say("\n".join(lines))
        if self.accelerator.is_main_process:
            rows = read_metrics(self.path) if self.first_step else []
            kept = [row for row in rows if row["step"] <= self.first_step]
            write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self.accelerator.init_trackers(self.path.parent.name)
        if self.accelerator.is_main_process:
            facts = run_facts(arguments, config, self.accelerator.device)
            facts |= {"num_processes": self.accelerator.num_processes, "data": lines}
            facts |= {"first_step": self.first_step, "total_steps": self.total_steps}
            self.record = RunRecord(self.path.parent, facts, self.say)

    def say(self, text: str) -> None:
        """Print a line once, above the bar."""
        if text and self.accelerator.is_main_process:
            self.bar.write(text)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Write values, unrounded, to metrics.jsonl (null where not finite: JSON has no word for it) and the trackers.
        A full disk does not end the run: that is for the next checkpoint to decide (--on_save_error)."""
        finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        try:
            if self.accelerator.is_main_process:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": step, **finite}) + "\n")
            self.accelerator.log(values, step=step)
        except OSError as error:
            self.say(f"step {step}: metrics could not be written: {error}")

    def write_step(self, step: int, values: dict[str, Any]) -> None:
        """The log line of a window of steps, and its values."""
        self.say(format_line(step, self.total_steps, values))
        self.write(step, values)

    def write_answers(self, step: int, scores: dict[str, float], text: str) -> None:
        """Write what compare_answers returned: the scores to metrics.jsonl, the text to the screen and the report."""
        if not scores:
            return
        self.write(step, scores)
        self.say(text)
        if self.record is not None:
            self.record.facts["samples"] = text

    def close(self, status: str = "finished") -> None:
        """End the bar, write down how the run ended, and make its report."""
        self.bar.close()
        if self.record is not None:
            self.record.end(status)
