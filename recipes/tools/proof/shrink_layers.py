"""Which layers of a config a tiny model keeps: two of every kind, and everything that is given per layer cut alike."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedConfig

from ..private_transformers import layer_overrides, with_overrides

LAYER_COUNT = (
    r"num_hidden_layers|n_layers?|num_layers|num_blocks|depth|(num_)?(en|de)coder_layers|conf_num_hidden_layers"
    r"|num_global_layers|num_layers_per_stack"
)
LAYER_BOUNDARY = r"(first_k_dense_replace|num_dense_layers|max_window_layers|.*layer_(index_)?(start|end)(_index)?)"
LAYER_SEGMENT = r"n_(input|recurrent|output)_layers"
LAYER_INDICES = r".*(_layers|layer_ids|_idxs|_indices|_indexes)"
LAYER_PERIOD = r".*_layer_period|decoder_sparse_step|moe_layer_interval"


def is_int(value: Any) -> bool:
    """True for an int that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


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
