"""The loss in chunks of tokens, so that neither the full logits nor their fp32 copy ever exist.

B rows, T tokens, D hidden size, V vocabulary, N = B * (T - 1) predicted tokens.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from hooks.structure import base_model, original_class
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast, ModelOutput

from .losses import IGNORE_INDEX, share_of_step
from .sending import run_model


def compute_loss_in_chunks(model: nn.Module, chunk_tokens: int) -> None:
    """Make `model(..., labels=labels)` return the summed token loss as `loss`, and no logits; without labels it stays.

    The loop runs inside the head's forward, so that FSDP2 gathers the head once per micro-batch, and each chunk's
    logits are computed again in backward: peak memory is that of `chunk_tokens` rows of V logits. What the model does
    to its logits (scales, soft caps) is its own code, run on each chunk. Call it before wrapping.

    Raises:
        ValueError: the model's forward cannot be run on its head's output alone.
    """
    root = base_model(model)
    head = root.get_output_embeddings()
    check_head(root, head)
    own_forward, own_head_forward = root.forward, head.forward
    running: dict[str, torch.Tensor] = {}  # labels in, loss out, of the forward that runs

    def chunk_loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = finished_logits(root, head, own_head_forward(hidden))  # (1, n, V)
        return F.cross_entropy(logits[0].float(), labels, ignore_index=IGNORE_INDEX, reduction="sum")

    def head_forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if "labels" not in running:
            return own_head_forward(hidden, *args, **kwargs)
        predicting = hidden[:, :-1].flatten(0, 1)  # (N, D)
        shifted = running["labels"][:, 1:].flatten()  # (N)
        pairs = zip(predicting.split(chunk_tokens), shifted.split(chunk_tokens))
        options = {"use_reentrant": False, "preserve_rng_state": False}  # nothing here is random
        losses = [checkpoint(chunk_loss, rows[None], answers, **options) for rows, answers in pairs]
        running["loss"] = torch.stack(losses)[:, None, None].sum(0, keepdim=True)  # (1, 1, 1), and no view: FSDP2 asks
        return running["loss"]

    def forward(*args: Any, labels: torch.Tensor | None = None, **kwargs: Any) -> ModelOutput:
        if labels is None:
            return own_forward(*args, **kwargs)
        running["labels"] = labels
        try:
            output = own_forward(*args, **kwargs)  # what it makes of the loss, taking it for logits, is not used
            output["logits"], output["loss"] = None, running["loss"].sum()
        finally:
            running.clear()
        return output

    head.forward, root.forward = head_forward, forward


def check_head(root: nn.Module, head: nn.Module | None) -> None:
    """Raise ValueError unless the model's own code finishes logits that are handed to it."""
    try:
        logits = torch.zeros(1, 2, head.weight.shape[0], device=head.weight.device)
        assert finished_logits(root, head, logits).shape == logits.shape
    except Exception as error:
        raise ValueError(
            f"{type(root).__name__}: its loss cannot be computed in chunks, because its head is not the last module of "
            f"its forward ({type(error).__name__}: {error}). Train it with finetune.py."
        ) from error


def micro_batch_loss(
    model: nn.Module, batch: dict[str, torch.Tensor], step_label_tokens: int | torch.Tensor, world_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """losses.micro_batch_loss for a model of compute_loss_in_chunks."""
    outputs = run_model(model, batch)
    sizes = {"step_label_tokens": step_label_tokens, "world_size": world_size}
    return share_of_step(model, outputs, outputs.loss, batch["labels"], **sizes)


class HeadAlone:
    """A model whose decoder has run and whose head has given `logits`: the rest of its forward is its own."""

    def __init__(self, root: nn.Module, head: nn.Module, logits: torch.Tensor) -> None:
        self.root, self.head, self.logits = root, head, logits

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.root, name)
        if value is self.head:
            return Returns(self.head, self.logits)
        if value is self.root.base_model:
            hidden = self.logits.new_zeros(1, self.logits.shape[1], 1)
            return Returns(value, DecoderOutput(last_hidden_state=hidden))
        return value


class Returns:
    """In a module's place: returns a value that is known already."""

    def __init__(self, module: nn.Module, value: Any) -> None:
        self.module, self.value = module, value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.value

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        return Returns(value, self.value) if isinstance(value, nn.Module) else value


class DecoderOutput(BaseModelOutputWithPast):
    """Says None for whatever else a family's decoder returns."""

    def __getattr__(self, name: str) -> None:
        return None


def finished_logits(root: nn.Module, head: nn.Module, logits: torch.Tensor) -> torch.Tensor:
    """What the model's forward returns where its head gives `logits` (1, n, V)."""
    forward = original_class(root).forward
    quiet = {"output_router_logits": False, "use_cache": False, "return_dict": True}
    accepted = {name: value for name, value in quiet.items() if name in inspect.signature(forward).parameters}
    return forward(HeadAlone(root, head, logits), input_ids=None, **accepted).logits
