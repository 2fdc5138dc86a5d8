"""Find the Accelerate YAML of this run, and give the process the environment that `accelerate launch` would give it.

Accelerate exports its own keys to the worker, but neither the file's path nor the `hook_` keys in it.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import prepare_multi_gpu_env

from .private_accelerate import given_flags, with_yaml

CONFIG_VARIABLE = "RECIPES_ACCELERATE_CONFIG"
COMMANDS = (
    "  accelerate launch --config_file accelerate_configs/default.yaml recipes/finetune.py\n"
    "  torchrun --nproc_per_node=2 recipes/finetune.py --accelerate_config accelerate_configs/default.yaml"
)


@dataclass(frozen=True)
class Launch:
    """Which YAML this run uses, who named it, and the launcher's arguments (None outside `accelerate launch`)."""

    path: str
    found_by: str
    launcher_argv: list[str] | None
    flags: frozenset[str]  # standard keys given on the launcher's command line: they override the YAML


def launcher_arguments(command: list[str]) -> list[str] | None:
    """Return what follows `accelerate launch` in a process's command line, None if it is another program."""
    words = list(command)
    while words:
        word = words.pop(0)
        name, follows = os.path.basename(word), words[:1]
        if name in ("accelerate", "accelerate.exe"):
            return words[1:] if follows == ["launch"] else None
        if name in ("accelerate-launch", "accelerate-launch.exe"):
            return words
        if word == "-m":
            is_subcommand = follows == ["accelerate.commands.accelerate_cli"] and words[1:2] == ["launch"]
            return words[2:] if is_subcommand else words[1:] if follows == ["accelerate.commands.launch"] else None
        if word in ("-X", "-W"):  # interpreter options with a value
            words = words[1:]
        elif not word.startswith("-") and not name.startswith("python"):
            return None
    return None


def find_launcher() -> tuple[list[str], str] | None:
    """Return (arguments, working directory) of the nearest ancestor that is `accelerate launch`."""
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:  # every form of the launcher exports it
        return None
    for process in psutil.Process().parents():
        try:
            arguments = launcher_arguments(process.cmdline())
            if arguments is not None:
                return arguments, process.cwd()
        except psutil.Error:
            continue
    return None


def find_launch(accelerate_config: str | None) -> Launch:
    """Find the YAML: script argument, launcher's command line, environment variable, Accelerate's default file.

    Raises:
        ValueError: no YAML is named anywhere, or the named file does not exist.
    """
    launcher = find_launcher()
    argv, cwd = launcher or (None, os.getcwd())
    arguments = launch_command_parser().parse_args(argv) if argv is not None else None
    if accelerate_config is not None:
        path, found_by = accelerate_config, "--accelerate_config"
    elif arguments is not None and arguments.config_file is not None:
        path, found_by = os.path.join(cwd, arguments.config_file), "accelerate launch --config_file"
    elif os.environ.get(CONFIG_VARIABLE):
        path, found_by = os.environ[CONFIG_VARIABLE], CONFIG_VARIABLE
    elif arguments is not None and os.path.isfile(default_config_file):
        path, found_by = default_config_file, "accelerate's default file"
    else:
        cause = "FSDP is on, but" if os.environ.get("ACCELERATE_USE_FSDP") == "true" else "This run is not configured:"
        raise ValueError(
            f"{cause} no Accelerate YAML was found. Name it in one of these ways (a scheduler that hides the launcher "
            f"can set {CONFIG_VARIABLE}=PATH):\n{COMMANDS}"
        )
    if not os.path.isfile(path):
        raise ValueError(f"No such file: {path} (named by {found_by}). Give the path of an Accelerate FSDP2 YAML.")
    return Launch(str(Path(path).resolve()), found_by, argv, given_flags(arguments))


def load_yaml(path: str) -> dict[str, Any]:
    """Read a YAML or JSON file (JSON is YAML). Raises ValueError with file and line where it is neither."""
    with open(path, encoding="utf-8") as file:
        try:
            raw = yaml.safe_load(file)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not readable YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: found {type(raw).__name__}, expected `key: value` lines (an Accelerate FSDP2 YAML).")
    return raw


def export_environment(launch: Launch) -> int | None:
    """Set the FSDP_* and ACCELERATE_* variables that this YAML and the launcher's flags ask for, and drop all others.

    Accelerate's own translation, so flags override the file as usual; under `accelerate launch` it changes nothing.
    Returns the number of processes that `accelerate launch` was asked for, None outside it.
    """
    names = ("FSDP_", "PARALLELISM_CONFIG_")
    try:
        arguments = launch_command_parser().parse_args(launch.launcher_argv or ["--num_processes", "1", "script.py"])
        arguments.config_file = launch.path
        arguments = with_yaml(arguments)
        num_processes = arguments.num_processes if launch.launcher_argv is not None else None
        arguments.num_machines, arguments.main_process_port = 1, 0  # the processes run already: no port to check
        arguments.fsdp_cpu_ram_efficient_loading = False  # has no effect here, and would demand another key
        for name in [name for name in os.environ if name.startswith(names)]:
            del os.environ[name]  # left by a launcher with another YAML, or by the user's shell
        environment = prepare_multi_gpu_env(arguments)
    except (ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise ValueError(f"{launch.path}: accelerate refuses this configuration: {error}") from error
    os.environ.update({k: v for k, v in environment.items() if k.startswith((*names, "ACCELERATE_"))})
    # transformers would look at this one while loading; the recipes read slices of the files instead.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    # The launcher exports "true" whenever a file is used, even one that asks for no other parallelism.
    os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "false"
    return num_processes
