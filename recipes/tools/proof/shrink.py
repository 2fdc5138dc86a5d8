"""A tiny model of the same architecture as a given config: every rule of the family kept, two layers of every kind and
what is given per layer with them, every width made small."""

import contextlib
import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from ..private_transformers import layer_overrides, with_overrides

HIDDEN = 64
HEADS = 4
VOCAB = 128
FIRST_SPECIAL = 96  # larger token ids move to the ids from here to the end of the vocabulary

# Full-match pattern of an attribute name -> the largest value it may keep; the first match counts.
CAPS = (
    (r"topk_group", 1),
    (r".*type_vocab_size", 4),
    (r".*vocab_size(_per_layer_input)?|.*hash_byte_group_vocab|codebook_size", VOCAB),
    (r"(.*_)?(conv|conv1d|kernel)(_size|_dim|_width|_kernel_dim)?|.*conv_(kernel|L_cache)", 4),
    (r"(mamba_)?n_?groups|heads_per_ngram|index_n_heads|linear_num_key_heads|n_group|num_expert_group|o_groups", 2),
    (r".*(experts_per_tok(en)?|moe_topk|top_k|moe_k|topk_blocks|attn_res_block)|swa_num_key_value_heads", 2),
    (r"n_routed_experts|rotary_dim", 8),
    (r"(.*_)?experts|zero_expert_num|block_size|.*tokens_per_image|patch_size|axial_pos_shape|split_ngram_parts", 4),
    (r"time_step_rank|mamba_dt_rank|qk_rope_head_dim|.*mamba.*heads|(mamba_)?chunk_size|index_topk|compress_rates", 8),
    (r".*(sliding_window(_size)?|window_len|window_size|attention_chunk_size|local_attention)|index_block_size", 8),
    (r"floor_scale|log_scaling_n_floor|rel_extent|.*attn_chunk_length", 8),
    (r".*head_?dim|.*d_head|.*head_size|d_kv|dim_head|kv_channels|d_rel", HIDDEN // HEADS),
    (r"(.*_)?heads?(_per_layer)?|num_query_groups", HEADS),
    (r".*_rank|.*router_hidden_size|.*hidden_size_per_layer_input|hc_lowrank|(.*_)?(state_size|d_state)", 16),
    (r"(.*_)?max_(.*_)?(position_embeddings|positions|length|seq_len)|n_positions|n_ctx|context_length", VOCAB),
    (r".*num_position_embeddings|ngram_vocab_size_base", 64),
    (r".*(moe|expert).*_(intermediate|hidden)_size|.*_channels?|num_filters", 32),
    (r".*(intermediate|ffn_hidden|feed_forward)_size.*|.*ffn_dim|d_?ff|dim_ff|d_inner|mlp_dim|n_inner", 96),
    (r"(.*_)?(hidden_size|width)(_global)?|d_model|n_embd|.*emb(ed)?_dim|.*embedding_(dim|size)|.*proj_dim", HIDDEN),
)
LAYER_COUNT = (
    r"num_hidden_layers|n_layers?|num_layers|num_blocks|depth|(num_)?(en|de)coder_layers|conf_num_hidden_layers"
    r"|num_global_layers|num_layers_per_stack"
)
LAYER_BOUNDARY = r"(first_k_dense_replace|num_dense_layers|max_window_layers|.*layer_(index_)?(start|end)(_index)?)"
LAYER_SEGMENT = r"n_(input|recurrent|output)_layers"
LAYER_INDICES = r".*(_layers|layer_ids|_idxs|_indices|_indexes)"
LAYER_PERIOD = r".*_layer_period|decoder_sparse_step|moe_layer_interval"
TOKEN_ID = r".*token_(id|index|offset)|(pad|bos|eos|unk|mask)_index|.*suppress_tokens|vocab_offset"
HIDDEN_NAMES = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "emb_dim", "embedding_dim")
HEADS_NAMES = ("num_attention_heads", "n_head", "n_heads", "attention_heads", "num_heads")
AS_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_attention_heads")
AS_HEAD_WIDTH = ("head_dim", "swa_head_dim", "attention_head_dim", "indexer_head_dim")
MLA_NAMES = ("head_dim", "qk_head_dim", "qk_nope_head_dim", "v_head_dim")

# Default configs that leave None what their model code requires; real checkpoints have it.
REQUIRED = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256}
    | {"indexer_budget": 8, "indexer_compress_ratio": 4},
    "xmod": {"default_language": "en_XX"},
}


def shrink_config(config: PreTrainedConfig, dropout: float = 0.0, keeps_layers: bool = False) -> PreTrainedConfig:
    """Return a changed deep copy of `config` that describes a tiny model with the same rules.

    Layers are chosen so that every kind of layer the config has occurs at least twice, or all are kept. Every dropout
    the config has becomes `dropout`; what skips whole layers or shakes routers is off, and so is the cache. Token ids
    from 67 to 95 are special in no default config of the library.
    """
    tiny = copy.deepcopy(config)
    parts = [tiny, *sub_configs(tiny)]
    global_widths = {vars(part)["hidden_size_global"] for part in parts if "hidden_size_global" in vars(part)}
    shrink_token_ids(parts)
    for part in parts:
        complete(part)
        hidden = 2 * HIDDEN if vars(part).get("hidden_size") in global_widths else HIDDEN
        shrink_part(part, hidden, dropout, keeps_layers)
    return tiny


def sub_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """All configs nested in `config`, at any depth."""
    direct = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [part for child in direct for part in (child, *sub_configs(child))]


def is_int(value: Any) -> bool:
    """True for an int that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def first_int(values: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """First int found under one of the names."""
    return next((values[name] for name in names if is_int(values.get(name))), None)


def cap_of(name: str) -> int | None:
    """Largest value for an attribute of this name, None if the name says nothing."""
    return next((cap for pattern, cap in CAPS if re.fullmatch(pattern, name)), None)


def complete(config: PreTrainedConfig) -> None:
    """Fill in, in place, what the model code needs and the config leaves None, empty or (in one family) unset."""
    values = vars(config)
    hidden, heads = first_int(values, HIDDEN_NAMES), first_int(values, HEADS_NAMES)
    required = dict(REQUIRED.get(config.model_type, {}))
    if hidden and heads:
        required |= {"head_dim": hidden // heads, "num_key_value_heads": heads, "num_experts_per_tok": 2}
    if "kv_n_heads" in values:  # the attention part of DBRX reads these two without a default
        values.setdefault("rope_theta", None)
        required |= {"rope_theta": 10000.0, "clip_qkv": 8.0}
    for name, value in required.items():
        if name in values and values[name] in (None, {}):
            setattr(config, name, value)


def shrink_token_ids(parts: list[PreTrainedConfig]) -> None:
    """Move special token ids that are too large to the end of the vocabulary, in their order."""
    special = [(part, name, v) for part in parts for name, v in vars(part).items() if re.fullmatch(TOKEN_ID, name)]
    given = [v for _, _, value in special for v in (value if isinstance(value, (list, tuple)) else [value])]
    too_large = sorted({v for v in given if is_int(v) and v >= FIRST_SPECIAL})
    new_ids = {v: max(FIRST_SPECIAL, VOCAB - len(too_large) + i) for i, v in enumerate(too_large)}
    for part, name, value in special:
        if isinstance(value, (list, tuple)):
            setattr(part, name, type(value)(new_ids.get(v, v) for v in value))
        elif is_int(value):
            setattr(part, name, new_ids.get(value, value))


def shrink_part(config: PreTrainedConfig, hidden: int, dropout: float, keeps_layers: bool) -> None:
    """Shrink one config in place, without those nested in it."""
    old = dict(vars(config))
    if not keeps_layers:
        shrink_layers(config, old)
    kept = f"{LAYER_COUNT}|{LAYER_BOUNDARY}|{TOKEN_ID}"
    names = [name for name, value in old.items() if is_int(value) and not re.fullmatch(kept, name)]
    new = {name: shrink_int(name, old[name], old) for name in names}
    keep_relations(old, new, hidden)
    for name, value in new.items():
        if value != old[name]:
            setattr(config, name, value)
    for name, value in vars(config).copy().items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and re.search(r"drop|jitter", name):
            set_dropout(config, name, dropout if re.search("dropout|pdrop", name) else 0.0)
        elif name == "axial_pos_embds_dim":
            setattr(config, name, type(value)(v * hidden // sum(value) for v in value))
        elif isinstance(value, (list, tuple)) and all(is_int(v) for v in value):
            setattr(config, name, type(value)(shrink_int(name, v, old) for v in value))
        elif isinstance(value, dict) and name == "compress_rates":
            setattr(config, name, {key: shrink_int(name, v, old) for key, v in value.items()})
        elif (layers := layer_overrides(name, value)) is not None:
            for overrides in layers.values():
                shrink_overrides(overrides, old)
        elif name in ("is_decoder", "causal") and value is False:
            setattr(config, name, True)  # encoder families are causal only on demand
    config.use_cache = False
    shrink_rope(config, old)


def shrink_layers(config: PreTrainedConfig, old: dict[str, Any]) -> None:
    """Keep few layers: edits layer counts and everything that is given per layer, in place."""
    counts = [name for name, value in old.items() if re.fullmatch(LAYER_COUNT, name) and is_int(value)]
    lists = [name for name in ("layer_types", "layers_block_type") if isinstance(old.get(name), (list, tuple))]
    main = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if not counts and not lists:
        return
    num_layers = old[main if main in counts else counts[0]] if counts else len(old[lists[0]])
    columns = layer_columns(old, num_layers)
    kept = choose_layers([[str(entry) for entry in column] for column, _ in columns.values()], num_layers)
    for name, value in old.items():
        is_period = re.fullmatch(LAYER_PERIOD, name) and is_int(value) and value > 1
        if is_period and not (lists and name.endswith("_period")):
            kept = list(range(8))  # twice the longest period left
            setattr(config, name, min(value, 4))
            offset = name.replace("period", "offset")
            if offset != name:
                setattr(config, offset, old[offset] % min(value, 4))
    for name in counts:
        setattr(config, name, len(kept))
    for name, (column, rebuild) in columns.items():
        setattr(config, name, rebuild([column[i % num_layers] for i in kept]))


def layer_columns(old: dict[str, Any], num_layers: int) -> dict[str, tuple[list[Any], Callable[[list[Any]], Any]]]:
    """Attribute name -> what it says of each layer, and the function that makes its value from such entries."""
    layers = range(num_layers)
    columns: dict[str, tuple[list[Any], Callable[[list[Any]], Any]]] = {}
    start = 0
    for name, value in old.items():
        if isinstance(value, (list, tuple)) and value:
            rising = all(is_int(v) and v < num_layers for v in value) and list(value) == sorted(set(value))
            if rising and re.fullmatch(LAYER_INDICES, name):
                columns[name] = [i in value for i in layers], lambda flags: [i for i, flag in enumerate(flags) if flag]
            elif len(value) == num_layers or name == "block_types":  # the latter is repeated over the layers
                columns[name] = [value[i % len(value)] for i in layers], type(value)
        elif (overrides := layer_overrides(name, value)) is not None:
            columns[name] = [overrides.get(i) for i in layers], partial(with_overrides, value)
        elif is_int(value) and re.fullmatch(LAYER_BOUNDARY, name):
            columns[name] = [i < value for i in layers], sum
        elif is_int(value) and name == "num_kv_shared_layers":
            columns[name] = [i >= num_layers - value for i in layers], sum
        elif is_int(value) and re.fullmatch(LAYER_SEGMENT, name):
            columns[name] = [start <= i < start + value for i in layers], sum
            start += value
    return columns


def choose_layers(columns: list[list[str]], num_layers: int) -> list[int]:
    """Rising numbers of the layers to keep: two of every kind (one twice if it is the only one), at least four.

    A kind is a combination of entries; with more than six of them, only each single entry is kept twice. A third
    layer of the first kind is kept, because many models build their very first layer in another way.
    """
    kinds = list(zip(*columns)) if columns else [()] * num_layers
    chosen: list[int] = []
    for column in [kinds] if len(set(kinds)) <= 6 else columns:
        for entry in dict.fromkeys(column):
            having = [i for i, other in enumerate(column) if other == entry]
            fresh = [i for i in having if i not in chosen]
            wanted = 3 if entry == column[0] and len(set(kinds)) > 1 else 2
            chosen += (fresh + having * 3)[: max(0, wanted - sum(column[i] == entry for i in chosen))]
    rest = [i for i in range(num_layers) if i not in chosen] + [num_layers - 1] * 4
    return sorted(chosen + rest[: max(0, 4 - len(chosen))])


def set_dropout(config: PreTrainedConfig, name: str, value: float) -> None:
    """Set a probability, in place; one whose config class allows only an int stays off."""
    if is_int(getattr(config, name)):
        with contextlib.suppress(Exception):
            setattr(config, name, value or 0)
    else:
        setattr(config, name, value)


def shrink_int(name: str, value: int, old: dict[str, Any]) -> int:
    """The value, or the cap of its name if that is smaller; head widths of MLA keep their ratio to the rope width."""
    rope_width = old.get("qk_rope_head_dim")
    if name in MLA_NAMES and rope_width and value % rope_width == 0:
        return value * min(8, rope_width) // rope_width
    cap = cap_of(name)
    return value if cap is None else min(value, cap)


def follow(value: int, base: int, tiny_base: int) -> int:
    """A tiny value that is to `tiny_base` as `value` to `base`: equal, double or half; one stays one."""
    return 1 if value == 1 else tiny_base if value == base else tiny_base * 2 if value > base else tiny_base // 2


def shrink_overrides(overrides: dict[str, Any], old: dict[str, Any]) -> None:
    """Shrink the values of one layer, in place; a value unlike the global one stays unlike it."""
    for name, value in overrides.items():
        if is_int(value):
            overrides[name], base = shrink_int(name, value, old), old.get(name)
            if is_int(base) and overrides[name] == shrink_int(name, base, old):
                overrides[name] = follow(value, base, overrides[name])


def keep_relations(old: dict[str, Any], new: dict[str, int], hidden: int) -> None:
    """Restore in `new` the relations between widths that hold in `old`; edits `new` in place."""
    old_hidden, heads, tiny_heads = (
        first_int(old, HIDDEN_NAMES),
        first_int(old, HEADS_NAMES),
        first_int(new, HEADS_NAMES),
    )
    for name in new:
        small, large = sorted((old[name], old_hidden or 0))
        is_width = re.search(r"hidden|emb|dim|model|width|proj", name) and cap_of(name) in (None, HIDDEN)
        if is_width and small >= 16 and large % small == 0:
            new[name] = old[name] * hidden // old_hidden
    if heads and old_hidden:
        related = dict.fromkeys(AS_HEADS, (heads, tiny_heads))
        if "qk_rope_head_dim" not in new:
            related |= dict.fromkeys(AS_HEAD_WIDTH, (old_hidden // heads, hidden // tiny_heads))
        new |= {name: follow(old[name], *pair) for name, pair in related.items() if name in new}
    if {"mamba_d_ssm", "mamba_n_heads", "mamba_d_head"} <= new.keys():
        new["mamba_d_ssm"] = new["mamba_n_heads"] * new["mamba_d_head"]
    if "patch_size" in new:
        new |= {name: 4 * new["patch_size"] for name in ("image_size", "crop_size") if name in new}


def shrink_rope(config: PreTrainedConfig, old: dict[str, Any]) -> None:
    """Fit rope parameters, in place, to the tiny head width and position table."""
    tiny = vars(config)
    heads, hidden = first_int(tiny, HEADS_NAMES), first_int(tiny, HIDDEN_NAMES)
    head_dim = tiny.get("head_dim") or (hidden // heads if hidden and heads else 0)
    max_positions = first_int(old, ("max_position_embeddings", "model_max_length")) or VOCAB
    rope = tiny.get("rope_parameters") or {}
    for entry in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        trained = entry.get("original_max_position_embeddings")
        if is_int(trained):
            entry["original_max_position_embeddings"] = max(8, min(VOCAB, trained * VOCAB // max_positions))
        pairs = int(head_dim * entry.get("partial_rotary_factor", 1.0)) // 2
        if entry.get("mrope_section"):
            rest = [pairs // len(entry["mrope_section"])] * (len(entry["mrope_section"]) - 1)
            entry["mrope_section"] = [pairs - sum(rest), *rest]
        for name in ("short_factor", "long_factor"):
            if entry.get(name):
                entry[name] = entry[name][:pairs]


def build_tiny_model(
    config: PreTrainedConfig, seed: int = 0, dropout: float = 0.0, as_given: bool = False, keeps_layers: bool = False
) -> nn.Module:
    """Return the causal LM of the shrunk config in fp32 and train mode, with weights that let every gradient through.

    Raises:
        ValueError: the library has no causal language model for this type of config.
    """
    tiny = shrink_config(config, dropout, keeps_layers)
    for part in (tiny, *sub_configs(tiny)):
        part.dtype = torch.float32
    if as_given:  # an encoder stays one
        for name in ("is_decoder", "causal"):
            if name in vars(config):
                setattr(tiny, name, getattr(config, name))
    if type(tiny) in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(tiny)]
        matching = [part for part in sub_configs(tiny) if type(part) is model_class.config_class]
        build = partial(model_class, matching[0] if matching else tiny)
    elif "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):  # allowed when it was loaded
        build = partial(AutoModelForCausalLM.from_config, tiny, trust_remote_code=True, dtype=torch.float32)
    else:
        raise ValueError(f"transformers has no causal language model for {type(config).__name__}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build()
        randomize(model)
    return model.train()


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    """Redraw the weights from the current random state, so that no gate, bias or norm starts at zero or one.

    Matrices centred at zero get a standard deviation near 1 / sqrt(fan_in), structured ones (decay rates, norms) are
    perturbed. Routers get larger weights: a near tie would be decided differently by another order of sums.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or not parameter.is_floating_point():
            continue
        noise = torch.randn_like(parameter)
        if parameter.ndim < 2 or parameter.mean().abs() > parameter.std():
            parameter.add_(0.1 * noise)
        else:
            gain = 2.0 if re.search(r"router|gate\.(weight|wg)", name) else 0.6
            parameter.copy_(gain * noise / max(parameter.shape[1:]) ** 0.5)
    for name, buffer in model.named_buffers():  # which experts a token goes to, part of a checkpoint
        if name.endswith("tid2eid"):
            buffer.copy_(torch.rand(len(buffer), 2 * buffer.shape[1]).argsort(-1)[:, : buffer.shape[1]])
