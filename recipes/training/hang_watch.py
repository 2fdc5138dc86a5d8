"""A run whose ranks wait for one another for ever: end it within a stated time, and say which rank is where.

Every rank notes in the run's folder where it is (progress.py) and since when it has not moved. Where none has moved for
`--hang_timeout` seconds, one of them prints where each is, the rank that is furthest behind first, and ends; its exit
makes the launcher end the others. A rank moves while it marks or runs other code. Where all are saving, the disk may
take as long as it needs; where one has failed, the others are ended after AFTER_FAILURE_S.
"""

import atexit
import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from .failures import failure_file
from .last_words import tell_launcher
from .progress import Progress
from .run_record import note_failure

ENDED = "ended"  # made by the rank that prints
CHECK_S = 2.0  # how often a rank notes where it is
AFTER_FAILURE_S = 60.0  # a rank that has failed leaves the others so long to notice by themselves


def watch_for_hangs(progress: Progress, output_dir: str, rank: int, ranks: int, timeout_s: float) -> None:
    """Start the watch of this rank's main thread; it ends with the process. A `timeout_s` of 0: no watch."""
    if not timeout_s or ranks == 1:
        return
    folder, main_thread = Path(output_dir, "ranks"), threading.get_ident()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ENDED).unlink(missing_ok=True)
        note(folder, rank, {"since": time.time()})
    atexit.register(leave, folder, rank)

    def watch() -> None:
        before: tuple = ()
        since = time.time()
        while True:
            asleep = time.time()
            time.sleep(min(CHECK_S, timeout_s / 4))
            now, signs = time.time(), signs_of_life(progress, main_thread)
            was_suspended = now - asleep > 2 * CHECK_S + timeout_s / 4  # the whole machine, or this process
            if was_suspended or not progress.phase or signs != before:
                before, since = signs, now
            at = f"step {max(progress.step, 1)}, {progress.place}" if progress.phase else "outside of training"
            is_noted, still_s = False, now - since
            with contextlib.suppress(OSError):  # a full disk does not end the run; nothing is known then
                note(folder, rank, {"at": at, "phase": progress.phase, "moves": progress.moves, "since": since})
                is_noted = True
            has_failed = still_s > AFTER_FAILURE_S and any(folder.parent.glob(failure_file("", "*").name))
            if is_noted and (still_s > timeout_s or has_failed):
                end_if_stuck(folder, rank, ranks, timeout_s)

    threading.Thread(target=watch, daemon=True, name="hang watch").start()


def signs_of_life(progress: Progress, thread: int) -> tuple:
    """What changes while a rank goes on: its marks, and the instruction of its main thread."""
    frame = sys._current_frames().get(thread)
    return progress.moves, (id(frame.f_code), frame.f_lasti) if frame is not None else ()


def leave(folder: Path, rank: int) -> None:
    """At the end of the process nothing of the watch stays."""
    with contextlib.suppress(OSError):
        (folder / f"rank-{rank}.json").unlink()
        folder.rmdir()  # the last rank's


def note(folder: Path, rank: int, values: dict[str, Any]) -> None:
    """Write where this rank is, whole or not at all."""
    beside = folder / f"rank-{rank}.new"
    beside.write_text(json.dumps({**values, "noted": time.time()}), encoding="utf-8")
    beside.replace(folder / f"rank-{rank}.json")


def end_if_stuck(folder: Path, rank: int, ranks: int, timeout_s: float) -> None:
    """Print where every rank is and end this process, if none has moved for so long, or one has failed and the others
    wait for it; or let a slow one go on."""
    notes, failed, now = {}, {}, time.time()
    for other in range(ranks):
        with contextlib.suppress(OSError):
            failed[other] = failure_file(folder.parent, other).read_text(encoding="utf-8")
        with contextlib.suppress(OSError, ValueError):
            notes[other] = json.loads((folder / f"rank-{other}.json").read_text(encoding="utf-8"))
    if len(notes.keys() | failed.keys()) < ranks:  # one has left the loop: nothing is known
        return
    patience_s = min(timeout_s, AFTER_FAILURE_S) if failed else timeout_s
    are_silent = {other for other, one in notes.items() if now - one["noted"] > timeout_s / 2}  # gone without a word
    waiting = [one for other, one in notes.items() if other not in are_silent | failed.keys()]
    if any(now - one.get("since", now) < patience_s for one in waiting):
        return
    if not (failed or are_silent) and all(one.get("phase") == "saving" for one in waiting):
        return  # a write to a slow disk moves nothing until it ends
    try:
        (folder / ENDED).touch(exist_ok=False)
    except FileExistsError:  # another rank says it all
        time.sleep(CHECK_S)
        os._exit(1)
    except OSError:  # a full disk: more than one may print
        pass
    order = sorted(range(ranks), key=lambda other: (other not in failed, other not in are_silent, moves(notes, other)))
    lines = [f"no rank has moved for {patience_s:.0f} s (--hang_timeout); they wait for one another:"]
    if failed:
        lines = [f"a rank has failed, and no other has moved for {patience_s:.0f} s:"]
    for other in order:
        at = notes.get(other, {}).get("at", "elsewhere")
        said = f"failed: {failed[other]}" if other in failed else f"{at}, silent" if other in are_silent else at
        lines.append(f"rank {other}: {said}")
    message = "\n".join(lines)
    tell_launcher(message)
    with contextlib.suppress(OSError):
        failure_file(folder.parent, rank).write_text(message, encoding="utf-8")
    print(f"\nError: {message}\nrank {rank}'s stacks:", file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):  # stderr may be no file
        faulthandler.dump_traceback(file=sys.stderr)
    note_failure(folder.parent, message)
    os._exit(1)


def moves(notes: dict[int, dict[str, Any]], rank: int) -> int:
    """How many marks a rank has made."""
    return notes.get(rank, {}).get("moves", 0)
