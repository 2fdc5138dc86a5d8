"""The keys of a scenario YAML: names, types, allowed values, and the check of a file against them.

Accelerate drops every key of `fsdp_config` it does not know without a word; here such a key is an error.
"""

import dataclasses
import difflib
from pathlib import Path
from typing import Any

from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser

DTYPE_NAMES = ("bf16", "fp16", "fp32")
WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
STATE_DICT_TYPES = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
FSDP1_KEYS = {"fsdp_sharding_strategy", "fsdp_backward_prefetch", "fsdp_forward_prefetch"}
FSDP1_KEYS |= {"fsdp_use_orig_params", "fsdp_sync_module_states"}
UNSUPPORTED_KEYS = {"fsdp_ignored_modules": "ignored parameters are neither sharded nor averaged over the ranks"}

# key -> (kind of value, what is allowed, in words)
HOOK_KEYS: dict[str, tuple[Any, str]] = {
    "hook_wrap_blocks_per_unit": (int, "a whole number >= 1"),
    "hook_wrap_embeddings": (bool, "true or false"),
    "hook_checkpoint_every_n_blocks": (int, "a whole number >= 1"),
    "hook_checkpoint_mode": (("full", "selective"), "full or selective"),
    "hook_param_dtype": (DTYPE_NAMES, "bf16, fp16 or fp32"),
    "hook_reduce_dtype": (DTYPE_NAMES, "bf16, fp16 or fp32"),
    "hook_buffer_dtype": (DTYPE_NAMES, "bf16, fp16 or fp32"),
    "hook_norm_dtype": (("fp32",), "fp32 (or leave the key out)"),
    "hook_offload_optimizer": (bool, "true or false"),
    "hook_reduce_every_micro_batch": (bool, "true or false"),
    "hook_prefetch_units": (int, "a whole number >= 1"),
    "hook_wrap_function": (str, "file.py:name or module:name"),
    "hook_checkpoint_function": (str, "file.py:name or module:name"),
}
STANDARD_KEYS: dict[str, tuple[Any, str]] = {
    "fsdp_auto_wrap_policy": (WRAP_POLICIES, ", ".join(WRAP_POLICIES)),
    "fsdp_state_dict_type": (STATE_DICT_TYPES, " or ".join(STATE_DICT_TYPES)),
    "fsdp_min_num_params": (int, "a whole number >= 1"),
    "fsdp_transformer_layer_cls_to_wrap": (str, "class names, separated by commas"),
    "fsdp_activation_checkpointing": (bool, "true or false"),
    "fsdp_activation_checkpointing_offload": (bool, "true or false"),
    "fsdp_reshard_after_forward": (bool, "true (~ ZeRO-3) or false (~ ZeRO-2)"),
    "fsdp_cpu_ram_efficient_loading": (bool, "true or false"),
    "fsdp_offload_params": (bool, "true or false"),
}


def with_prefix(fsdp_config: dict[str, Any]) -> dict[str, Any]:
    """Keys as Accelerate reads them: `offload_params` inside fsdp_config means `fsdp_offload_params`."""
    names = {key: str(key) for key in fsdp_config}
    return {n if n.startswith(("fsdp_", "hook_")) else f"fsdp_{n}": fsdp_config[key] for key, n in names.items()}


def known_standard_keys() -> set[str]:
    """The fsdp_ keys that the installed Accelerate's launcher takes."""
    names = vars(launch_command_parser().parse_args(["script.py"]))
    return {name for name in names if name.startswith("fsdp_")} | set(UNSUPPORTED_KEYS)


def check_value(key: str, value: Any, kind: Any, allowed: str) -> str | None:
    """Return one sentence on what is wrong with `key: value`, None if nothing is."""
    if kind is bool:
        is_right = isinstance(value, bool) or (key.startswith("fsdp_") and str(value).lower() in ("true", "false"))
    elif kind is int:
        is_right = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    elif kind is str:
        is_right = isinstance(value, str) and (not key.endswith("_function") or ":" in value)
    else:
        is_right = value in kind or (key.startswith("fsdp_") and str(value).upper() in kind)
    return None if is_right else f"fsdp_config.{key}: found {value!r}, allowed: {allowed}"


def check_yaml(raw: dict[str, Any], path: str, version_flag: str | None = None) -> list[str]:
    """Return every problem of the file. `version_flag` is a launcher's --fsdp_version, which wins over the file."""
    problems = []
    top_level = {field.name for field in dataclasses.fields(ClusterConfig)} | {"fp16", "dynamo_backend"}
    problems += [unknown_key(key, top_level, "") for key in raw if key not in top_level]
    if raw.get("distributed_type") != "FSDP":
        found = f"distributed_type: {raw.get('distributed_type')!r}"
        fix = "these scripts need distributed_type: FSDP (start from accelerate_configs/default.yaml)"
        return [f"not an FSDP YAML: found {found}; {fix}", *problems]
    fsdp = raw.get("fsdp_config") or {}
    if not isinstance(fsdp, dict):
        return [*problems, f"fsdp_config: found {fsdp!r}, expected `key: value` lines below it"]
    named = with_prefix(fsdp)
    version = version_flag or named.get("fsdp_version")
    if str(version) != "2":
        found = f"fsdp_version: {version}" if version is not None else "no fsdp_version (Accelerate then takes 1)"
        fix = f"accelerate to-fsdp2 --config_file {path} --output_file {Path(path).with_suffix('')}_fsdp2.yaml"
        if not fsdp:
            return [*problems, f"fsdp_config: found {found}; add `fsdp_config:` with `fsdp_version: 2` below it"]
        return [f"fsdp_config: found {found}; only FSDP2 (fsdp_version: 2) is supported. Convert it: {fix}", *problems]
    standard = known_standard_keys()
    for key, value in named.items():
        kind_and_words = HOOK_KEYS.get(key) or STANDARD_KEYS.get(key)
        if key in FSDP1_KEYS:
            problems.append(f"fsdp_config.{key}: belongs to FSDP1 and does nothing in FSDP2; remove it")
        elif key in UNSUPPORTED_KEYS:
            problems.append(f"fsdp_config.{key}: not supported ({UNSUPPORTED_KEYS[key]}); remove it")
        elif key not in standard and key not in HOOK_KEYS:
            problems.append(unknown_key(key, standard | set(HOOK_KEYS), "fsdp_config."))
        elif kind_and_words and (value is not None or key in HOOK_KEYS):
            problems.append(check_value(key, value, *kind_and_words))
    problems += check_top_level(raw)
    return [problem for problem in problems if problem]


def unknown_key(key: Any, known: set[str], prefix: str) -> str:
    """Say that a key is unknown, with the closest known name."""
    if not prefix and str(key).startswith(("fsdp_", "hook_")):
        return f"{key}: belongs inside fsdp_config; indent it below that key"
    close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
    return f"{prefix}{key}: unknown key" + (f"; did you mean {close[0]}?" if close else "; remove it")


def check_top_level(raw: dict[str, Any]) -> list[str]:
    """Problems of the keys outside fsdp_config that would change what is trained."""
    problems = []
    if raw.get("mixed_precision") not in (None, "no", "bf16", "fp16"):
        quoted = " (YAML reads an unquoted no as false)" if raw["mixed_precision"] is False else ""
        problems.append(f"mixed_precision: found {raw['mixed_precision']!r}{quoted}, allowed: 'no', bf16 or fp16")
    if raw.get("use_cpu") is True:
        problems.append("use_cpu: found True; the CPU is used where there is no GPU, and only there; set false")
    parallelism = raw.get("parallelism_config") or {}
    if not isinstance(parallelism, dict):
        return [*problems, f"parallelism_config: found {parallelism!r}, expected `key: value` lines below it"]
    for key, value in parallelism.items():
        if str(key).endswith("_size") and not key.endswith("dp_shard_size") and value != 1:
            problems.append(
                f"parallelism_config.{key}: found {value}; parameters are sharded over all ranks only, set 1"
            )
    return problems
