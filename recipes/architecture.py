"""What an architecture itself can do, measured on a whole tiny model in one process."""

import torch
import torch.nn.functional as F
from shrink import build_tiny_model
from torch import nn
from transformers import PreTrainedConfig

EQUAL = 1e-5  # relative; attention over another number of tokens adds in another order


@torch.no_grad()
def packed_isolation(model: nn.Module) -> str:
    """Run three documents packed into one row, positions restarting, and each alone: `isolated`, or what leaks."""
    model.eval()
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(67, 96, (1, length), generator=generator) for length in (5, 4, 7)]
    position_ids = torch.cat([torch.arange(document.shape[1])[None] for document in documents], 1)
    advice = "leave --packing off for this architecture"
    try:
        together = model(input_ids=torch.cat(documents, 1), position_ids=position_ids, use_cache=False).logits
        alone = torch.cat([model(input_ids=document, use_cache=False).logits for document in documents], 1)
    except Exception as error:  # a model that takes no positions, for one
        return f"{type(error).__name__}: {str(error)[:80]}: {advice}"
    difference = ((together - alone).norm() / alone.norm()).item()
    return "isolated" if difference <= EQUAL else f"packed documents see each other ({difference:.0e}): {advice}"


def check_architecture(config: PreTrainedConfig, packing: bool) -> None:
    """Raise ValueError where positions see later ones or, under --packing, documents see each other.

    Both are measured on a tiny model of this architecture, not looked up in a list.
    """
    check_causal(config)
    isolation = packed_isolation(build_tiny_model(config)) if packing else "isolated"
    if isolation != "isolated":
        raise ValueError(f"--packing: {isolation}")


@torch.no_grad()
def check_causal(config: PreTrainedConfig) -> None:
    """Raise ValueError where a position sees later ones, measured on a tiny model (an encoder without `is_decoder`).

    Such a model would be trained to predict a token that it is shown. One that cannot run by itself is left to fail in
    training.
    """
    model = build_tiny_model(config, as_given=True).eval()
    ids = torch.randint(67, 96, (1, 16), generator=torch.Generator().manual_seed(3))
    changed = torch.cat([ids[:, :-1], 67 + (ids[:, -1:] - 66) % 29], 1)
    try:
        logits, others = model(input_ids=ids).logits, model(input_ids=changed).logits
    except Exception:  # it needs pictures, or a length of its own
        return
    difference = (logits[:, :-1] - others[:, :-1]).abs().max() / logits.abs().max()
    if difference > EQUAL:
        raise ValueError(
            f"this model sees the tokens that it should predict (a later one changes logits by {difference:.0e}): it "
            "is not causal as configured; set is_decoder: true in its config.json, or choose a causal model"
        )


@torch.no_grad()
def own_loss(model: nn.Module) -> str:
    """Compare the loss that the model computes from labels with next-token cross-entropy, which the scripts train."""
    model.eval()
    ids = torch.randint(67, 96, (2, 16), generator=torch.Generator().manual_seed(3))
    try:
        outputs = model(input_ids=ids, labels=ids, use_cache=False)
        theirs = outputs.loss.item()
    except Exception as error:
        return f"none ({type(error).__name__}: {str(error)[:80]})"
    ours = F.cross_entropy(outputs.logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()).item()
    difference = abs(ours - theirs) / abs(ours)
    if difference <= EQUAL:
        return "next-token cross-entropy, as the scripts train"
    return f"not next-token cross-entropy (off by {difference:.0e}); the scripts train next-token cross-entropy"
