"""When a part of the run fails on a rank: say rank, step, place and cause, last on the screen, and end."""

import contextlib
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from .last_words import print_last, tell_launcher
from .memory_errors import is_out_of_memory
from .on_demand import tool
from .progress import Progress
from .run_record import note_failure

OF_A_PEER = ("gloo/transport", "NCCL", "DistBackendError", "remote process exited")  # how another rank's end shows here
WAIT_S = 10  # how long the other ranks leave rank 0 to print an error that all of them met


@contextlib.contextmanager
def explained_failures(
    progress: Progress, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, output_dir: str
) -> Iterator[None]:
    """Run a part of the script. What fails on this rank is printed with rank, step and place, and ends it with status
    1, the run's folder says so, and its report is made.

    Its exit makes the launcher end the others, which print nothing: they only lost a peer. The message is handed to the
    launcher as well, which repeats it in its own last lines.
    """
    rank = accelerator.process_index
    with contextlib.suppress(OSError):
        failure_file(output_dir, rank).unlink()  # of a run before this one
    try:
        yield
        progress.enter("")
    except SystemExit as error:
        if isinstance(error.code, str):  # this rank ends by itself, and says why
            reason, rank_0 = error.code.strip().removeprefix("Error: "), failure_file(output_dir, 0)
            if rank:  # rank 0 may have met the same: the launcher ends this one before it speaks
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(WAIT_S)
                if rank_0.is_file() and rank_0.read_text(encoding="utf-8") == reason:
                    sys.exit(1)  # it has spoken, and is slow to end
            hand_on(reason, output_dir, rank)
        raise
    except Exception as error:
        say = partial(print, file=sys.stderr, flush=True)
        where = f"rank {rank}, step {step_of(progress)}"
        place = "reading the data" if "DataLoader worker" in str(error) else progress.place  # its signal comes anywhere
        if accelerator.num_processes > 1 and any(words in f"{type(error)} {error}" for words in OF_A_PEER):
            said = what_failed(output_dir)  # another rank has failed, and says why
            lost = f"{where}, in {place}: another rank ended ({type(error).__name__}: {error})"
            sys.last_value = SystemExit(said or lost)
            if not said:  # it was killed
                say(f"\nError: {lost}\n")
                print_last(lost)
            sys.exit(1)
        lines = [f"in {place}: {type(error).__name__}: {error}", traceback.format_exc()]
        memory = tool("diagnosis.memory_diagnosis", "explanation", say) if is_out_of_memory(error) else None
        if memory is not None:
            lines = memory.explain_out_of_memory(error, place, model, optimizer, Path(output_dir), rank=rank, say=say)
        message = f"{where}: " + "\n".join(lines)
        hand_on(message, output_dir, rank)
        say(f"\nError: {message}\n")
        note_failure(Path(output_dir), message)
        sys.exit(1)


def step_of(progress: Progress) -> int:
    """The optimizer step, from 1, that something belongs to; an evaluation or a save belongs to the one before."""
    return progress.step if progress.phase in ("evaluation", "answers", "saving") else max(progress.step, 1)


def hand_on(message: str, output_dir: str, rank: int) -> None:
    """Leave why this rank ends for the launcher's last lines, its own run.json and the other ranks' reports."""
    tell_launcher(message)
    sys.last_value = SystemExit(message)  # where run_record.py finds it
    with contextlib.suppress(OSError):
        failure_file(output_dir, rank).write_text(message, encoding="utf-8")


def failure_file(output_dir: str | Path, rank: int | str) -> Path:
    """Where a rank leaves its message for the others' reports."""
    return Path(output_dir, f"failure-rank-{rank}.txt")


def what_failed(output_dir: str) -> str:
    """The message that the rank which failed has left, soon after its connections closed; "" if it left none."""
    for _ in range(10):
        time.sleep(0.2)
        found = sorted(Path(output_dir).glob(failure_file("", "*").name))
        if found:
            return found[0].read_text(encoding="utf-8")
    return ""
