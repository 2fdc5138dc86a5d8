"""The run's YAML, read and checked: Accelerate's keys through its plugin, our `hook_` keys from the file.

Hook keys live inside `fsdp_config`; `keys.py` lists them.
"""

import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import FullyShardedDataParallelPlugin, str_to_bool
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from .keys import HOOK_KEYS, WRAP_POLICIES, check_yaml, with_prefix
from .yaml_of_run import Launch, export_environment, find_launch, load_yaml

MIN_NUM_PARAMS = 10_000_000  # a start for irregular models: lower while memory is high, raise while communication is


@dataclass(frozen=True)
class HookConfig:
    """Everything the YAML decides, after launcher flags. Dtypes are bf16, fp16 or fp32; None means not asked for."""

    path: str
    found_by: str
    origins: dict[str, str]  # key -> YAML, launcher flag or default
    num_processes: int | None
    mixed_precision: str
    fsdp_auto_wrap_policy: str
    fsdp_transformer_layer_cls_to_wrap: tuple[str, ...]
    fsdp_min_num_params: int
    fsdp_reshard_after_forward: bool
    fsdp_offload_params: bool
    fsdp_activation_checkpointing: bool
    fsdp_activation_checkpointing_offload: bool
    fsdp_state_dict_type: str
    fsdp_cpu_ram_efficient_loading: bool = False
    hook_param_dtype: str = "fp32"
    hook_reduce_dtype: str = "fp32"
    hook_buffer_dtype: str | None = None
    hook_norm_dtype: str | None = None
    hook_wrap_blocks_per_unit: int = 1
    hook_wrap_embeddings: bool = False
    hook_checkpoint_every_n_blocks: int = 1
    hook_checkpoint_mode: str = "full"
    hook_offload_optimizer: bool = False
    hook_reduce_every_micro_batch: bool = True
    hook_prefetch_units: int = 1
    hook_wrap_function: str | None = None
    hook_checkpoint_function: str | None = None


def read_hook_config(accelerate_config: str | None) -> HookConfig:
    """Find, check and read the YAML of this run, and export Accelerate's environment where no launcher did.

    Raises:
        ValueError: every problem of the file at once, each with its key, what was found, what is allowed.
    """
    launch = find_launch(accelerate_config)
    raw = load_yaml(launch.path)
    version_flag = os.environ.get("FSDP_VERSION") if "fsdp_version" in launch.flags else None
    stop_on(check_yaml(raw, launch.path, version_flag), launch)
    num_processes = export_environment(launch)
    config = effective_config(raw, launch, num_processes)
    stop_on(check_combinations(config), launch)
    return config


def stop_on(problems: list[str], launch: Launch) -> None:
    """Raise ValueError with all problems of the file, one line each."""
    if problems:
        lines = problems if len(problems) == 1 else ["", *(f"- {problem}" for problem in problems)]
        raise ValueError(f"{launch.path} (found by {launch.found_by}): " + "\n".join(lines))


def effective_config(raw: dict[str, Any], launch: Launch, num_processes: int | None) -> HookConfig:
    """Combine the file's hook keys with the standard keys as Accelerate's plugin sees them, launcher flags included."""
    try:
        plugin = FullyShardedDataParallelPlugin()
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{launch.path}: accelerate refuses the FSDP keys: {error}") from error
    named = with_prefix(raw.get("fsdp_config") or {})
    policies = {transformer_auto_wrap_policy: WRAP_POLICIES[0], size_based_auto_wrap_policy: WRAP_POLICIES[1]}
    class_names = [name.strip() for name in plugin.transformer_cls_names_to_wrap or []]
    is_threshold_set = "fsdp_min_num_params" in launch.flags or named.get("fsdp_min_num_params") is not None
    mixed_precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    implied = {"no": "fp32"}.get(mixed_precision, mixed_precision)
    standard = {
        "mixed_precision": mixed_precision,
        "fsdp_auto_wrap_policy": policies.get(plugin.auto_wrap_policy, "NO_WRAP"),
        "fsdp_transformer_layer_cls_to_wrap": tuple(name for name in class_names if name),
        "fsdp_min_num_params": int(os.environ["FSDP_MIN_NUM_PARAMS"]) if is_threshold_set else MIN_NUM_PARAMS,
        "fsdp_reshard_after_forward": bool(plugin.reshard_after_forward),
        "fsdp_offload_params": str_to_bool(os.environ.get("FSDP_OFFLOAD_PARAMS", "false")) == 1,
        "fsdp_activation_checkpointing": plugin.activation_checkpointing,
        "fsdp_activation_checkpointing_offload": plugin.activation_checkpointing_offload,
        "fsdp_state_dict_type": plugin.state_dict_type.name,
        "fsdp_cpu_ram_efficient_loading": str(named.get("fsdp_cpu_ram_efficient_loading")).lower() == "true",
    }
    hooks = {"hook_param_dtype": implied, "hook_reduce_dtype": implied}
    hooks |= {key: value for key, value in named.items() if key in HOOK_KEYS}
    in_file = set(named) | set(raw)
    origins = {
        field.name: "launcher flag" if field.name in launch.flags else "YAML" if field.name in in_file else "default"
        for field in dataclasses.fields(HookConfig)[4:]
    }
    return HookConfig(launch.path, launch.found_by, origins, num_processes, **standard, **hooks)


def check_combinations(config: HookConfig) -> list[str]:
    """Return the combinations that cannot be right, each with the fix."""
    problems = []
    policy = config.fsdp_auto_wrap_policy
    needs_block_wrap = {
        "hook_wrap_blocks_per_unit: " + str(config.hook_wrap_blocks_per_unit): config.hook_wrap_blocks_per_unit > 1,
        "hook_wrap_embeddings: true": config.hook_wrap_embeddings,
    }
    for setting in (setting for setting, is_set in needs_block_wrap.items() if is_set):
        if config.hook_wrap_function:
            problems.append(f"{setting} and hook_wrap_function exclude each other: the function decides; remove one")
        elif policy != "TRANSFORMER_BASED_WRAP":
            fix = "set TRANSFORMER_BASED_WRAP or remove it"
            problems.append(f"{setting} has no meaning under fsdp_auto_wrap_policy: {policy}; {fix}")
    if config.fsdp_min_num_params < 1:
        problems.append(f"fsdp_min_num_params: found {config.fsdp_min_num_params}, allowed: a whole number >= 1")
    if config.mixed_precision not in ("no", "bf16", "fp16"):
        problems.append(f"mixed_precision: found {config.mixed_precision!r}, allowed: 'no', bf16 or fp16")
    for name in ("DP_REPLICATE_SIZE", "TP_SIZE", "CP_SIZE", "SP_SIZE"):
        found = os.environ.get(f"PARALLELISM_CONFIG_{name}", "1")
        if found != "1":
            problems.append(
                f"parallelism_config_{name.lower()}: found {found}; parameters are sharded over all ranks only"
            )
    uses_scaler = config.mixed_precision == "fp16"
    if uses_scaler != (config.hook_param_dtype == "fp16"):
        fix = "fp16 compute needs the loss scaler, and the scaler needs fp16: set both or neither"
        problems.append(f"mixed_precision: {config.mixed_precision} with param dtype {config.hook_param_dtype}; {fix}")
    if uses_scaler and config.fsdp_offload_params:
        problems.append("fp16 with fsdp_offload_params: the loss scaler works on the device; use bf16, or offload less")
    if config.hook_checkpoint_function and not config.fsdp_activation_checkpointing:
        problems.append("hook_checkpoint_function needs fsdp_activation_checkpointing: true")
    if config.hook_checkpoint_function and config.hook_checkpoint_every_n_blocks > 1:
        problems.append("hook_checkpoint_every_n_blocks and hook_checkpoint_function exclude each other; remove one")
    if config.hook_checkpoint_mode == "selective" and config.fsdp_activation_checkpointing_offload:
        problems.append("hook_checkpoint_mode: selective keeps outputs on the device; set offload false, or mode full")
    dynamo = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if dynamo != "no":
        problems.append(
            f"dynamo_backend {dynamo}: compiling the whole model would hide the units; remove dynamo_config"
        )
    if os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1") != "1":
        problems.append("gradient_accumulation_steps is an argument of the script, not of the launcher")
    return problems


def as_plain_dict(config: HookConfig) -> dict[str, Any]:
    """The effective value and origin of every key, for the wrap report and the comparison between ranks."""
    values = dataclasses.asdict(config)
    return {key: {"value": values[key], "origin": origin} for key, origin in config.origins.items()}


def notes(config: HookConfig, is_cpu: bool) -> list[str]:
    """Say which asked-for settings have no effect in this run, or a known price. Printed at the start."""
    found = []
    if config.fsdp_cpu_ram_efficient_loading:
        found.append("fsdp_cpu_ram_efficient_loading: no effect; each rank reads its own slices of the weights' files")
    if config.fsdp_state_dict_type == "FULL_STATE_DICT":
        found.append("fsdp_state_dict_type: FULL_STATE_DICT: no effect; checkpoints are sharded, exported models whole")
    if is_cpu and config.hook_offload_optimizer:
        found.append(
            "hook_offload_optimizer: the optimizer state is in host memory anyway on a CPU; it saves nothing here"
        )
    if is_cpu and config.fsdp_offload_params:
        found.append("fsdp_offload_params: parameters are in host memory anyway on a CPU; exact, saves nothing")
    if is_cpu and config.fsdp_activation_checkpointing_offload:
        found.append("fsdp_activation_checkpointing_offload: activations are in host memory anyway on a CPU; no effect")
    if config.hook_offload_optimizer and config.fsdp_offload_params:
        found.append("hook_offload_optimizer: fsdp_offload_params keeps the optimizer state on the host already")
    if not config.fsdp_activation_checkpointing:
        for key in ("hook_checkpoint_every_n_blocks", "hook_checkpoint_mode"):
            if config.origins[key] == "YAML":
                found.append(f"{key}: no effect while fsdp_activation_checkpointing is false")
    if config.hook_norm_dtype == config.hook_param_dtype:
        found.append("hook_norm_dtype: everything computes in fp32 already")
    if not config.hook_reduce_every_micro_batch and config.hook_reduce_dtype != "fp32":
        found.append(
            f"hook_reduce_every_micro_batch: false adds up micro-batches in {config.hook_reduce_dtype}; "
            "fp32 reduction costs less than it loses (32 micro-batches in bf16: gradient error 6.4e-3 against 1.6e-3)"
        )
    if config.hook_buffer_dtype in ("bf16", "fp16"):
        found.append(
            f"hook_buffer_dtype: {config.hook_buffer_dtype} rounds the rotary frequencies (off by up to 0.7 rad at "
            "position 4096 in bf16); leave the key out to keep them in fp32"
        )
    return found


def load_function(reference: str) -> Callable[..., Any]:
    """Import `file.py:name` or `module:name`, as named in the launching user's YAML.

    Raises:
        ValueError: the file, module or name does not exist, or is not a function.
    """
    source, _, name = reference.rpartition(":")
    expected = "Expected file.py:name or module:name of a function"
    if not source or not name:
        raise ValueError(f"hook function {reference!r}: names no function. {expected}.")
    try:
        if source.endswith(".py"):
            # A name of its own: a user's utils.py must not take the place of ours.
            spec = importlib.util.spec_from_file_location(f"user_hook_{Path(source).stem}", source)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
        function = getattr(module, name)
    except (ImportError, OSError, AttributeError) as error:
        raise ValueError(f"hook function {reference}: {error}. {expected}.") from error
    if not callable(function):
        raise ValueError(f"hook function {reference}: found {type(function).__name__}. {expected}.")
    return function
