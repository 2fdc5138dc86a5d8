"""run.json: the facts of a run that metrics.jsonl does not hold, and the report at its end, however it ends."""

import atexit
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from hooks.config import HookConfig

from .arguments import FinetuneArguments
from .on_demand import tool
from .run_files import read_object, write_whole

LIBRARIES = ("torch", "accelerate", "transformers", "peft", "datasets")


def run_facts(arguments: FinetuneArguments, config: HookConfig, device: torch.device) -> dict[str, Any]:
    """The command, arguments with their defaults, a HookConfig's keys with their origins, versions, device."""
    keys = {key: {"value": getattr(config, key), "origin": origin} for key, origin in config.origins.items()}
    defaults = {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(arguments)
    }
    is_cuda = device.type == "cuda"
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    versions |= {"python": platform.python_version(), "cuda": torch.version.cuda}
    cpu = f"{device.type} ({platform.machine()}, {os.cpu_count()} cores)"
    return {
        "command": sys.argv,
        "arguments": vars(arguments),
        "defaults": defaults,
        "yaml": {"path": config.path, **keys},
        "versions": versions,
        "device": torch.cuda.get_device_name(device) if is_cuda else cpu,
    }


def now() -> str:
    """The time, to the second, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def why_ended() -> str:
    """What ends this process: the exception that nobody caught, or what launch.stop_together printed."""
    error = getattr(sys, "last_value", None)
    if error is None:
        return "no message was kept; see what the run printed"
    return str(error) if isinstance(error, SystemExit) else f"rank 0: {type(error).__name__}: {error}"


def note_failure(folder: Path, message: str) -> None:
    """Write down that the run of this folder failed, on whichever rank notices it first (rank 0 may sit in a device
    call until it is killed), and make its report."""
    with contextlib.suppress(Exception):  # the message itself has been printed
        facts = read_object(folder / "run.json")
        if facts.get("status") == "running":
            with contextlib.suppress(ValueError):  # not in a thread
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends all ranks when the first has failed
            facts |= {"status": f"failed: {message}", "ended": now()}
            write_whole(folder / "run.json", json.dumps(facts, indent=1) + "\n")
            make_report(folder, print)


def make_report(folder: Path, say: Callable[[str], object]) -> None:
    """The report of a run's folder, and a line on it."""
    report = tool("report.run_report", f"report of {folder}", say)
    if report is not None:
        say(report.write_report(folder))


class RunRecord:
    """run.json of a run, on the main process. A run that ends without `end` is written down, at exit, as failed; one
    that is killed stays "running". Nothing in here fails a run: what could not be written is said, in one line."""

    def __init__(self, folder: Path, facts: dict[str, Any], say: Callable[[str], None]) -> None:
        self.folder, self.say = folder, say
        self.facts = {**facts, "started": now(), "ended": None, "samples": "", "status": "running"}
        for message in folder.glob("failure-rank-*.txt"):  # of a run before this one
            message.unlink(missing_ok=True)
        self.write()
        atexit.register(self.end_as_failed)

    def write(self) -> None:
        """Write run.json."""
        try:
            write_whole(self.folder / "run.json", json.dumps(self.facts, indent=1, default=str) + "\n")
        except OSError as error:
            self.say(f"run.json could not be written: {error}")

    def end(self, status: str) -> None:
        """Write down how the run ended, and make its report."""
        self.facts |= {"status": status, "ended": now()}
        self.write()
        try:
            make_report(self.folder, self.say)
        except Exception as error:  # the run itself is whole, whatever becomes of its report
            self.say(f"the report could not be written ({type(error).__name__}: {error})")

    def end_as_failed(self) -> None:
        """Write down, at exit, a run whose end was never reached."""
        with contextlib.suppress(ValueError):
            if read_object(self.folder / "run.json").get("status", "running") != "running":
                return  # a rank that failed has written it down
        if self.facts["status"] == "running":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher ends the other ranks when the first has failed
            self.end(f"failed: {why_ended()}")
