"""Accelerate's private names. tests/test_private.py fails where one moves."""

import argparse

from accelerate.commands.launch import _validate_launch_command


def given_flags(arguments: argparse.Namespace | None) -> frozenset[str]:
    """Options that stand on the launcher's command line. Public way looked for: its parser notes them here alone."""
    return frozenset(getattr(arguments, "nondefault", ()))  # not there where none does


def with_yaml(arguments: argparse.Namespace) -> argparse.Namespace:
    """The launcher's arguments, completed by their YAML as `accelerate launch` does it. Public way looked for:
    launch_command does it and launches; load_config_from_file reads the file alone."""
    arguments.nondefault = set(given_flags(arguments))  # without it accelerate skips the file's keys
    return _validate_launch_command(arguments)[0]
