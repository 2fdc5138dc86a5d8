"""What must be the same on all ranks, which would train without a word if it were not: launch.same_everywhere."""

import hashlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from typing import Any

LIBRARIES = ("torch", "accelerate", "transformers", "peft")
OURS = ("__main__", "utils", "hooks", "rows", "training", "saving")  # modules, by the first part of their name
# Arguments that may be others on another machine: paths, and how many processes it has to spare.
OF_A_MACHINE = {"config", "accelerate_config", "model_name_or_path", "dataset_name", "output_dir"}
OF_A_MACHINE |= {"resume_from_checkpoint", "dataset_num_proc", "dataloader_num_workers"}


def versions() -> dict[str, str]:
    """The libraries that training depends on, and our own files as they were loaded."""
    found = {name: version(name) for name in LIBRARIES}
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] in OURS:
            with suppress(OSError, TypeError):  # an empty file, or none
                found[f"the file of {name}"] = hashlib.sha256(inspect.getsource(module).encode()).hexdigest()[:12]
    return found


def flat(facts: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each fact with the names of the dictionaries that it is in, but for what may be another on each machine."""
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name} ")
        elif name not in OF_A_MACHINE:
            yield f"{prefix}{name}", value
