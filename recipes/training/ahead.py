"""The next step's batches, read and sent to the device while it works on this one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .losses import count_tokens
from .sending import send, send_values

if TYPE_CHECKING:  # rows of the user's own need no rows/
    from rows.batches import Step


@dataclass
class Fetched:
    """A step on the device with its [label tokens, tokens] of this rank; or what reading it met, which concerns that
    step and not the one that runs."""

    step: Step | None = None
    counts: torch.Tensor | None = None
    error: BaseException | None = None

    def result(self) -> tuple[Step, torch.Tensor]:
        """The step and its counts. Raises the error."""
        if self.error is not None:
            raise self.error
        return self.step, self.counts


def fetch_ahead(steps: Iterator[Step], device: torch.device) -> Fetched:
    """Read the next step and send it, now. Nothing here waits for the device."""
    try:
        step = next(steps)
        counts = send_values(count_tokens(step.micro_batches), device)
        return Fetched(step._replace(micro_batches=[send(batch, device) for batch in step.micro_batches]), counts)
    except (Exception, SystemExit) as error:
        return Fetched(error=error)
