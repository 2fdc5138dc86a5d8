"""What an architecture itself can do, measured on a whole tiny model in one process."""

import re

import torch
import torch.nn.functional as F
from shrink import TOKEN_ID, build_tiny_model, sub_configs
from torch import nn
from transformers import PreTrainedConfig

EQUAL = 1e-5  # relative; attention over another number of tokens adds in another order


def text_tokens(model: nn.Module) -> torch.Tensor:
    """Token ids that stand for text in a tiny model: 67 to 95, or the upper third of a vocabulary that is smaller,
    without those that its config gives a meaning."""
    parts = [model.config, *sub_configs(model.config)]
    given = [value for part in parts for name, value in vars(part).items() if re.fullmatch(TOKEN_ID, name)]
    special = {v for value in given for v in (value if isinstance(value, (list, tuple)) else [value])}
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    size = min(size, 96) if isinstance(size, int) else 96
    first = 67 if size == 96 else 2 * size // 3
    tokens = [token for token in range(first, size) if token not in special]
    return torch.tensor(tokens if len(tokens) > 1 else list(range(size)))


def draw(tokens: torch.Tensor, size: tuple[int, ...], seed: int = 3) -> torch.Tensor:
    """Random ones of these tokens."""
    return tokens[torch.randint(len(tokens), size, generator=torch.Generator().manual_seed(seed))]


@torch.no_grad()
def packed_isolation(model: nn.Module) -> str:
    """Run three documents packed into one row, positions restarting, and each alone: `isolated`, or what leaks."""
    model.eval()
    documents = list(draw(text_tokens(model), (1, 16)).split((5, 4, 7), 1))
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
    if not packing:
        return
    try:
        model = build_tiny_model(config)
    except Exception as error:
        raise ValueError(
            f"--packing: no tiny model could be built from this config to see whether documents stay apart "
            f"({type(error).__name__}: {str(error)[:80]}): leave --packing off for this architecture"
        ) from error
    isolation = packed_isolation(model)
    if isolation != "isolated":
        raise ValueError(f"--packing: {isolation}")


@torch.no_grad()
def check_causal(config: PreTrainedConfig) -> None:
    """Raise ValueError where a position sees later ones, measured on a tiny model (an encoder without `is_decoder`).

    Such a model would be trained to predict a token that it is shown. One that cannot be built small, or cannot run by
    itself, is left to fail in training.
    """
    try:
        model = build_tiny_model(config, as_given=True).eval()
        tokens = text_tokens(model)
        ids = draw(tokens, (1, 16))
        changed = torch.cat([ids[:, :-1], torch.where(ids[:, -1:] == tokens[0], tokens[1], tokens[0])], 1)
        logits, others = model(input_ids=ids).logits, model(input_ids=changed).logits
    except Exception:  # a config that shrink does not know, or a model that needs pictures or a length of its own
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
    ids = draw(text_tokens(model), (2, 16))
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
