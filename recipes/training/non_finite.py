"""A step whose loss or gradient norm is not finite: the run stops, or goes on without it, before the weights change."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from hooks.config import HookConfig
from torch import nn

from .arguments import FinetuneArguments
from .launch import stop_together
from .on_demand import tool
from .random_state import generator_states

Batch = dict[str, torch.Tensor]
Rows = list[list[Any]]  # of each micro-batch, its rows' numbers; of a packed row, a list of its documents' numbers
MAX_SKIPPED_STEPS = 50  # fp16: halving the initial scale that often reaches its floor; then it is no overflow
ADVICE = {
    "bf16": "lower --learning_rate or --max_grad_norm first",
    "fp16": "lower --fp16_initial_scale or use bf16",
    "fp32": "lower --learning_rate or --max_grad_norm",
}


@dataclass
class BegunStep:
    """This rank's part of a step, as it began: what runs its micro-batches, and from which random state."""

    run: Callable[[list[Batch]], torch.Tensor]
    micro_batches: list[Batch]
    random_state: dict[str, torch.Tensor]


class NonFiniteSteps:
    """Runs each step so that it can run again, says whether the optimizer may take it, and counts those not taken, from
    the `state` where the run stands.

    The first step that it may not take is run a second time under hooks, from the same random state, to name the module
    or parameter, the rank and the rows where it began; its rows are saved for replay.py. Both are a tool's to do. Under
    fp16 an overflowing norm alone is the loss scaler's to skip.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        arguments: FinetuneArguments,
        config: HookConfig,
        *,
        state: dict[str, int],
        say: Callable[[str], None],
    ) -> None:
        self.accelerator, self.model, self.say = accelerator, model, say
        self.skips, self.seed, self.dtype = arguments.on_non_finite == "skip", arguments.seed, config.hook_param_dtype
        self.folder = Path(arguments.output_dir, "non_finite") if arguments.output_dir else None
        self.skipped, self.skipped_in_a_row = state["skipped_steps"], state["skipped_in_a_row"]
        self.is_explained = False
        self.last_finite = "no step before it was finite here"
        self.begun: BegunStep | None = None

    def run(self, whole_step: Callable[[list[Batch]], torch.Tensor], micro_batches: list[Batch]) -> torch.Tensor:
        """Return what `whole_step` returns for a step's micro-batches, and remember how it began."""
        self.begun = BegunStep(whole_step, micro_batches, generator_states(self.accelerator.device))
        return whole_step(micro_batches)

    def allows(self, step: int, rows: Rows, loss_sum: float, label_tokens: float, grad_norm: float) -> bool:
        """Whether the optimizer may take this step: every rank holds the same sums and decides alike.

        Ends all ranks (SystemExit) where one is not finite, or skips it with `--on_non_finite skip`, MAX_SKIPPED_STEPS
        in a row at most.
        """
        may_skip = self.skipped_in_a_row < MAX_SKIPPED_STEPS
        may_overflow = self.accelerator.scaler is not None and may_skip
        if math.isfinite(loss_sum) and (math.isfinite(grad_norm) or may_overflow):
            if math.isfinite(grad_norm):
                loss = loss_sum / max(label_tokens, 1)
                self.last_finite = f"the last finite one was step {step}: loss {loss:.4f}, grad_norm {grad_norm:.2f}"
            return True
        name, value = ("loss", loss_sum) if not math.isfinite(loss_sum) else ("grad_norm", grad_norm)
        what = f"step {step}: {name} is {value}"
        is_skipped = self.skips and may_skip
        lines = [] if self.is_explained else self.explain(step, rows, label_tokens, what)
        self.is_explained = True
        if is_skipped:
            self.say("\n- ".join([f"{what}; skipped on every rank ({self.skipped + 1} so far)", *lines]))
            if self.accelerator.scaler is not None:
                self.accelerator.scaler.update()  # clipping has unscaled this step's gradients
            return False
        in_a_row = f" after {self.skipped_in_a_row} skipped in a row" if self.skipped_in_a_row else ""
        lines = lines or ["where it began is said at the first step that was skipped"]
        with stop_together():
            raise ValueError("\n- ".join([f"{what}{in_a_row}; stopped before the weights changed", *lines]))

    def explain(self, step: int, rows: Rows, label_tokens: float, what: str) -> list[str]:
        """Where it began, what was last finite, where the rows are, what to try. A collective."""
        lines, replaying = [], tool("diagnosis.replaying", "second run of this step under hooks", self.say)
        if replaying is not None:
            lines += replaying.run_again(self.begun, self.model, rows, self.accelerator.device)
        facts = {"step": step, "label_tokens": label_tokens, "seed": self.seed, "found": [what, *lines]}
        lines.append(self.last_finite)
        if replaying is not None and self.folder is not None:
            lines.append(replaying.save_step(self.folder, self.begun, rows, facts))
        return [*lines, f"{self.dtype}: {ADVICE[self.dtype]}; then hook_norm_dtype: fp32, hook_reduce_dtype: fp32"]

    def count(self, is_taken: bool) -> dict[str, int]:
        """Count a step if the weights did not change in it; returns both counts, for the state of the run."""
        self.skipped += not is_taken
        self.skipped_in_a_row = 0 if is_taken else self.skipped_in_a_row + 1
        return {"skipped_steps": self.skipped, "skipped_in_a_row": self.skipped_in_a_row}

    def values(self) -> dict[str, float]:
        """For the log, where steps may be skipped: how many were, and fp16's loss scale."""
        if self.accelerator.scaler is not None:
            return {"loss_scale": self.accelerator.scaler.get_scale(), "skipped_steps": self.skipped}
        return {"skipped_steps": self.skipped} if self.skips else {}
