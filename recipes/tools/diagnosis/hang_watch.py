"""A run whose ranks wait for one another for ever: end it within a stated time, and say which rank is where.

Every rank notes in the run's folder where its main thread is. A rank that finds all of them unmoved for
`--hang_timeout` seconds, and not all in the same place, prints where each is and ends; its exit makes the launcher end
the others. Ranks that are all in one place, such as a long evaluation, agree: a collective has its own timeout there.
"""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from training.last_words import tell_launcher
from training.run_record import note_failure

WATCHED = ("train", "evaluate", "greedy_answers")
ENDED = "ended"  # made by the rank that prints
CHECK_S = 2.0  # how often a rank notes where it is
OWN = Path(__file__).parents[2]


def watch_for_hangs(accelerator: Accelerator, arguments: Any) -> None:
    """Start the watch of this rank's main thread; it ends with the process."""
    rank, ranks, timeout_s = accelerator.process_index, accelerator.num_processes, arguments.hang_timeout
    if not timeout_s or ranks == 1:
        return
    folder, main_thread = Path(arguments.output_dir, "ranks"), threading.get_ident()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ENDED).unlink(missing_ok=True)
        note(folder, rank, {"since": time.time()})
    atexit.register(leave, folder, rank)

    def watch() -> None:
        last: dict[str, Any] = {}
        while True:
            asleep = time.time()
            time.sleep(min(CHECK_S, timeout_s / 4))
            now, found = time.time(), where(main_thread)
            was_suspended = now - asleep > 2 * CHECK_S + timeout_s / 4  # the whole machine, or this process
            if was_suspended or not found or found != {name: last.get(name) for name in found}:
                last = {**found, "since": now}
            with contextlib.suppress(OSError):  # a full disk does not end the run
                note(folder, rank, last)
            if found and now - last["since"] > timeout_s:
                end_if_apart(folder, rank, ranks, timeout_s, main_thread)

    threading.Thread(target=watch, daemon=True, name="hang watch").start()


def leave(folder: Path, rank: int) -> None:
    """At the end of the process nothing of the watch stays."""
    with contextlib.suppress(OSError):
        (folder / f"rank-{rank}.json").unlink()
        folder.rmdir()  # the last rank's


def where(thread: int) -> dict[str, Any]:
    """Step and innermost line of the recipes that a thread is in, and the library call below; {} where ranks need not
    wait for one another soon (loading, saving the model at the end)."""
    frame = sys._current_frames().get(thread)
    innermost = own = watched = loop = None
    while frame is not None:
        innermost = innermost or frame
        own = own or (frame if OWN in Path(frame.f_code.co_filename).parents else None)
        watched = frame if frame.f_code.co_name in WATCHED else watched
        loop = frame if frame.f_code.co_name == "train" else loop
        frame = frame.f_back
    if watched is None or own is None:
        return {}
    step = f"step {loop.f_locals.get('step', 0) + 1}" if loop is not None else "outside of training"
    waits = "waiting in " if "distributed" in innermost.f_code.co_filename else "calling "
    at = f"{step}, {Path(own.f_code.co_filename).name}:{own.f_lineno} ({own.f_code.co_name})"
    return {"at": at, "calls": waits + innermost.f_code.co_name, "exactly": [own.f_lasti, innermost.f_lasti]}


def note(folder: Path, rank: int, values: dict[str, Any]) -> None:
    """Write where this rank is, whole or not at all."""
    beside = folder / f"rank-{rank}.new"
    beside.write_text(json.dumps({**values, "noted": time.time()}), encoding="utf-8")
    beside.replace(folder / f"rank-{rank}.json")


def end_if_apart(folder: Path, rank: int, ranks: int, timeout_s: float, thread: int) -> None:
    """Print where every rank is, those apart from the others first, and end this process; or let a slow one go on."""
    try:
        notes = [json.loads((folder / f"rank-{other}.json").read_text(encoding="utf-8")) for other in range(ranks)]
    except (OSError, ValueError):  # one has left the loop, or its disk is full: nothing is known
        return
    places, now = [one.get("at", "elsewhere") for one in notes], time.time()
    are_silent = [now - one["noted"] > timeout_s / 2 for one in notes]  # stopped, or gone without a word
    has_moved = any(now - one.get("since", 0) < timeout_s for one, is_silent in zip(notes, are_silent) if not is_silent)
    if has_moved or (len(set(places)) == 1 and not any(are_silent)):
        return
    try:
        (folder / ENDED).touch(exist_ok=False)
    except FileExistsError:  # another rank says it all
        time.sleep(CHECK_S)
        os._exit(1)
    calls = ["silent" if silent else one.get("calls", "") for one, silent in zip(notes, are_silent)]

    def suspicion(other: int) -> tuple[bool, bool, int]:
        return not are_silent[other], calls[other].startswith("waiting"), places.count(places[other])

    head = f"no rank has moved for {timeout_s:.0f} s (--hang_timeout); they wait for one another:"
    message = "\n".join(
        [head, *(f"rank {other}: {places[other]}, {calls[other]}" for other in sorted(range(ranks), key=suspicion))]
    )
    tell_launcher(message)
    with contextlib.suppress(OSError):
        (folder.parent / f"failure-rank-{rank}.txt").write_text(message, encoding="utf-8")
    stack = "".join(traceback.format_stack(sys._current_frames().get(thread)))
    print(f"\nError: {message}\nrank {rank}'s stack:\n{stack}", file=sys.stderr, flush=True)
    note_failure(folder.parent, message)
    os._exit(1)
