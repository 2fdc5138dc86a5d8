"""Why a run failed, as the last line on the screen.

A launcher ends a failed run with words of its own: torch's a box of equals signs, Accelerate's for one process a
traceback. The reason is handed to torch's launcher, which puts it into its box, and printed once more behind all that.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

import psutil
from launcher_config import launcher_arguments

LONGEST = 600  # characters of the last line
# The program of a process that waits for the end of the launcher, which comes after every rank's.
WAIT_AND_PRINT = "import select, sys; select.select([int(sys.argv[1])], [], []); print(sys.argv[2], file=sys.stderr)"


def tell_launcher(message: str) -> None:
    """Have a failed run's reason printed by torch's launcher, in the file it names for that, and behind its box."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
    with contextlib.suppress(OSError, psutil.Error):
        if is_first_to_fail(path):
            print_after(os.getppid(), f"Failed: {in_one_line(message)}")


def tell_of_crashes() -> None:
    """From now on do so for an exception that nobody catches, too."""
    own = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        own(kind, error, trace)
        if issubclass(kind, Exception):
            tell_launcher(f"{kind.__name__}: {error}\n{''.join(traceback.format_exception(error))}")

    sys.excepthook = hook


def is_first_to_fail(error_file: str | None) -> bool:
    """Whether this process was started by a launcher that ends with it, and no other rank of it has spoken yet."""
    if error_file is None:
        return launcher_arguments(psutil.Process().parent().cmdline()) is not None
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") != os.environ.get("TORCHELASTIC_MAX_RESTARTS"):
        return False  # it starts the ranks again
    try:
        (Path(error_file).parents[1] / "last_words").touch(exist_ok=False)  # the launcher's own folder for its ranks
    except FileExistsError:
        return False
    return True


def in_one_line(message: str) -> str:
    """A message without its traceback, its lines put into one."""
    lines = [line.strip() for line in message.partition("Traceback (most recent call last)")[0].splitlines()]
    line = " ".join(filter(None, lines))
    return line if len(line) <= LONGEST else line[: LONGEST - 4] + " ..."


def print_after(pid: int, line: str) -> None:
    """Print a line when a process has ended, though this one ends before it. On Linux; elsewhere nothing."""
    if not hasattr(os, "pidfd_open"):
        return
    descriptor = os.pidfd_open(pid)
    command = [sys.executable, "-I", "-S", "-c", WAIT_AND_PRINT, str(descriptor), line]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    # In a session of its own: the launcher ends those of its ranks.
    subprocess.Popen(command, **streams, pass_fds=[descriptor], start_new_session=True)
