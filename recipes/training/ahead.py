"""The next step's batches, read and sent to the device while it works on this one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .losses import num_label_tokens

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
    """Read the next step and send it, now. Nothing here waits for the device: all goes from pinned memory."""

    def send(values: torch.Tensor) -> torch.Tensor:
        return (values if device.type == "cpu" else values.pin_memory()).to(device, non_blocking=True)

    try:
        step = next(steps)
        labels = [batch["labels"] for batch in step.micro_batches]
        counts = torch.tensor([sum(map(num_label_tokens, labels)), sum(map(torch.numel, labels))])
        sent = [{name: send(values) for name, values in batch.items()} for batch in step.micro_batches]
        return Fetched(step._replace(micro_batches=sent), send(counts))
    except (Exception, SystemExit) as error:
        return Fetched(error=error)
