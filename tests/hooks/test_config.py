"""Finding, checking and reading the Accelerate YAML: one clear error for every file that cannot be carried out."""

import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from accelerate.commands import launch as accelerate_launch
from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2
from hooks import config as hook_config
from hooks import yaml_of_run as launcher_config
from hooks.config import HookConfig, check_combinations, load_function, read_hook_config
from hooks.keys import FSDP1_KEYS, HOOK_KEYS, STANDARD_KEYS
from hooks.yaml_of_run import launcher_arguments

REPO = Path(__file__).parents[2]
SCENARIOS = sorted((REPO / "accelerate_configs").glob("*.yaml"))
FOREIGN = (REPO.parent / "shared" / "cases" / "yamls").resolve()  # a worktree may only have a link to it
VARIABLES = ("FSDP_", "ACCELERATE_", "RECIPES_")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No launcher's variables before a test, and what `read_hook_config` exports is gone after it."""
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith(VARIABLES)]:
            del os.environ[name]
        monkeypatch.setattr(launcher_config, "default_config_file", str(tmp_path / "no_default.yaml"))
        yield


def write(folder: Path, fsdp: dict[str, Any] | None = None, name: str = "fsdp2.yaml", **top_level: Any) -> str:
    """Write a small right YAML with these changes; a value of `...` leaves the key out."""
    inside = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **(fsdp or {})}
    content = {"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "bf16", **top_level}
    content.setdefault("fsdp_config", {key: value for key, value in inside.items() if value is not ...})
    path = folder / name
    path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not ...}))
    return str(path)


def error_of(path: str) -> str:
    with pytest.raises(ValueError) as caught:
        read_hook_config(path)
    return str(caught.value)


def exported_by_launcher(argv: list[str]) -> dict[str, str]:
    """The environment that the real `accelerate launch` gives its workers; only the start of them is replaced."""
    seen: dict[str, str] = {}

    def remember(_: Any) -> None:
        seen.update({key: value for key, value in os.environ.items() if key.startswith(VARIABLES)})

    arguments = accelerate_launch.launch_command_parser().parse_args(argv)
    with mock.patch("torch.distributed.run.run", remember), contextlib.suppress(SystemExit):
        accelerate_launch.launch_command(arguments)
    assert seen, argv
    return seen


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make this process look like a worker of `accelerate launch ARGV` started in a folder."""

    class Ancestor:
        def __init__(self, command: list[str], folder: str) -> None:
            self.command, self.folder = command, folder

        def cmdline(self) -> list[str]:
            return self.command

        def cwd(self) -> str:
            return self.folder

    class Worker:
        ancestors: list[Ancestor]

        def parents(self) -> list[Ancestor]:
            return self.ancestors

    def launch(argv: list[str], folder: str = "/") -> None:
        os.environ.update(exported_by_launcher(argv))
        command = ["/usr/bin/python3", "/opt/bin/accelerate", "launch", *argv]
        Worker.ancestors = [Ancestor(["bash", "job.sh"], "/"), Ancestor(command, folder), Ancestor(["init"], "/")]
        monkeypatch.setattr(launcher_config.psutil, "Process", Worker)

    return launch


# --- what a YAML may hold


@pytest.mark.parametrize(
    ("misspelt", "closest"),
    [
        ({"fsdp_reshard_after_foward": True}, "fsdp_reshard_after_forward"),
        ({"fsdp_activation_checkpoint": True}, "fsdp_activation_checkpointing"),
        ({"fsdp_transformer_layer_class_to_wrap": "A"}, "fsdp_transformer_layer_cls_to_wrap"),
        ({"hook_wrap_block_per_unit": 2}, "hook_wrap_blocks_per_unit"),
        ({"hook_checkpoint_every_n_block": 2}, "hook_checkpoint_every_n_blocks"),
        ({"ofload_params": True}, "fsdp_offload_params"),
    ],
)
def test_misspelt_key_in_fsdp_config_names_the_closest_known_one(
    tmp_path: Path, misspelt: dict[str, Any], closest: str
) -> None:
    message = error_of(write(tmp_path, misspelt))
    assert next(iter(misspelt)) in message
    assert f"did you mean {closest}?" in message


@pytest.mark.parametrize(("key", "closest"), [("mixed_precison", "mixed_precision"), ("num_proceses", "num_processes")])
def test_misspelt_top_level_key_names_the_closest_known_one(tmp_path: Path, key: str, closest: str) -> None:
    message = error_of(write(tmp_path, **{key: 2}))
    assert f"{key}: unknown key; did you mean {closest}?" in message


@pytest.mark.parametrize("key", ["hook_wrap_blocks_per_unit", "fsdp_reshard_after_forward", "fsdp_version"])
def test_nested_key_at_top_level_is_sent_into_fsdp_config(tmp_path: Path, key: str) -> None:
    message = error_of(write(tmp_path, **{key: 2}))
    line = next(line for line in message.splitlines() if key in line)
    assert "fsdp_config" in line, line
    assert "did you mean" not in line, line


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    wrong = {
        "hook_wrap_blocks_per_unit": 0,
        "hook_norm_dtype": "bf16",
        "hook_misspelt": 1,
        "fsdp_offload_params": "perhaps",
        "fsdp_sharding_strategy": "FULL_SHARD",
    }
    message = error_of(write(tmp_path, wrong, mixed_precision="fp8", num_proceses=2))
    for key in [*wrong, "mixed_precision", "num_proceses"]:
        assert key in message, message
    assert message.count("\n- ") == len(wrong) + 2, message


def test_all_impossible_combinations_are_reported_at_once(tmp_path: Path) -> None:
    keys = {
        "fsdp_auto_wrap_policy": "NO_WRAP",
        "hook_wrap_blocks_per_unit": 2,
        "hook_wrap_embeddings": True,
        "hook_param_dtype": "fp16",
    }
    message = error_of(write(tmp_path, keys))
    assert message.count("\n- ") == 3, message


@pytest.mark.parametrize("version", [1, ..., None])
def test_fsdp1_file_is_told_how_to_convert(tmp_path: Path, version: Any) -> None:
    path = write(tmp_path, {"fsdp_version": version})
    message = error_of(path)
    assert "fsdp_version: 2" in message
    assert "accelerate to-fsdp2 --config_file" in message


@pytest.mark.parametrize(
    ("top_level", "fragment"),
    [
        ({"distributed_type": "MULTI_GPU"}, "MULTI_GPU"),
        ({"distributed_type": "NO"}, "'NO'"),
        ({"distributed_type": ...}, "distributed_type: None"),
        ({"distributed_type": "DEEPSPEED"}, "DEEPSPEED"),
    ],
)
def test_yaml_of_another_distributed_type_is_refused(tmp_path: Path, top_level: dict[str, Any], fragment: str) -> None:
    message = error_of(write(tmp_path, **top_level))
    assert "not an FSDP YAML" in message
    assert fragment in message


def test_missing_file_is_named_with_who_named_it(tmp_path: Path) -> None:
    message = error_of(str(tmp_path / "nowhere.yaml"))
    assert "nowhere.yaml" in message
    assert "--accelerate_config" in message


def test_broken_yaml_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n fsdp_offload_params: [\n")
    message = error_of(str(path))
    assert str(path) in message
    assert "line 4" in message


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words\n", "3\n"])
def test_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.yaml"
    path.write_text(text)
    assert "key: value" in error_of(str(path))


def test_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00\x80")
    assert "binary.yaml" in error_of(str(path))


def test_other_config_with_broken_yaml_is_refused_clearly_under_the_launcher(tmp_path: Path, launched: Any) -> None:
    launched(["--config_file", write(tmp_path), "script.py"])
    broken = tmp_path / "broken.yaml"
    broken.write_text("fsdp_config: [\n")
    assert "broken.yaml" in error_of(str(broken))
    unknown = error_of(write(tmp_path, name="unknown.yaml", mixed_precison="bf16"))
    assert "did you mean mixed_precision?" in unknown


@pytest.mark.parametrize("key", sorted(FSDP1_KEYS))
def test_fsdp1_only_key_is_refused(tmp_path: Path, key: str) -> None:
    message = error_of(write(tmp_path, {key: True}))
    assert f"fsdp_config.{key}" in message
    assert "FSDP1" in message


def test_every_fsdp1_key_of_the_converter_is_known_to_be_one() -> None:
    removed = ["fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params"]
    file = {"fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD", **dict.fromkeys(removed, True)}}
    kept = set(convert_config_to_fsdp2(file)["fsdp_config"])
    assert {*removed, "fsdp_sharding_strategy"} - kept == FSDP1_KEYS


WRONG_VALUES = {
    "hook_wrap_blocks_per_unit": [0, -1, 1.5, True, "two", None],
    "hook_wrap_embeddings": [1, "yes", "true", None],
    "hook_checkpoint_every_n_blocks": [0, False, "2"],
    "hook_checkpoint_mode": ["partial", True, 1],
    "hook_param_dtype": ["bfloat16", "float32", 16, "BF16"],
    "hook_reduce_dtype": ["fp8", False, []],
    "hook_buffer_dtype": ["float", {}],
    "hook_norm_dtype": ["bf16", False],
    "hook_offload_optimizer": ["cpu", 0],
    "hook_reduce_every_micro_batch": ["no", 2],
    "hook_prefetch_units": [0, 1.0],
    "hook_wrap_function": ["my_wrap.py", 3, ["a:b"]],
    "hook_checkpoint_function": ["name", True],
    "fsdp_auto_wrap_policy": ["WRAP", True, 3],
    "fsdp_state_dict_type": ["LOCAL_STATE_DICT", 1],
    "fsdp_min_num_params": [0, -5, 1.5, "many", True],
    "fsdp_transformer_layer_cls_to_wrap": [["LlamaDecoderLayer"], 3],
    "fsdp_activation_checkpointing": ["sometimes", 2],
    "fsdp_activation_checkpointing_offload": ["cpu", 1],
    "fsdp_reshard_after_forward": ["FULL_SHARD", 8],
    "fsdp_offload_params": ["cpu", 1],
    "fsdp_cpu_ram_efficient_loading": ["cpu", 1],
}


def test_wrong_values_are_listed_for_every_key() -> None:
    assert set(WRONG_VALUES) == set(HOOK_KEYS) | set(STANDARD_KEYS)


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG_VALUES.items() for value in values])
def test_wrong_value_is_refused_with_what_was_found_and_what_is_allowed(tmp_path: Path, key: str, value: Any) -> None:
    message = error_of(write(tmp_path, {key: value}))
    assert f"fsdp_config.{key}: found {value!r}, allowed: " in message
    assert "\n" not in message, message


EMPTY = {"[]", "False", "None", "{}", "{'a': None}"}
READ = {  # what says nothing is as good as no such key; Accelerate reads no dynamo_config but an object's keys
    "mixed_precision": {"None"},
    "parallelism_config": EMPTY,
    "fsdp_config": set(),
    "dynamo_config": {*EMPTY, "['a']", "'word'", "3", "2.5", "True"},
}


@pytest.mark.parametrize("key", READ)
@pytest.mark.parametrize("value", [[], ["a"], "word", 3, 2.5, True, False, None, {}, {1: 2}, {"a": None}])
def test_any_value_of_a_top_level_key_is_read_or_refused_with_one_error(tmp_path: Path, key: str, value: Any) -> None:
    path = write(tmp_path, **{key: value})
    if repr(value) in READ[key]:
        found, without = read_hook_config(path), read_hook_config(write(tmp_path, name="without.yaml", **{key: ...}))
        assert found == dataclasses.replace(without, path=path, origins=found.origins)
    else:
        message = error_of(path)
        assert path in message and (key in message or "accelerate refuses this configuration" in message)


def test_unquoted_no_of_mixed_precision_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = Path(write(tmp_path))
    path.write_text(path.read_text().replace("mixed_precision: bf16", "mixed_precision: no"))
    assert yaml.safe_load(path.read_text())["mixed_precision"] is False
    assert "an unquoted no as false" in error_of(str(path))  # the launcher itself ends in an AttributeError here


def test_key_that_yaml_reads_as_a_boolean_is_an_unknown_key(tmp_path: Path) -> None:
    assert "unknown key" in error_of(write(tmp_path, {True: 1}))


@pytest.mark.parametrize(
    ("keys", "top_level", "fragments"),
    [
        ({"fsdp_auto_wrap_policy": "NO_WRAP", "hook_wrap_blocks_per_unit": 2}, {}, ["blocks_per_unit: 2", "NO_WRAP"]),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "hook_wrap_embeddings": True}, {}, ["hook_wrap_embeddings"]),
        ({"hook_wrap_function": "f.py:g", "hook_wrap_embeddings": True}, {}, ["exclude each other"]),
        ({"hook_wrap_function": "f.py:g", "hook_wrap_blocks_per_unit": 3}, {}, ["exclude each other"]),
        ({"hook_param_dtype": "fp16"}, {}, ["loss scaler", "mixed_precision: bf16"]),
        ({"hook_param_dtype": "bf16"}, {"mixed_precision": "fp16"}, ["loss scaler", "mixed_precision: fp16"]),
        ({"fsdp_offload_params": True}, {"mixed_precision": "fp16"}, ["fsdp_offload_params"]),
        ({"hook_checkpoint_function": "f.py:g"}, {}, ["fsdp_activation_checkpointing: true"]),
        (
            {
                "hook_checkpoint_function": "f.py:g",
                "hook_checkpoint_every_n_blocks": 2,
                "fsdp_activation_checkpointing": True,
            },
            {},
            ["hook_checkpoint_every_n_blocks and hook_checkpoint_function"],
        ),
        (
            {
                "hook_checkpoint_mode": "selective",
                "fsdp_activation_checkpointing": True,
                "fsdp_activation_checkpointing_offload": True,
            },
            {},
            ["selective"],
        ),
        ({}, {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, ["inductor", "dynamo_config"]),
        ({}, {"parallelism_config": {"parallelism_config_tp_size": 2}}, ["tp_size: found 2"]),
        ({}, {"parallelism_config": {"parallelism_config_cp_size": 2}}, ["cp_size: found 2"]),
        ({}, {"parallelism_config": {"parallelism_config_sp_size": 2}}, ["sp_size: found 2"]),
        ({}, {"parallelism_config": {"parallelism_config_dp_replicate_size": 4}}, ["dp_replicate_size: found 4"]),
        ({}, {"parallelism_config": {"tp_size": 2}}, ["tp_size: found 2"]),
    ],
)
def test_impossible_combination_is_refused(
    tmp_path: Path, keys: dict[str, Any], top_level: dict[str, Any], fragments: list[str]
) -> None:
    message = error_of(write(tmp_path, keys, **top_level))
    for fragment in fragments:
        assert fragment in message, message
    assert "\n" not in message, message


def test_accumulation_set_on_the_launcher_is_refused(tmp_path: Path) -> None:
    config = read_hook_config(write(tmp_path))
    assert check_combinations(config) == []
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = "4"
    assert "gradient_accumulation_steps" in "".join(check_combinations(config))


def test_parallelism_of_size_one_is_accepted(tmp_path: Path) -> None:
    sizes = {f"parallelism_config_{name}_size": 1 for name in ("tp", "cp", "dp_replicate", "dp_shard")}
    assert read_hook_config(write(tmp_path, parallelism_config=sizes)).num_processes is None
    assert os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] == "false"


@pytest.mark.parametrize("flag", [["--dynamo_backend", "inductor"], ["--mixed_precision", "fp8"]])
def test_launcher_flag_that_a_yaml_may_not_hold_is_refused_too(tmp_path: Path, launched: Any, flag: list[str]) -> None:
    path = write(tmp_path)
    with mock.patch("accelerate.utils.launch.is_fp8_available", return_value=True):
        launched([*flag, "--config_file", path, "script.py"])
        with pytest.raises(ValueError, match=flag[1]):
            read_hook_config(None)


def test_parallelism_asked_for_by_launcher_flags_is_refused_too(tmp_path: Path, launched: Any) -> None:
    path = write(tmp_path)
    launched(
        f"--config_file {path} --use_fsdp --fsdp_version 2 --use_parallelism_config "
        "--parallelism_config_tp_size 2 script.py".split()
    )
    with pytest.raises(ValueError, match="tp_size"):
        read_hook_config(None)


# --- what is read


def test_size_threshold_absent_is_our_default_and_present_is_the_value(tmp_path: Path) -> None:
    assert read_hook_config(write(tmp_path)).fsdp_min_num_params == 10_000_000
    sized = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}
    absent = read_hook_config(write(tmp_path, sized))
    assert (absent.fsdp_min_num_params, absent.origins["fsdp_min_num_params"]) == (10_000_000, "default")
    present = read_hook_config(write(tmp_path, {**sized, "fsdp_min_num_params": 1234}))
    assert (present.fsdp_min_num_params, present.origins["fsdp_min_num_params"]) == (1234, "YAML")
    assert present.fsdp_auto_wrap_policy == "SIZE_BASED_WRAP"


def test_size_policy_with_threshold_zero_is_refused_not_dropped(tmp_path: Path, launched: Any) -> None:
    sized = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}
    assert "fsdp_min_num_params: found 0" in error_of(write(tmp_path, {**sized, "fsdp_min_num_params": 0}))
    launched(["--config_file", write(tmp_path, sized), "--fsdp_min_num_params", "0", "script.py"])
    with pytest.raises(ValueError, match="fsdp_min_num_params: found 0"):
        read_hook_config(None)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("LlamaDecoderLayer, LlamaMLP", ("LlamaDecoderLayer", "LlamaMLP")),
        (" LlamaDecoderLayer ,LlamaMLP , ", ("LlamaDecoderLayer", "LlamaMLP")),
        ("LlamaDecoderLayer", ("LlamaDecoderLayer",)),
        (..., ()),
    ],
)
def test_second_layer_class_after_comma_and_blank_is_found(
    tmp_path: Path, names: Any, expected: tuple[str, ...]
) -> None:
    config = read_hook_config(write(tmp_path, {"fsdp_transformer_layer_cls_to_wrap": names}))
    assert config.fsdp_transformer_layer_cls_to_wrap == expected


def test_launcher_flags_override_the_yaml_and_origins_say_so(tmp_path: Path, launched: Any) -> None:
    path = write(tmp_path, {"fsdp_reshard_after_forward": True, "fsdp_offload_params": False})
    launched(
        f"--config_file {path} --num_processes 4 --mixed_precision no --fsdp_reshard_after_forward false "
        "--fsdp_min_num_params 77 --fsdp_transformer_layer_cls_to_wrap LlamaMLP script.py --learning_rate 1".split()
    )
    config = read_hook_config(None)
    assert config.found_by == "accelerate launch --config_file"
    assert config.num_processes == 4
    assert config.fsdp_reshard_after_forward is False
    assert config.fsdp_min_num_params == 77
    assert config.fsdp_transformer_layer_cls_to_wrap == ("LlamaMLP",)
    assert (config.mixed_precision, config.hook_param_dtype) == ("no", "fp32")
    by_flag = {key for key, origin in config.origins.items() if origin == "launcher flag"}
    assert by_flag == {
        "mixed_precision",
        "fsdp_reshard_after_forward",
        "fsdp_min_num_params",
        "fsdp_transformer_layer_cls_to_wrap",
    }
    assert config.origins["fsdp_offload_params"] == "YAML"
    assert config.origins["fsdp_state_dict_type"] == "default"


def test_launcher_flag_fsdp_version_wins_over_the_file(tmp_path: Path, launched: Any) -> None:
    path = write(tmp_path, {"fsdp_version": 1})
    launched(["--config_file", path, "--fsdp_version", "2", "script.py"])
    assert read_hook_config(None).fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
    launched(["--config_file", write(tmp_path), "--fsdp_version", "1", "script.py"])
    with pytest.raises(ValueError, match="to-fsdp2"):
        read_hook_config(None)


def test_keys_of_the_launchers_file_do_not_leak_into_another_accelerate_config(tmp_path: Path, launched: Any) -> None:
    keys = {
        "fsdp_transformer_layer_cls_to_wrap": "GPT2Block",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_activation_checkpointing": True,
    }
    other = write(tmp_path, {"fsdp_auto_wrap_policy": ...}, name="other.yaml")
    alone = read_hook_config(other)
    launched(["--config_file", write(tmp_path, keys), "script.py"])
    both = read_hook_config(other)
    differing = [
        field.name
        for field in dataclasses.fields(HookConfig)
        if field.name.startswith(("fsdp_", "hook_")) and getattr(alone, field.name) != getattr(both, field.name)
    ]
    assert differing == []


@pytest.mark.parametrize(("mixed_precision", "implied"), [("bf16", "bf16"), ("fp16", "fp16"), ("no", "fp32")])
def test_mixed_precision_implies_param_and_reduce_dtype(tmp_path: Path, mixed_precision: str, implied: str) -> None:
    config = read_hook_config(write(tmp_path, mixed_precision=mixed_precision))
    assert (config.hook_param_dtype, config.hook_reduce_dtype) == (implied, implied)
    assert (config.hook_buffer_dtype, config.hook_norm_dtype) == (None, None)


def test_hook_dtype_overrides_what_mixed_precision_implies(tmp_path: Path) -> None:
    config = read_hook_config(write(tmp_path, {"hook_reduce_dtype": "fp32"}))
    assert (config.hook_param_dtype, config.hook_reduce_dtype) == ("bf16", "fp32")
    assert (config.origins["hook_param_dtype"], config.origins["hook_reduce_dtype"]) == ("default", "YAML")
    config = read_hook_config(write(tmp_path, {"hook_param_dtype": "fp32"}))
    assert (config.hook_param_dtype, config.hook_reduce_dtype) == ("fp32", "bf16")


def test_keys_without_prefix_are_understood_as_accelerate_does(tmp_path: Path) -> None:
    short = {
        "version": 2,
        "fsdp_version": ...,
        "auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp_auto_wrap_policy": ...,
        "min_num_params": 500,
        "offload_params": True,
        "reshard_after_forward": False,
        "state_dict_type": "FULL_STATE_DICT",
        "hook_prefetch_units": 2,
    }
    config = read_hook_config(write(tmp_path, short))
    assert config.fsdp_offload_params is True
    assert config.fsdp_reshard_after_forward is False
    assert (config.fsdp_auto_wrap_policy, config.fsdp_min_num_params) == ("SIZE_BASED_WRAP", 500)
    assert config.fsdp_state_dict_type == "FULL_STATE_DICT"
    assert config.hook_prefetch_units == 2
    assert config.origins["fsdp_offload_params"] == "YAML"


def test_every_hook_key_is_read(tmp_path: Path) -> None:
    values = {
        "hook_param_dtype": "bf16",
        "hook_reduce_dtype": "fp32",
        "hook_buffer_dtype": "fp32",
        "hook_norm_dtype": "fp32",
        "hook_wrap_blocks_per_unit": 3,
        "hook_wrap_embeddings": True,
        "hook_checkpoint_every_n_blocks": 4,
        "hook_checkpoint_mode": "selective",
        "hook_offload_optimizer": True,
        "hook_reduce_every_micro_batch": False,
        "hook_prefetch_units": 5,
    }
    functions = {"hook_wrap_function": "a.py:f", "hook_checkpoint_function": "b.py:g"}
    assert set(values) | set(functions) == set(HOOK_KEYS)
    config = read_hook_config(write(tmp_path, values))
    assert {key: getattr(config, key) for key in values} == values
    config = read_hook_config(write(tmp_path, {**functions, "fsdp_activation_checkpointing": True}))
    assert {key: getattr(config, key) for key in functions} == functions
    assert {config.origins[key] for key in functions} == {"YAML"}


def test_plain_dict_holds_value_and_origin_of_every_key(tmp_path: Path) -> None:
    plain = hook_config.as_plain_dict(read_hook_config(write(tmp_path, {"hook_prefetch_units": 2})))
    assert plain["hook_prefetch_units"] == {"value": 2, "origin": "YAML"}
    assert set(HOOK_KEYS) | set(STANDARD_KEYS) | {"mixed_precision"} == set(plain)


@pytest.mark.parametrize(
    ("keys", "is_cpu", "fragment"),
    [
        ({"hook_offload_optimizer": True}, True, "hook_offload_optimizer"),
        ({"fsdp_offload_params": True}, True, "fsdp_offload_params"),
        ({"hook_offload_optimizer": True, "fsdp_offload_params": True}, False, "hook_offload_optimizer"),
        ({"hook_checkpoint_every_n_blocks": 2}, False, "no effect while fsdp_activation_checkpointing"),
        ({"hook_norm_dtype": "fp32", "hook_param_dtype": "fp32"}, False, "hook_norm_dtype"),
        ({"hook_reduce_every_micro_batch": False}, False, "adds up micro-batches in bf16"),
        ({"hook_buffer_dtype": "bf16"}, False, "rotary"),
    ],
)
def test_setting_without_effect_or_with_a_price_is_noted(
    tmp_path: Path, keys: dict[str, Any], is_cpu: bool, fragment: str
) -> None:
    assert hook_config.notes(read_hook_config(write(tmp_path)), is_cpu) == []
    noted = hook_config.notes(read_hook_config(write(tmp_path, keys)), is_cpu)
    assert [fragment in line for line in noted] == [True], noted


# --- where the YAML is found


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["accelerate", "launch", "--config_file", "a.yaml", "s.py"], ["--config_file", "a.yaml", "s.py"]),
        (["/usr/bin/python", "/opt/env/bin/accelerate", "launch", "s.py"], ["s.py"]),
        (["accelerate-launch", "--num_processes", "2", "s.py"], ["--num_processes", "2", "s.py"]),
        (["/usr/bin/python3.11", "/opt/bin/accelerate-launch", "s.py"], ["s.py"]),
        (["python", "-m", "accelerate.commands.launch", "s.py", "--x"], ["s.py", "--x"]),
        (["/usr/bin/python3", "-u", "-m", "accelerate.commands.launch", "s.py"], ["s.py"]),
        (["python", "-m", "accelerate.commands.accelerate_cli", "launch", "s.py"], ["s.py"]),
        (["python", "-X", "dev", "-m", "accelerate.commands.launch", "s.py"], ["s.py"]),
        (["python", "-W", "ignore", "/opt/bin/accelerate", "launch", "s.py"], ["s.py"]),
        (["python", "train.py", "accelerate", "launch"], None),
        (["bash", "-c", "accelerate launch s.py"], None),
        (["accelerate", "config"], None),
        (["python", "-m", "accelerate.commands.accelerate_cli", "config"], None),
        (["python", "-m", "torch.distributed.run", "s.py"], None),
        (["torchrun", "s.py"], None),
        (["vim", "accelerate"], None),
        ([], None),
    ],
)
def test_launchers_command_line_is_recognised_in_every_form(command: list[str], expected: list[str] | None) -> None:
    assert launcher_arguments(command) == expected


def test_config_file_of_the_script_is_not_taken_for_the_launchers(tmp_path: Path, launched: Any) -> None:
    path = write(tmp_path)
    launched(["--config_file", path, "script.py", "--config_file", "script.yaml"])
    assert read_hook_config(None).path == path
    Path(tmp_path, "default.yaml").write_text(Path(path).read_text())
    with mock.patch("accelerate.commands.launch.default_config_file", str(tmp_path / "default.yaml")):
        with mock.patch("accelerate.commands.config.config_args.default_config_file", str(tmp_path / "default.yaml")):
            launched(["script.py", "--config_file", "script.yaml"])
        with pytest.raises(ValueError, match="no Accelerate YAML was found"):
            read_hook_config(None)


def test_relative_path_is_resolved_against_the_launchers_folder(tmp_path: Path, launched: Any) -> None:
    path = write(tmp_path)
    launched(["--config_file", path, "script.py"], str(tmp_path))
    with mock.patch.object(
        launcher_config, "find_launcher", lambda: (["--config_file", "fsdp2.yaml", "s.py"], tmp_path)
    ):
        assert read_hook_config(None).path == path


def test_search_order_is_argument_then_launcher_then_variable_then_default_file(
    tmp_path: Path, launched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    argument, flag, variable, default = (
        write(tmp_path, name=f"{name}.yaml") for name in ("argument", "flag", "variable", "default")
    )
    monkeypatch.setattr(launcher_config, "default_config_file", default)
    os.environ["RECIPES_ACCELERATE_CONFIG"] = variable
    launched(["--config_file", flag, "script.py"])

    def found(accelerate_config: str | None = None) -> tuple[str, str]:
        config = read_hook_config(accelerate_config)
        return config.path, config.found_by

    assert found(argument) == (argument, "--accelerate_config")
    assert found() == (flag, "accelerate launch --config_file")
    with mock.patch.object(launcher_config, "find_launcher", lambda: (["script.py"], "/")):
        assert found() == (variable, "RECIPES_ACCELERATE_CONFIG")
        del os.environ["RECIPES_ACCELERATE_CONFIG"]
        assert found() == (default, "accelerate's default file")
    with (
        mock.patch.object(launcher_config, "find_launcher", lambda: None),
        pytest.raises(ValueError, match="no Accelerate YAML was found"),
    ):
        found()


def test_run_without_any_yaml_is_told_the_two_right_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError) as caught:
        read_hook_config(None)
    message = str(caught.value)
    assert "accelerate launch --config_file accelerate_configs/default.yaml recipes/finetune.py" in message
    assert "torchrun --nproc_per_node=2 recipes/finetune.py --accelerate_config" in message
    assert "RECIPES_ACCELERATE_CONFIG" in message


def test_plain_python_does_not_search_the_process_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_config.psutil, "Process", lambda: pytest.fail("searched without a launcher"))
    assert launcher_config.find_launcher() is None


# --- the environment that is exported

EXPORT_CASES = [
    ([], {}),
    ([], {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "fsdp_state_dict_type": "SHARDED_STATE_DICT"}),
    ([], {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 5000, "offload_params": True}),
    (["--fsdp_reshard_after_forward", "false", "--mixed_precision", "no"], {"fsdp_activation_checkpointing": True}),
]


@pytest.mark.parametrize(("flags", "keys"), EXPORT_CASES)
def test_exported_environment_is_what_accelerate_launch_exports(
    tmp_path: Path, launched: Any, flags: list[str], keys: dict[str, Any]
) -> None:
    path = write(tmp_path, keys)
    expected = exported_by_launcher([*flags, "--config_file", path, "script.py"])
    if flags:
        launched([*flags, "--config_file", path, "script.py"])
        read_hook_config(None)
    else:  # torchrun or plain python
        assert not [name for name in os.environ if name.startswith(VARIABLES)]
        read_hook_config(path)
    exported = {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}
    switched_off = {"FSDP_CPU_RAM_EFFICIENT_LOADING", "ACCELERATE_USE_PARALLELISM_CONFIG"}
    assert {exported.pop(name, "false") for name in switched_off} == {"false"}
    exported = {name: value for name, value in exported.items() if "PARALLELISM_CONFIG" not in name}
    expected = {
        name: value for name, value in expected.items() if "PARALLELISM_CONFIG" not in name and name not in switched_off
    }
    assert exported == expected


# --- our own files and those of others


def test_scenario_yamls_read_without_problem_or_needless_key() -> None:
    assert [path.stem for path in SCENARIOS] == ["default", "mem_limit", "performance"]
    for path in SCENARIOS:
        config = read_hook_config(str(path))
        assert yaml.safe_load(path.read_text())["num_processes"] == 2
        assert hook_config.notes(config, is_cpu=False) == []


def key_lines(path: Path) -> list[str]:
    """Keys in the order of the file; a commented-out optional key counts."""
    found = [re.match(r" *(?:# )?((?:hook_|fsdp_)?[a-z0-9_]+):(?: |$)", line) for line in path.read_text().splitlines()]
    known = set(HOOK_KEYS) | set(STANDARD_KEYS) | set(yaml.safe_load(path.read_text())) | {"fsdp_version"}
    return [match[1] for match in found if match and match[1] in known]


def test_scenario_yamls_have_the_same_keys_in_the_same_order() -> None:
    orders = [key_lines(path) for path in SCENARIOS]
    assert len(orders) == 3
    assert orders[0] == orders[1] == orders[2]
    assert "hook_norm_dtype" in orders[0]
    assert len(orders[0]) == len(set(orders[0]))


def test_scenario_yamls_have_a_comment_above_each_chosen_key() -> None:
    for path in SCENARIOS:
        chosen, boilerplate = path.read_text().split("# Accelerate's own keys.\n")
        assert "#" not in boilerplate
        lines = chosen.splitlines()
        first = lines.index("distributed_type: FSDP")
        keys = [i for i in range(first + 1, len(lines)) if not lines[i].strip().startswith("#")]
        assert len(keys) > 15
        for i in keys:
            if lines[i].strip() not in ("fsdp_config:", "fsdp_version: 2"):
                assert lines[i - 1].strip().startswith("# "), f"{path.name}: {lines[i]}"


def test_only_values_not_boilerplate_differ_between_scenario_yamls() -> None:
    ends = {path.read_text().split("# Accelerate's own keys.\n")[1] for path in SCENARIOS}
    assert len(ends) == 1


FSDP1 = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 2
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
"""
TRAINERS = {  # the YAML of other tools, where ours is expected
    "axolotl": "base_model: m\ndatasets: []\nfsdp_version: 2\nfsdp_config:\n  offload_params: false\n",
    "llamafactory": "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\nper_device_train_batch_size: 1\n",
    "deepspeed": "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\nnum_processes: 2\n",
    "one gpu": "distributed_type: 'NO'\nmixed_precision: bf16\nnum_processes: 1\n",
}


def test_fsdp1_yaml_of_accelerate_reads_once_its_advice_is_followed(tmp_path: Path) -> None:
    old = tmp_path / "fsdp1.yaml"
    old.write_text(FSDP1)
    assert f"accelerate to-fsdp2 --config_file {old}" in error_of(str(old))
    new = tmp_path / "fsdp2.yaml"
    new.write_text(yaml.safe_dump(convert_config_to_fsdp2(yaml.safe_load(FSDP1))))
    config = read_hook_config(str(new))
    assert (config.fsdp_auto_wrap_policy, config.fsdp_reshard_after_forward) == ("TRANSFORMER_BASED_WRAP", True)
    assert config.fsdp_cpu_ram_efficient_loading is True and config.fsdp_state_dict_type == "SHARDED_STATE_DICT"


@pytest.mark.parametrize("tool", TRAINERS)
def test_yaml_of_another_tool_is_told_from_an_fsdp_yaml(tmp_path: Path, tool: str) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(TRAINERS[tool])
    found = yaml.safe_load(TRAINERS[tool]).get("distributed_type")
    message = error_of(str(path))
    assert str(path) in message and f"not an FSDP YAML: found distributed_type: {found!r}" in message
    assert "accelerate_configs/default.yaml" in message


# file -> what its error must say, or how many keys of ours it has: it reads
FOREIGN_FILES = {
    "config_01.yaml": "not an FSDP YAML",
    "config_02.yaml": "accelerate to-fsdp2",
    "config_03.yaml": 5,
    "config_04.yaml": "accelerate to-fsdp2",
    "config_05.yaml": "accelerate to-fsdp2",
    "config_06.yaml": "cp_size: found 2",
    "config_07.yaml": "accelerate to-fsdp2",
    "config_08.yaml": "tp_size: found 2",
    "config_09.yaml": 0,
    "config_10.yaml": "not an FSDP YAML: found distributed_type: 'NO'",
    "config_11.yaml": "no fsdp_version",
    "config_12.yaml": 6,
    "config_13.json": "accelerate to-fsdp2",
}


def test_foreign_files_are_all_in_the_table() -> None:
    if not FOREIGN.is_dir():
        pytest.skip(f"{FOREIGN} is not part of a clone")
    files = sorted(path.name for path in FOREIGN.glob("config_*"))
    assert len(files) == 13
    assert files == sorted(FOREIGN_FILES)


@pytest.mark.parametrize("name", FOREIGN_FILES)
def test_foreign_file_reads_or_is_refused_with_one_clear_error(name: str) -> None:
    path = FOREIGN / name
    if not path.is_file():
        pytest.skip(f"{path} is not part of a clone")
    fragment = FOREIGN_FILES[name]
    if isinstance(fragment, int):
        config = read_hook_config(str(path))
        raw = yaml.safe_load(path.read_text())["fsdp_config"]
        keys = set(raw) & set(STANDARD_KEYS) - {"fsdp_transformer_layer_cls_to_wrap"}
        assert len(keys) == fragment and {key: getattr(config, key) for key in keys} == {key: raw[key] for key in keys}
    else:
        message = error_of(str(path))
        assert str(path) in message
        assert fragment in message


CONVERTIBLE = {"config_04.yaml", "config_05.yaml", "config_07.yaml", "config_13.json"}


@pytest.mark.parametrize("name", sorted(CONVERTIBLE))
def test_following_the_advice_to_convert_makes_the_foreign_file_read(tmp_path: Path, name: str) -> None:
    path = FOREIGN / name
    if not path.is_file():
        pytest.skip(f"{path} is not part of a clone")
    advice = error_of(str(path))
    converted = convert_config_to_fsdp2(yaml.safe_load(path.read_text()))
    output = tmp_path / "fsdp2.yaml"
    output.write_text(yaml.safe_dump(converted))
    try:
        read_hook_config(str(output))
    except ValueError as error:
        pytest.fail(f"the advice was: {advice}\nafter it: {error}")


# --- the user's own functions


def test_function_is_loaded_from_a_file_and_from_a_module(tmp_path: Path) -> None:
    (tmp_path / "my_hook.py").write_text("def pick(index, name, block):\n    return index == 7\n")
    assert load_function(f"{tmp_path}/my_hook.py:pick")(7, "", None) is True
    assert load_function("os.path:basename") is os.path.basename


@pytest.mark.parametrize(
    ("reference", "fragment"),
    [
        ("/nowhere/my_hook.py:pick", "/nowhere/my_hook.py"),
        ("no_such_module_here:pick", "no_such_module_here"),
        ("os.path:no_such_name", "no_such_name"),
        ("no_colon", "no_colon"),
        (":pick", ":pick"),
        ("os.path:", "os.path:"),
        ("os.path:sep", "os.path:sep"),
    ],
)
def test_function_that_cannot_be_loaded_is_named(reference: str, fragment: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_function(reference)
    assert fragment in str(caught.value)
    assert "Expected file.py:name or module:name" in str(caught.value)


def test_syntax_error_in_a_users_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken_hook.py").write_text("def pick(:\n")
    with pytest.raises((ValueError, SyntaxError), match=r"broken_hook\.py"):
        load_function(f"{tmp_path}/broken_hook.py:pick")


def test_users_file_does_not_replace_an_imported_module_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("def pick(index, name, block):\n    return True\n")
    with mock.patch.dict(sys.modules):
        load_function(f"{tmp_path}/json.py:pick")
        assert sys.modules["json"] is json
