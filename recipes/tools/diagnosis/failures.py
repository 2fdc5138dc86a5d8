"""When the training loop fails on a rank: say rank, step, place and cause, last on the screen, and end."""

import contextlib
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from training.last_words import print_last, tell_launcher

from .memory_diagnosis import explain_out_of_memory

OF_A_PEER = ("gloo/transport", "NCCL", "DistBackendError", "remote process exited")  # how another rank's end shows here
WAIT_S = 10  # how long the other ranks leave rank 0 to print an error that all of them met
# Function names on the stack, innermost first, that say where in a step it happened.
PLACES = (
    ("reading the data", ("stream_steps", "training_steps", "fetch_ahead")),
    ("saving", ("save", "write_state")),
    ("evaluation", ("evaluate", "greedy_answers")),
    ("clipping", ("clip_grad_norm",)),
    ("the optimizer's step", ("adamw", "_fused_adamw", "take_back", "send", "optimizer_step")),
    ("gathering a unit", ("foreach_all_gather", "unshard", "foreach_all_gather_copy_out")),
    ("logits and loss", ("token_loss_sum", "cross_entropy", "chunk_loss")),
    ("backward", ("_engine_run_backward", "backward")),
    ("forward", ("forward",)),
)


@contextlib.contextmanager
def explained_failures(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    arguments: Any,
    hook_config: Any,
    script: str,
) -> Iterator[None]:
    """Run a part of the script, as a decorator or in a `with`. What fails on this rank is printed with rank, step and
    place, and ends it with status 1.

    Its exit makes the launcher end the others, which print nothing: they only lost a peer. The message is handed to the
    launcher as well, which repeats it in its own last lines.
    """
    with contextlib.suppress(OSError):
        failure_file(arguments.output_dir, accelerator.process_index).unlink()  # of a run before this one
    try:
        yield
    except SystemExit as error:
        if isinstance(error.code, str):  # this rank ends by itself, and says why
            reason, rank_0 = error.code.strip().removeprefix("Error: "), failure_file(arguments.output_dir, 0)
            if accelerator.process_index:  # rank 0 may have met the same: the launcher ends this one before it speaks
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(WAIT_S)
                if rank_0.is_file() and rank_0.read_text(encoding="utf-8") == reason:
                    sys.exit(1)  # it has spoken, and is slow to end
            hand_on(reason, arguments.output_dir, accelerator.process_index)
        raise
    except Exception as error:
        where, say = place_of(error, model), partial(print, file=sys.stderr, flush=True)
        rank, step = accelerator.process_index, step_of(error, where)
        if accelerator.num_processes > 1 and any(words in f"{type(error)} {error}" for words in OF_A_PEER):
            said = what_failed(arguments.output_dir)  # another rank has failed, and says why
            lost = f"rank {rank}, step {step}, in {where}: another rank ended ({type(error).__name__}: {error})"
            sys.last_value = SystemExit(said or lost)
            if not said:  # it was killed
                say(f"\nError: {lost}\n")
                print_last(lost)
            sys.exit(1)
        path = Path(arguments.output_dir, f"out_of_memory-rank-{rank}.json")
        run = arguments, hook_config, script, accelerator.num_processes
        lines = explain_out_of_memory(error, where, model, optimizer, run=run, path=path, say=say)
        lines = lines or [f"in {where}: {type(error).__name__}: {error}", traceback.format_exc()]
        message = f"rank {rank}, step {step}: " + "\n".join(lines)
        hand_on(message, arguments.output_dir, rank)
        say(f"\nError: {message}\n")
        sys.exit(1)


def hand_on(message: str, output_dir: str, rank: int) -> None:
    """Leave why this rank ends for the launcher's last lines, its own run.json and the other ranks' reports."""
    tell_launcher(message)
    sys.last_value = SystemExit(message)  # where run_record.py finds it
    with contextlib.suppress(OSError):
        failure_file(output_dir, rank).write_text(message, encoding="utf-8")


def failure_file(output_dir: str, rank: int | str) -> Path:
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


def step_of(error: BaseException, where: str) -> int:
    """The optimizer step, from 1, in which the training loop was; an evaluation or a save belongs to the one before."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    loops = [frame.f_locals for frame in frames if frame.f_code.co_name == "train"]
    done = loops[-1].get("step", 0) if loops else 0
    return done if where.startswith(("evaluation", "saving")) else done + 1


def place_of(error: BaseException, model: nn.Module) -> str:
    """Where in a step an exception comes from, with the module that ran: `forward: model.layers.3.mlp`."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [frame.f_code.co_name for frame in frames]
    if "DataLoader worker" in str(error):  # a signal brings it, wherever the loop is then
        return "reading the data"
    place = next((place for place, functions in PLACES if set(functions) & set(names)), "the loop")
    known = {module: name for name, module in model.named_modules()}
    modules = [known[owner] for owner in (frame.f_locals.get("self") for frame in frames) if is_known(owner, known)]
    return f"{place}: {modules[-1]}" if modules and modules[-1] else place


def is_known(owner: Any, known: dict[nn.Module, str]) -> bool:
    """Whether a frame's self is one of the model's modules."""
    return isinstance(owner, nn.Module) and owner in known
