"""A few optimizer steps under torch's profiler (--profile): a trace and a table of operators, and a tool's reading of
where the time went."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from .arguments import FinetuneArguments
from .metrics import MetricsLog, StepMeter
from .on_demand import tool

WARM_UP_STEPS = 2  # the first one makes optimizer state, allocates, tunes and compiles
OPERATORS = 60  # in the table

Batch = dict[str, torch.Tensor]


class StepProfiler:
    """Records `arguments.profile` optimizer steps after the first WARM_UP_STEPS; does nothing without --profile.

    Every rank records. Rank 0 writes OUTPUT_DIR/profile/ (trace.json.gz for ui.perfetto.dev, operators.txt; the tool
    adds profile.json and profile.md, and prints the profile). What training does is not changed; `meter` is not charged
    for the time that this takes between two steps.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        micro_batch_loss: Callable[..., Any],
        arguments: FinetuneArguments,
        *,
        log: MetricsLog,
        meter: StepMeter,
    ) -> None:
        self.accelerator, self.model, self.micro_batch_loss = accelerator, model, micro_batch_loss
        self.num_steps, self.log, self.meter = arguments.profile, log, meter
        self.folder = Path(arguments.output_dir, "profile")
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
            self.is_over = is_last or num_recorded == self.num_steps
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
        plan = torch.profiler.schedule(wait=0, warmup=WARM_UP_STEPS - 1, active=self.num_steps, repeat=1)
        self.profile = torch.profiler.profile(activities=activities, schedule=plan)
        self.profile.start()

    def finish(self, num_recorded: int) -> None:
        """Stop recording, write the trace, and let the tool read it. Every rank must call it."""
        if self.profile is not None:
            self.profile.stop()
        if num_recorded < self.num_steps:
            self.log.say(
                f"--profile {self.num_steps}: the run ended after {self.steps_seen} steps, {WARM_UP_STEPS} of them to "
                f"warm up; {max(num_recorded, 0)} recorded"
            )
        if num_recorded <= 0:
            return
        if self.accelerator.is_main_process:
            try:
                self.write_trace()
            except OSError as error:  # a full disk does not end the run
                self.log.say(f"the profile could not be written: {error}")
        reader = tool("profiling.step_profile", "profile by shares, with advice", self.log.say)
        if reader is not None:
            counted = reader.count(self.profile, self.recorded, num_recorded, self.model, self.micro_batch_loss)
            if self.accelerator.is_main_process:
                reader.report(counted, self.folder.parent, self.accelerator.device, self.log.say)

    def write_trace(self) -> None:
        """trace.json.gz and operators.txt."""
        self.folder.mkdir(parents=True, exist_ok=True)
        order = f"self_{self.accelerator.device.type}_time_total"
        table = self.profile.key_averages().table(sort_by=order, row_limit=OPERATORS)
        (self.folder / "operators.txt").write_text(table + "\n", encoding="utf-8")
        self.profile.export_chrome_trace(str(self.folder / "trace.json.gz"))
