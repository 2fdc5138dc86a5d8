"""A run whose ranks wait for one another for ever: end it within a stated time, and say which rank is where.

Every rank notes in the run's folder where its main thread is. A rank that has not moved for `timeout_s` reads what the
others noted, prints all of it once, and ends; its exit makes the launcher end the others.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from launch import tell_launcher

CHECK_S = 2.0  # how often a rank notes where it is
OWN = Path(__file__).parent


def watch_for_hangs(
    rank: int, num_processes: int, output_dir: str, step_now: Callable[[], int], timeout_s: float
) -> None:
    """Start the watch of this rank; it ends with the process. `timeout_s` 0 switches it off.

    A step, an evaluation, a checkpoint or a compilation that takes longer than `timeout_s` without a line of the
    recipe's own code going on counts as a hang.
    """
    if not timeout_s or num_processes == 1:
        return
    folder = Path(output_dir, "ranks")
    main = threading.main_thread()

    def watch() -> None:
        moved, last = time.monotonic(), ""
        while main.is_alive():
            time.sleep(min(CHECK_S, timeout_s / 4))
            now = f"step {step_now() + 1}, {where(main.ident)}"
            waited = time.monotonic() - moved
            if now != last:
                moved, last, waited = time.monotonic(), now, 0.0
            note(folder / f"rank-{rank}.json", {"at": now, "waited_s": round(waited)})
            if waited > timeout_s:
                end_run(folder, rank, num_processes, timeout_s, main.ident)

    threading.Thread(target=watch, daemon=True, name="hang watch").start()


def where(thread: int) -> str:
    """The innermost line of the recipes that a thread is in, and the library call below it."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame is not None else []
    ours = [line for line in stack if Path(line.filename).parent == OWN]
    if not ours:
        return "no line of the recipes"
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno} in {ours[-1].name}, calling {stack[-1].name}"


def note(path: Path, values: dict) -> None:
    """Write where this rank is, whole or not at all; a full disk does not end the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(values), encoding="utf-8")
        beside.replace(path)
    except OSError:
        pass


def end_run(folder: Path, rank: int, num_processes: int, timeout_s: float, thread: int) -> None:
    """Print where every rank is, those apart from the others first, and end this process."""
    places = {}
    for other in range(num_processes):
        try:
            places[other] = json.loads((folder / f"rank-{other}.json").read_text(encoding="utf-8"))["at"]
        except (OSError, ValueError, KeyError):
            places[other] = "never began"
    counts = {at: list(places.values()).count(at) for at in places.values()}
    lines = [f"rank {other}: {at}" for other, at in sorted(places.items(), key=lambda place: counts[place[1]])]
    message = "\n".join(
        [f"no rank has moved for {timeout_s:.0f} s (--hang_timeout); they wait for one another:", *lines]
    )
    tell_launcher(message)
    stack = "".join(traceback.format_stack(sys._current_frames().get(thread)))
    first = min(places)
    if rank == first or places[rank] != places[first]:
        print(f"\nError: {message}\n\nrank {rank}'s stack:\n{stack}", file=sys.stderr, flush=True)
    os._exit(1)
