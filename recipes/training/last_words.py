"""Why a run failed, as the last line on the screen.

A launcher ends a failed run with words of its own: torch's a box of equals signs, Accelerate's for one process a
traceback. The reason is handed to torch's launcher, which puts it into its box, and printed once more behind all that.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

import psutil
from hooks.yaml_of_run import launcher_arguments

LAUNCHER = os.getppid()  # where this process was started by one
LONGEST = 600  # characters of the last line
# The program of a process that waits for the end of the launcher, which comes after every rank's. Its stdin is the
# launcher's pidfd, which becomes readable then.
WAIT_AND_PRINT = "import select, sys; select.select([0], [], []); print(sys.argv[1], file=sys.stderr)"
has_spoken = threading.Event()  # this process has left its last line


def tell_launcher(message: str) -> None:
    """Have a failed run's reason printed by torch's launcher, in the file it names for that, and behind its box."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
    print_last(message)


def tell_of_crashes() -> None:
    """From now on do so for an exception that nobody catches, too."""
    own = sys.excepthook
    if getattr(own, "tells_launcher", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        own(kind, error, trace)
        if issubclass(kind, Exception):
            tell_launcher(f"{kind.__name__}: {error}\n{''.join(traceback.format_exception(error))}")

    hook.tells_launcher = True
    sys.excepthook = hook


def print_last(message: str) -> None:
    """Print a message, in one line, when the launcher has ended; the first rank's of a machine, once. Where there is no
    launcher, or the system cannot wait for a process that is no child (only Linux can), nothing is printed."""
    # Another parent: the launcher is gone, or this is a fork of a rank. Process 1: nothing runs after it.
    if has_spoken.is_set() or os.getppid() != LAUNCHER or LAUNCHER <= 1 or not hasattr(os, "pidfd_open"):
        return
    with contextlib.suppress(Exception):  # the message itself is printed elsewhere, whatever happens here
        if is_first_to_fail(os.environ.get("TORCHELASTIC_ERROR_FILE")):
            has_spoken.set()
            print_after(LAUNCHER, f"Failed: {in_one_line(message)}")


def is_first_to_fail(error_file: str | None) -> bool:
    """Whether this process was started by a launcher that ends with it, and no other rank of it has spoken yet."""
    if not error_file:
        return launcher_arguments(psutil.Process(LAUNCHER).cmdline()) is not None
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
    line = " ".join(filter(None, lines)).replace("\0", "")
    return line if len(line) <= LONGEST else line[: LONGEST - 4] + " ..."


def print_after(pid: int, line: str) -> None:
    """Print a line when a process has ended, though this one ends before it."""
    descriptor = os.pidfd_open(pid)
    command = [sys.executable, "-I", "-S", "-c", WAIT_AND_PRINT, line.encode(errors="replace")]
    # In a session of its own: the launcher ends those of its ranks.
    subprocess.Popen(command, stdin=descriptor, stdout=subprocess.DEVNULL, start_new_session=True)
    os.close(descriptor)
