"""What an architecture itself is and can do, read from or measured on a whole model."""

import copy
import re

import torch
import torch.nn.functional as F
from hooks.structure import num_parameters
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..private_transformers import attention_of, with_attention
from .shrink import TOKEN_ID, build_tiny_model, sub_configs

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


def draw(tokens: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """Random ones of these tokens, always the same."""
    return tokens[torch.randint(len(tokens), size, generator=torch.Generator().manual_seed(3))]


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


def by_positions(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs
) -> tuple[torch.Tensor, None]:
    """Attention that tells documents apart by the positions it is handed alone, as flash attention does."""
    positions, length = kwargs.get("position_ids"), query.shape[2]
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    if positions is not None:
        documents = (positions[0] == 0).cumsum(0)
        allowed &= documents[:, None] == documents[None]
    options = {name: kwargs[name] for name in ("scaling", "dropout") if name in kwargs}
    return sdpa_attention_forward(module, query, key, value, allowed[None, None], **options)


def flash_isolation(config: PreTrainedConfig) -> str:
    """packed_isolation as flash attention would give it: it never sees a mask, and not every family hands it the
    positions."""
    AttentionInterface.register("by_positions", by_positions)
    model = build_tiny_model(config)
    model.set_attn_implementation("by_positions")
    if attention_of(model.config) != "by_positions":
        return "this architecture chooses its attention by itself: leave flash attention or --packing off"
    return packed_isolation(model)


def check_architecture(config: PreTrainedConfig, packing: bool) -> None:
    """Raise ValueError where positions see later ones or, under --packing, documents see each other.

    Both are measured on a tiny model of this architecture, not looked up in a list.
    """
    check_causal(config)
    if not packing:
        return
    uses_flash = str(attention_of(config) or "").startswith("flash")
    plain = with_attention(config, None if uses_flash else attention_of(config))
    try:
        isolation = flash_isolation(plain) if uses_flash else packed_isolation(build_tiny_model(plain))
    except Exception as error:
        raise ValueError(
            f"--packing: no tiny model could be built from this config to see whether documents stay apart "
            f"({type(error).__name__}: {str(error)[:80]}): leave --packing off for this architecture"
        ) from error
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


def unsized_model(config: PreTrainedConfig) -> tuple[nn.Module | None, str]:
    """The model in its real size, without memory for it (on the meta device); or None, and why it cannot be built."""
    has_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})  # allowed when it was loaded
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=has_code), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def norms_by_name(model: nn.Module) -> tuple[set[str], set[str]]:
    """Modules that are norms by the name of their class, or only by their own; those that hold parameters."""
    leaves = {
        name: m for name, m in model.named_modules() if not any(m.children()) and any(True for _ in m.parameters())
    }
    by_class = {name for name, m in leaves.items() if re.search("norm", type(m).__name__, re.IGNORECASE)}
    return by_class, {name for name in leaves if re.search("norm", name.rpartition(".")[2], re.IGNORECASE)} - by_class


def balancing_weight(config: PreTrainedConfig) -> float:
    """The factor of a mixture of experts' balancing loss, by its names in transformers' configs; 0 without one."""
    text = config.get_text_config()
    weights = [getattr(text, name, None) for name in ("router_aux_loss_coef", "aux_loss_coef")]
    return next((float(weight) for weight in weights if weight is not None), 0.0)


@torch.no_grad()
def balancing_term(model: nn.Module) -> float:
    """The balancing loss as this model adds it to a loss, 0 where it has none."""
    auxiliary = getattr(model(input_ids=draw(text_tokens(model), (2, 16)), use_cache=False), "aux_loss", None)
    return 0.0 if auxiliary is None else balancing_weight(model.config) * float(auxiliary)


def set_buffer_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast all floating-point buffers, in place."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))


def scaled_threshold(min_num_params: int, tiny: nn.Module, whole: nn.Module | None) -> int:
    """fsdp_min_num_params at the tiny model's scale; an eighth of it where the real size is not known."""
    share = min_num_params / num_parameters(whole) if whole is not None else 1 / 8
    return max(1, round(share * num_parameters(tiny)))
