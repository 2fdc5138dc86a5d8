"""A step that stopped being finite, run again from the random state it began with: at once, or from disk.

    OUTPUT_DIR/non_finite/batch.json           step, the ranks' row numbers, what was found
                          rank-R.safetensors   rank R's micro-batches and random state

`--replay_batch OUTPUT_DIR/non_finite` runs all of it, `--replay_batch .../rank-1.safetensors` that rank's rows alone.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from saving.state import generator_states, set_generator_states
from torch import nn

from .finite_hooks import Finding, find_non_finite

Batch = dict[str, torch.Tensor]
Rows = list[list[Any]]  # of each micro-batch, its rows' numbers; of a packed row, a list of its documents' numbers
FACTS = "batch.json"
LISTED = 16  # row numbers, and ranks that met different things
FINITE = (
    "every module, gradient and the norm were finite, with these weights, rows and random numbers. Where the run "
    "itself failed with the same, a kernel does not repeat, compiled code differs (none runs here), or hardware fails"
)


@dataclass
class Step:
    """This rank's part of a step, as it began: what runs its micro-batches, and from which random state."""

    run: Callable[[list[Batch]], torch.Tensor]
    micro_batches: list[Batch]
    random_state: dict[str, torch.Tensor]


def begin_step(run: Callable[[list[Batch]], torch.Tensor], micro_batches: list[Batch], device: torch.device) -> Step:
    """Note how a step begins, without waiting for the device."""
    return Step(run, micro_batches, generator_states(device))


@torch.compiler.set_stance("force_eager")  # a compiled block runs no hooks inside
def run_again(step: Step, model: nn.Module, rows: Rows, device: torch.device) -> list[str]:
    """Run a step from its random state under hooks, without gradients from before. A collective.

    Returns, the same on every rank, a line per place where a value was first not finite: ranks, module or parameter,
    row numbers.
    """
    set_generator_states(step.random_state, device)
    model.zero_grad()
    finding, batch_rows = find_non_finite(model, partial(step.run, step.micro_batches))
    mine = None
    if finding is not None:
        mine = finding.is_local, finding.what, name_rows(finding, batch_rows, rows) if finding.is_local else ""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    is_local = any(entry and entry[0] for entry in found)  # else all that is known is known after the reduction
    ranks: dict[str, list[str]] = {}
    for rank, entry in enumerate(found):
        if entry and entry[0] == is_local:
            ranks.setdefault(entry[1] + entry[2], []).append(str(rank))
    return [f"rank {', '.join(numbers)}: {what}" for what, numbers in list(ranks.items())[:LISTED]] or [FINITE]


def name_rows(finding: Finding, batch_rows: list[int], rows: Rows) -> str:
    """The row numbers of a finding. A micro-batch may have run in pieces, as many of each."""
    if not rows:
        return ""
    if finding.call < 0:
        numbers, exact = [number for micro_batch in rows for number in micro_batch], []
    else:
        pieces = len(batch_rows) // len(rows)
        first = finding.call - finding.call % pieces
        start = sum(batch_rows[first : finding.call])
        numbers = rows[finding.call // pieces][start : start + batch_rows[finding.call]]
        exact = [numbers[row] for row in finding.rows if row < len(numbers)]
    chosen = exact or numbers
    if not chosen:
        return " | rows: none of the data, a filler"
    text = ", ".join(map(str, chosen[:LISTED])) + (f" and {len(chosen) - LISTED} more" if len(chosen) > LISTED else "")
    one_of = "" if exact or len(chosen) == 1 else "one of "
    return f" | {one_of}row{'s' if len(chosen) > 1 else ''} {text} of the data, counted from 0"


def save_step(folder: Path, step: Step, rows: Rows, facts: dict[str, Any]) -> str:
    """Write a step to disk; returns a line on it, the same on every rank. A collective."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rows_of_ranks, failures, failure = [None] * world_size, [None] * world_size, ""
    dist.all_gather_object(rows_of_ranks, rows)
    parts = {**dict(enumerate(step.micro_batches)), "random": step.random_state}
    tensors = {f"{part}.{name}": value.cpu().clone() for part, held in parts.items() for name, value in held.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{rank}.safetensors").write_bytes(save(tensors))
        if rank == 0:
            text = json.dumps({**facts, "world_size": world_size, "rows": rows_of_ranks}, indent=1)
            (folder / FACTS).write_text(text, encoding="utf-8")
    except OSError as error:
        failure = f"rank {rank}: {error}"
    dist.all_gather_object(failures, failure)
    failure = next((text for text in failures if text), "")
    if failure:
        return f"its rows could not be saved: {failure}"
    return (
        f"its rows are saved: --replay_batch {folder} runs them again, with the weights that the command loads "
        "(--resume_from_checkpoint: those of a checkpoint), and trains nothing"
    )


def read_step(path: Path, rank: int, world_size: int) -> tuple[list[Batch], dict[str, torch.Tensor], Rows, dict]:
    """(micro-batches of this rank, as many as on the others; random state; rows; facts) of what save_step wrote.

    Raises:
        OSError, SafetensorError, ValueError, KeyError: it is not there, or not what save_step writes.
    """
    path = path.parent if path.name == FACTS else path
    folder = path if path.is_dir() else path.parent
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    files = [folder / f"rank-{saved_rank}.safetensors" for saved_rank in range(facts["world_size"])]
    files = files if path.is_dir() else [path]
    micro_batches, rows, random_state = [], [], {}
    for turn in range(math.ceil(len(files) / world_size)):
        file = files[(rank + turn * world_size) % len(files)]
        parts: dict[str, Batch] = {}
        for key, value in load_file(file).items():
            place, name = key.split(".", 1)
            parts.setdefault(place, {})[name] = value
        state = parts.pop("random")
        random_state = random_state or state
        micro_batches += [parts[str(place)] for place in range(len(parts))]
        rows += facts["rows"][int(file.stem.removeprefix("rank-"))]
    return micro_batches, random_state, rows, facts


def replay(
    path: str, accelerator: Accelerator, model: nn.Module, forward_backward: Callable[..., torch.Tensor], config: Any
) -> str:
    """Run a saved step under hooks with the weights of now; returns what was found. Changes no weight. A collective.

    On another number of ranks the saved ranks' rows are shared out, and dropout draws other masks.

    Raises:
        ValueError: on every rank, where one cannot read it.
    """
    rank, world_size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    failure, failures = "", [None] * world_size
    try:
        micro_batches, random_state, rows, facts = read_step(Path(path), rank, world_size)
        scaled_tokens = facts["label_tokens"] * world_size / facts["world_size"]  # each row's gradient is as it was
        title = f"replay of step {facts['step']} ({path})"
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        failure = f"rank {rank}: {type(error).__name__}: {error}"
    dist.all_gather_object(failures, failure)
    if any(failures):
        failure = next(text for text in failures if text)
        raise ValueError(f"--replay_batch {path}: {failure}. It takes the folder non_finite of a run, or a file in it.")
    micro_batches = [{name: values.to(device) for name, values in batch.items()} for batch in micro_batches]
    whole_step = partial(forward_backward, accelerator, model, scaled_tokens, config)
    lines = run_again(Step(whole_step, micro_batches, random_state), model, rows, device)
    return "\n- ".join([f"{title}: {'all finite' if lines == [FINITE] else 'not finite'}", *lines])
