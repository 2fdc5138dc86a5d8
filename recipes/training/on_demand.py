"""The one place where a run starts a tool, when it is needed; a copy without tools/ goes without and says so."""

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def tool(name: str, goes_without: str, say: Callable[[str], object]) -> ModuleType | None:
    """The module tools.NAME; None where there are no tools, after a line on what the run goes without."""
    own, tools = find_spec(__package__), find_spec("tools")
    folders = [Path(spec.origin).parents[1] if spec is not None and spec.origin else None for spec in (own, tools)]
    if folders[0] != folders[1]:  # none, or a package of that name in the project around a copy
        say(f"note: without tools/ there is no {goes_without}")
        return None
    return importlib.import_module(f"tools.{name}")
