"""The loss: exact per label token, in fp32, whatever the split into micro-batches and ranks."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .sending import run_model

IGNORE_INDEX = -100  # what torch's cross-entropy leaves out, and rows/labels.py writes


def num_label_tokens(labels: torch.Tensor) -> int:
    """Number of positions that are predicted: labels (B, T) without their first column, IGNORE_INDEX left out. Ask
    before they are sent: on the device it would be waited for."""
    return int((labels[:, 1:] != IGNORE_INDEX).sum())


def count_tokens(micro_batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """[label tokens, tokens] of micro-batches on the host."""
    labels = [batch["labels"] for batch in micro_batches]
    return torch.tensor([sum(map(num_label_tokens, labels)), sum(map(torch.numel, labels))])


def token_loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed next-token cross-entropy in fp32. Labels are unshifted, as long as the input.

    Labels are never passed to the model: its own loss is a mean over this micro-batch alone, and some architectures
    ignore the token count they are given.
    """
    # The labels are shifted and padded, not the logits cut: a slice of them would be copied, and its gradient too.
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()  # (B * T,)
    predictions = logits.float().flatten(0, 1)  # (B * T, V)
    return F.cross_entropy(predictions, shifted, ignore_index=IGNORE_INDEX, reduction="sum")


def micro_batch_loss(
    model: nn.Module, batch: dict[str, torch.Tensor], step_label_tokens: int | torch.Tensor, world_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one micro-batch; return (loss to backward, summed token loss for the log).

    The loss to backward is `sum / label tokens of the whole optimizer step (all ranks) * world_size`: FSDP2 averages
    gradients over ranks, so the step's gradient is that of one batch's token mean. Dividing before backward keeps fp16
    gradients in range. A mixture-of-experts balancing loss, where the model returns one, is weighted by this
    micro-batch's share of label tokens.
    """
    outputs = run_model(model, batch, leave_out=("labels",))
    loss_sum = token_loss_sum(outputs.logits, batch["labels"])
    sizes = {"step_label_tokens": step_label_tokens, "world_size": world_size}
    return share_of_step(model, outputs, loss_sum, batch["labels"], **sizes)


def share_of_step(
    model: nn.Module,
    outputs: Any,
    loss_sum: torch.Tensor,
    labels: torch.Tensor,
    *,
    step_label_tokens: int | torch.Tensor,
    world_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """From a micro-batch's summed token loss, what micro_batch_loss returns."""
    auxiliary = getattr(outputs, "aux_loss", None)
    total = loss_sum
    if auxiliary is not None:
        total = loss_sum + auxiliary_weight(model) * auxiliary * (labels[:, 1:] != IGNORE_INDEX).sum()
    if isinstance(step_label_tokens, torch.Tensor):  # rounded once: `3 / tensor` is 3 times a reciprocal
        return total * (world_size / step_label_tokens.double()).to(total.dtype), loss_sum.detach()
    return total * (world_size / step_label_tokens), loss_sum.detach()


def auxiliary_weight(model: nn.Module) -> float:
    """The weight of the mixture-of-experts balancing loss in this model's config; 0 for a model without one."""
    config = model.config.get_text_config()
    names = ("router_aux_loss_coef", "aux_loss_coef")
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), 0.0)
