"""A step that stopped being finite, run again from the random state it began with: at once, or from disk.

OUTPUT_DIR/non_finite/batch.json           step, the ranks' row numbers, what was found
                      rank-R.safetensors   rank R's micro-batches and random state
"""

import argparse
import dataclasses
import importlib
import json
import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import set_seed
from hooks.config import read_hook_config
from rows.batches import Share
from rows.prepare import Data
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from saving.folder import find_checkpoint
from saving.resume import load_best
from saving.state import LiveState
from torch import nn
from training.arguments import KINDS, FinetuneArguments, QuietParser
from training.launch import end, make_accelerator, make_device_mesh, stop_together
from training.non_finite import Batch, BegunStep, Rows
from training.optimizer import make_optimizer, prepare
from training.progress import Progress
from training.random_state import set_generator_states

from ..planner.planned_step import request_of_run
from .finite_hooks import Finding, find_non_finite

FACTS = "batch.json"
LISTED = 16  # row numbers, and ranks that met different things
FINITE = (
    "every module, gradient and the norm were finite, with these weights, rows and random numbers. Where the run "
    "itself failed with the same, a kernel does not repeat, compiled code differs (none runs here), or hardware fails"
)


@torch.compiler.set_stance("force_eager")  # a compiled block runs no hooks inside
def run_again(step: BegunStep, model: nn.Module, rows: Rows, device: torch.device) -> list[str]:
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


def save_step(folder: Path, step: BegunStep, rows: Rows, facts: dict[str, Any]) -> str:
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
        f"its rows are saved: replay.py {folder}, launched as the run was, runs them again with the model's "
        "weights (--resume_from_checkpoint: those of a checkpoint), and trains nothing"
    )


@dataclass
class SavedStep:
    """A step from disk, for this rank: as many micro-batches as on the others."""

    step: int
    label_tokens: float  # scaled, so that each row's gradient is as it was
    micro_batches: list[Batch]
    random_state: dict[str, torch.Tensor]
    rows: Rows


def read_step(path: Path, rank: int, world_size: int) -> SavedStep:
    """What save_step wrote, shared among the ranks of now.

    Raises:
        ValueError: it is not there, or not what save_step writes.
    """
    path = path.parent if path.name == FACTS else path
    folder = path if path.is_dir() else path.parent
    micro_batches, rows, random_state = [], [], {}
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        files = [folder / f"rank-{saved_rank}.safetensors" for saved_rank in range(facts["world_size"])]
        files = files if path.is_dir() else [path]
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
        label_tokens = facts["label_tokens"] * world_size / facts["world_size"]
        return SavedStep(facts["step"], label_tokens, micro_batches, random_state, rows)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: {what}. replay.py takes the folder non_finite of a run, or a file in it.") from error


def main() -> None:
    """Run a saved step under hooks with the weights of now, and print what was found. Changes no weight.

    On another number of ranks the saved ranks' rows are shared out, and dropout draws other masks.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="OUTPUT_DIR/non_finite, or a file in it")
    given = parser.parse_args(sys.argv[1:2])  # what follows are the script's arguments
    folder = given.path if given.path.is_dir() else given.path.parent
    with stop_together():
        if not given.path.exists():
            raise ValueError(f"{given.path}: no such folder or file.")
        script, arguments = script_of_run(folder.parent, sys.argv[2:])
        config = read_hook_config(arguments.accelerate_config)
    with stop_together():
        accelerator = make_accelerator(config, arguments)
    with stop_together():
        step = read_step(given.path, accelerator.process_index, accelerator.num_processes)
    mesh = make_device_mesh(accelerator)
    set_seed(arguments.seed)
    with stop_together():
        share = Share.of(arguments, accelerator.process_index, accelerator.num_processes)
        model = script.build_model(arguments, config, accelerator, mesh, Data(None, None, [], arguments, share, 0))
    with stop_together():
        optimizer = make_optimizer(model, arguments, config)
    model, optimizer = prepare(accelerator, model, optimizer)
    if arguments.resume_from_checkpoint:
        with stop_together():
            checkpoint = find_checkpoint(arguments.resume_from_checkpoint, str(folder.parent))
            load_best(LiveState(accelerator, model, optimizer, None, {}), checkpoint)
    micro_batches = [{name: values.to(accelerator.device) for name, values in b.items()} for b in step.micro_batches]
    whole_step = partial(
        script.forward_backward, accelerator, model, label_tokens=step.label_tokens, config=config, progress=Progress()
    )
    lines = run_again(BegunStep(whole_step, micro_batches, step.random_state), model, step.rows, accelerator.device)
    title = f"replay of step {step.step} ({given.path}): {'all finite' if lines == [FINITE] else 'not finite'}"
    accelerator.print("\n- ".join([title, *lines]))
    end(accelerator)


def script_of_run(folder: Path, words: list[str]) -> tuple[ModuleType, FinetuneArguments]:
    """The script that a run was started with, and its arguments with those of `words` in their place.

    Raises:
        ValueError: the folder holds no run.json of a run, or there is no such script here.
    """
    request = request_of_run(folder)
    try:
        script = importlib.import_module(Path(request.script).stem)
    except ModuleNotFoundError as error:
        raise ValueError(f"{folder / 'run.json'}: the run's script {request.script} is not here: {error}") from error
    parser = QuietParser(KINDS[request.kind], allow_abbrev=False)
    saved = dataclasses.asdict(request.script_arguments())
    parser.set_defaults(**{**saved, "resume_from_checkpoint": None, "report_to": ["none"]})
    arguments = parser.parse(words)
    return script, dataclasses.replace(arguments, output_dir=str(folder / "non_finite"))
