"""A few optimizer steps under torch's profiler (--profile): a trace, a table of operators, and where the time goes."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from .model_flops import CONVENTION, count_flops, peak_flops
from .profile_report import Facts, advice, combine, measure, profile_lines, profile_markdown, spans_of

WARM_UP_STEPS = 2  # the first one makes optimizer state, allocates, tunes and compiles
OPERATORS = 60  # in the table

Batch = dict[str, torch.Tensor]


class StepProfiler:
    """Records `arguments.profile` optimizer steps after the first WARM_UP_STEPS; does nothing without --profile.

    Every rank records. Rank 0 writes OUTPUT_DIR/profile/ (trace.json.gz for ui.perfetto.dev, operators.txt,
    profile.json, profile.md) and prints the profile. What training does is not changed; `meter` is not charged for the
    time that this takes between two steps.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        micro_batch_loss: Callable[..., Any],
        arguments: Any,
        log: Any,
        meter: Any,
    ) -> None:
        self.accelerator, self.model, self.micro_batch_loss = accelerator, model, micro_batch_loss
        self.arguments, self.log, self.meter = arguments, log, meter
        self.is_over, self.steps_seen = arguments.profile == 0, 0
        self.recorded: list[Batch] = []  # kept as they are: counting would take its own time out of the next step
        self.profile: torch.profiler.profile | None = None

    def step(self, micro_batches: list[Batch], is_last: bool) -> None:
        """Call at the end of each optimizer step, with its micro-batches and whether the run ends here. A collective
        where the recording ends."""
        if self.is_over:
            return
        with self.not_charged():
            self.steps_seen += 1
            num_recorded = self.steps_seen - WARM_UP_STEPS
            self.recorded += micro_batches if num_recorded > 0 else []
            self.is_over = is_last or num_recorded == self.arguments.profile
            if self.is_over:
                self.finish(num_recorded)
            elif self.profile is None:
                self.start()
            else:
                self.profile.step()

    @contextlib.contextmanager
    def not_charged(self) -> Iterator[None]:
        """Take the time of a block out of the meter's window. The device is done before it, so that a step's kernels
        lie within the step."""
        if self.accelerator.device.type != "cpu":
            torch.accelerator.synchronize(self.accelerator.device)
        started = time.perf_counter()
        yield
        self.meter.started += time.perf_counter() - started

    def start(self) -> None:
        """Start the profiler, after the first step: the rest of the warm-up is its own."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints on every rank that it starts and stops
        kinds, device_type = torch.profiler.ProfilerActivity, self.accelerator.device.type
        activities = [kinds.CPU, *([] if device_type == "cpu" else [getattr(kinds, device_type.upper())])]
        plan = torch.profiler.schedule(wait=0, warmup=WARM_UP_STEPS - 1, active=self.arguments.profile, repeat=1)
        self.profile = torch.profiler.profile(activities=activities, schedule=plan)
        self.profile.start()

    def finish(self, num_recorded: int) -> None:
        """Stop recording, gather what each rank found, write and print. Every rank must call it."""
        if self.profile is not None:
            self.profile.stop()
        if num_recorded < self.arguments.profile:
            self.log.say(
                f"--profile {self.arguments.profile}: the run ended after {self.steps_seen} steps, {WARM_UP_STEPS} of "
                f"them to warm up; {max(num_recorded, 0)} recorded"
            )
        if num_recorded <= 0:
            return
        longest = max(self.recorded, key=lambda batch: batch["labels"].shape[1])
        per_token, squared = count_flops(self.model, self.micro_batch_loss, longest, self.accelerator.device)
        shapes = [batch["labels"].shape for batch in self.recorded]
        found: dict[str, Any] = {
            "measured": measure(spans_of(self.profile.events())),
            "steps": num_recorded,
            "tokens": sum(rows * length for rows, length in shapes),
            "padding": sum(map(padding_tokens, self.recorded)),
            "flops": sum(rows * (per_token * length + squared * length**2) for rows, length in shapes),
        }
        ranks = [found] * dist.get_world_size()
        dist.all_gather_object(ranks, found)
        if not all(rank["measured"]["step"] for rank in ranks):
            self.log.say("nothing was recorded: torch's profiler returned no step")
        elif self.accelerator.is_main_process:
            try:
                self.report(combine(ranks), Path(self.arguments.output_dir))
            except OSError as error:  # a full disk does not end the run
                self.log.say(f"the profile could not be written: {error}")

    def report(self, found: dict[str, Any], output_dir: Path) -> None:
        """Print the profile with what to try, and write it beside the trace."""
        wrap = json.loads((output_dir / "wrap_report.json").read_text(encoding="utf-8"))
        keys = {name: key["value"] for name, key in wrap["keys"].items()}
        device, peak = self.accelerator.device, None
        if device.type == "cuda" and keys["hook_param_dtype"] != "fp32":
            peak = peak_flops(torch.cuda.get_device_name(device))
        flops = found["model_flops_per_second_per_rank"]
        found |= {"model_flop_utilisation": flops / peak if peak else None, "peak_flops": peak}
        found |= {"convention": CONVENTION, "advice": advice(self.facts(found, wrap, keys))}
        folder = output_dir / "profile"
        self.log.say("\n".join([*profile_lines(found), f"trace for https://ui.perfetto.dev, and tables: {folder}"]))
        folder.mkdir(exist_ok=True)
        (folder / "profile.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (folder / "profile.md").write_text(profile_markdown(found), encoding="utf-8")
        order = f"self_{device.type}_time_total"
        table = self.profile.key_averages().table(sort_by=order, row_limit=OPERATORS)
        (folder / "operators.txt").write_text(table + "\n", encoding="utf-8")
        self.profile.export_chrome_trace(str(folder / "trace.json.gz"))

    def facts(self, found: dict[str, Any], wrap: dict[str, Any], keys: dict[str, Any]) -> Facts:
        """What the advice needs to know of this run; `wrap` is its wrap_report.json."""
        arguments = self.arguments
        return Facts(
            shares=found["shares"],
            padding=found["padding_share"],
            is_gpu=self.accelerator.device.type != "cpu",
            recomputed_blocks=len(wrap["recomputed_blocks"]),
            num_blocks=wrap["num_blocks"],
            num_units=wrap["num_units"],
            wrap_policy="" if keys["hook_wrap_function"] else keys["fsdp_auto_wrap_policy"],
            blocks_per_unit=keys["hook_wrap_blocks_per_unit"],
            min_num_params=keys["fsdp_min_num_params"],
            reduces_often=keys["hook_reduce_every_micro_batch"] and arguments.gradient_accumulation_steps > 1,
            packs=arguments.packing,
            groups_by_length=arguments.group_by_length,
            compiles=getattr(arguments, "torch_compile", None),
        )


def padding_tokens(batch: Batch) -> int:
    """How many tokens of a micro-batch are padding. Packed rows have no mask: there it is the last document of a row,
    one token over and over without a label."""
    if "attention_mask" in batch:
        return int((batch["attention_mask"] == 0).sum())
    ids, labels, positions = batch["input_ids"], batch["labels"], batch["position_ids"]
    length = ids.shape[1]
    first = length - 1 - (positions == 0).flip(1).int().argmax(1, keepdim=True)  # (B, 1), of the last document
    is_last = torch.arange(length, device=ids.device) >= first  # (B, T)
    differs = is_last & ((ids != ids[:, -1:]) | (labels >= 0))
    return int((is_last & ~differs.any(1, keepdim=True)).sum())
