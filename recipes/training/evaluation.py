"""The loss on held-out rows."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from hooks.wrap import reshard_all
from torch import nn
from tqdm import tqdm

from .losses import num_label_tokens
from .sending import send

SHOWN = 5  # batches whose loss is not finite, and rows of each


@torch.compiler.set_stance("force_eager")  # compiled blocks would be compiled once more, for shapes seen once
@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    batches: Iterable[dict[str, torch.Tensor]],
    micro_batch_loss: Callable[..., tuple[Any, torch.Tensor]],
) -> float:
    """Mean loss per label token over all held-out rows, each counted once. `micro_batch_loss` is the one trained on.

    Where it is not finite, rank 0 prints which batches made it so.
    """
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    losses = []
    for batch in batches:
        label_tokens = num_label_tokens(batch["labels"])
        _, token_loss = micro_batch_loss(model, send(batch, accelerator.device), 1, 1)
        losses.append(torch.stack([token_loss.to(totals), totals.new_full((), label_tokens)]))
        totals += losses[-1]
    reshard_all(model)  # else the next clip and step would see gathered parameters
    model.train()
    loss_sum, label_tokens = accelerator.reduce(totals).tolist()
    if not math.isfinite(loss_sum):
        say_non_finite(losses, batches, accelerator)
    return loss_sum / label_tokens


def say_non_finite(
    losses: list[torch.Tensor], batches: Iterable[dict[str, torch.Tensor]], accelerator: Accelerator
) -> None:
    """Print, on rank 0, in which batches of which ranks a loss is not finite, by their rows. A collective.

    `losses`: (summed token loss, label tokens) of each batch.
    """
    loss, label_tokens = torch.stack(losses).T.cpu()
    bad = (~loss.isfinite()).nonzero().flatten().tolist()
    sampler = getattr(batches, "batch_sampler", None)  # of evaluation_batches: a list of row numbers per batch
    ranks = [None] * dist.get_world_size()
    rows = [list_rows(sampler[number]) if sampler else f"batch {number}" for number in bad]
    dist.all_gather_object(ranks, (rows, int((label_tokens > 0).sum())))
    if accelerator.is_main_process:
        found = [f"rank {rank}, {rows}" for rank, (bad, _) in enumerate(ranks) for rows in bad]
        total = sum(number for _, number in ranks)  # fillers have no labels, and no loss
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        is_all = len(found) >= total
        why = "look at the weights and dtypes, not at the rows" if is_all else "; ".join(found[:SHOWN]) + more
        tqdm.write(f"note: the evaluation's loss is not finite in {len(found)} of {total} batches ({why})")


def list_rows(rows: list[int]) -> str:
    """The first of some row numbers, which count the test rows that were kept, from 0."""
    return f"test rows {', '.join(map(str, rows[:SHOWN]))}" + (f" to {rows[-1]}" if len(rows) > SHOWN else "")
