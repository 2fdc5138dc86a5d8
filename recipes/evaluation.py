"""The loss on held-out rows."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import Accelerator
from hook_wrap import reshard_all
from losses import num_label_tokens
from torch import nn
from torch.profiler import record_function


@torch.compiler.set_stance("force_eager")  # compiled blocks would be compiled once more, for shapes seen once
@torch.no_grad()
@record_function("recipe: evaluate")
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    batches: Iterable[dict[str, torch.Tensor]],
    micro_batch_loss: Callable[..., tuple[Any, torch.Tensor]],
) -> float:
    """Mean loss per label token over all held-out rows, each counted once. `micro_batch_loss` is the one trained on."""
    model.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    for batch in batches:
        batch = {name: values.to(accelerator.device) for name, values in batch.items()}
        _, token_loss = micro_batch_loss(model, batch, 1, 1)
        totals[0] += token_loss
        totals[1] += num_label_tokens(batch["labels"])
    reshard_all(model)  # else the next clip and step would see gathered parameters
    model.train()
    loss_sum, label_tokens = accelerator.reduce(totals).tolist()
    return loss_sum / label_tokens
