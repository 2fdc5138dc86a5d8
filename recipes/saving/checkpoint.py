"""Checkpoints on disk: written whole or not at all, found again, pruned. Loading one is resume.py.

    checkpoint-120/
      manifest.json    what it is, and the size and hash of every file; a folder without it is no checkpoint
      model/           safetensors; each file holds the slices of one rank
      optimizer/       the same for the optimizer's state
      random_state/    one file per rank

Nothing is pickled: tensors are safetensors, all else is JSON, so that loading a checkpoint runs no code from it.
"""

import hashlib
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from .folder import FORMAT, MANIFEST, best_checkpoint, complete_checkpoints, patient_group
from .state import LiveState, random_state, training_tensors

FILE_BYTES = 2**30  # a rank's file is made in host memory before it is written
LIBRARIES = ("torch", "accelerate", "transformers", "peft", "datasets")


class SaveOptions(Protocol):
    """What a writer reads of the script's arguments."""

    output_dir: str
    save_total_limit: int | None
    load_best_model_at_end: bool
    async_save: bool
    on_save_error: str


@dataclass
class Written:
    """What a rank has written: size and hash by the file's name in the checkpoint, and the bytes of tensors in them."""

    files: dict[str, dict[str, Any]]
    tensor_bytes: int = 0


class CheckpointWriter:
    """Saves the training state of a run to output_dir/checkpoint-STEP. Every rank makes one, and calls it alike.

    `facts` go into the manifest: what resume.py compares. With `--async_save` the state is copied to host memory and
    written by a thread while training goes on, one at a time.
    """

    def __init__(self, live: LiveState, options: SaveOptions, facts: dict[str, Any]) -> None:
        self.live, self.facts = live, facts
        self.folder = Path(options.output_dir)
        self.limit, self.keeps_best = options.save_total_limit, options.load_best_model_at_end
        self.is_async, self.on_error = options.async_save, options.on_save_error
        self.group = patient_group()  # its own: a thread may use it
        self.thread, self.outcome = None, ""
        self.agree(self.prune)  # what a kill left behind

    def save(self) -> str:
        """Write a checkpoint of what is live now, or start to; returns a line that says so.

        A kill at any moment leaves the checkpoints that were complete before, and this one only if it is whole. A
        failure on any rank (a full disk) ends all, or with `on_save_error continue` is the line returned.
        """
        line, live, state = self.wait(), self.live, self.live.state
        self.outcome = f"checkpoint-{state['step']} could not be saved: a rank is gone"  # until it is known
        tensors = training_tensors(live.model, live.optimizer, copies=self.is_async)
        manifest = {"format": FORMAT, **state, **self.facts, "schedule_steps": live.scheduler.last_epoch}
        manifest |= {"world_size": dist.get_world_size(), "versions": {name: version(name) for name in LIBRARIES}}
        if live.accelerator.scaler is not None:
            manifest["scaler"] = live.accelerator.scaler.state_dict()
        work = partial(self.write, tensors, random_state(live.accelerator.device), manifest)
        if not self.is_async:
            work()
            return self.finish()
        self.thread = threading.Thread(target=work)
        self.thread.start()
        return f"{line} | saving checkpoint-{state['step']}".removeprefix(" | ")

    def wait(self) -> str:
        """Wait for a checkpoint that a thread writes; returns the line on it, empty if there was none."""
        if self.thread is None:
            return ""
        self.thread.join()
        self.thread = None
        return self.finish()

    @property
    def is_saved(self) -> bool:
        """Whether the last checkpoint was written."""
        return self.outcome.startswith("saved")

    def keep(self, loaded: Path | None = None) -> str:
        """Make sure that a checkpoint holds the live weights: the one that they were `loaded` from, or that of this
        step, which is written if there is none. Returns a line on how to export it, or why there is none. A collective
        that does not raise."""
        checkpoint = loaded or self.folder / f"checkpoint-{self.live.state['step']}"
        _, found = self.agree(lambda: (checkpoint / MANIFEST).is_file())
        if not found[0]:  # as rank 0 sees it
            self.is_async, self.on_error = False, "continue"  # the run ends here
            self.save()
            if not self.is_saved:
                return f"Its last state is in no checkpoint either: {self.outcome}"
        return f"Its weights are in {checkpoint}: export.py {checkpoint} --output_dir NEW_FOLDER makes a model of them"

    def finish(self) -> str:
        """The line on a checkpoint that was written. Raises ValueError, on every rank alike, if it was not."""
        if self.is_saved or self.on_error == "continue":
            return self.outcome
        raise ValueError(f"{self.outcome}; earlier checkpoints are intact (--on_save_error continue goes on).")

    def write(self, tensors: dict[str, dict], random_states: bytes, manifest: dict[str, Any]) -> None:
        """All phases of one checkpoint; after each the ranks agree, so that none waits for one that failed."""
        final = self.folder / f"checkpoint-{manifest['step']}"
        temporary, rank = final.with_name(final.name + ".incomplete"), dist.get_rank()
        random_file = temporary / "random_state" / f"rank-{rank:05}.safetensors"
        phases: list[Callable[[], Any]] = [partial(make_folder, temporary, list(tensors)) if rank == 0 else nothing]
        phases += [partial(self.write_tensors, held, temporary / name) for name, held in tensors.items()]
        phases += [partial(write_random_state, random_file, random_states)]
        written: list[Written] = []  # by each rank
        for phase in phases:
            failure, results = self.agree(phase)
            if failure:
                break
            written += filter(None, results)
        if not failure:
            planned = sum(tensor.nbytes for held in tensors.values() for tensor in held.values())
            failure, _ = self.agree(partial(check_whole, written, planned))
        if not failure:
            manifest["files"] = {name: facts for one in written for name, facts in sorted(one.files.items())}
            complete = partial(complete_checkpoint, temporary, final, manifest)
            failure, _ = self.agree(complete if rank == 0 else nothing)
        if failure:
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            self.outcome = f"checkpoint-{manifest['step']} could not be saved: {failure}"
            return
        size = sum(facts["size"] for facts in manifest["files"].values())
        self.outcome = f"saved {final} ({size / 2**20:,.1f} MiB)"
        failure, _ = self.agree(self.prune)
        self.outcome += f"; older ones could not be removed: {failure}" if failure else ""

    def prune(self) -> None:
        """Remove, on rank 0, the oldest checkpoints beyond the limit (the best is kept) and what a kill left behind."""
        if dist.get_rank() > 0:
            return
        complete = complete_checkpoints(self.folder)
        best = best_checkpoint(self.folder) if self.keeps_best else None
        for old in complete[: -self.limit or None] if self.limit else []:
            if old != best:
                discard(old)
        for leftover in (*self.folder.glob("checkpoint-*.incomplete"), *self.folder.glob("checkpoint-*.deleted")):
            shutil.rmtree(leftover)

    def agree(self, phase: Callable[[], Any]) -> tuple[str, list[Any]]:
        """Run a phase; returns (the first rank's failure or "", each rank's result)."""
        failure, result = "", None
        try:
            result = phase()
        except dcp.CheckpointException as error:  # raised on every rank, with what happened on each
            failures = {r: wrapped[0] for r, wrapped in error.failures.items()}
            failure = "; ".join(f"rank {r}: {type(e).__name__}: {e}" for r, e in failures.items())
        except BaseException as error:  # one that exits here, too, would be waited for
            failure = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
        outcomes = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, (failure, result), group=self.group)
        return next((failure for failure, _ in outcomes if failure), ""), [result for _, result in outcomes]

    def write_tensors(self, tensors: dict[str, torch.Tensor], folder: Path) -> Written:
        """Each rank writes its slices, in files of about FILE_BYTES, synced. A collective."""
        numbers, written = {}, 0
        for name, tensor in tensors.items():
            numbers[name] = 1 + written // FILE_BYTES
            written += tensor.numel() * tensor.element_size() // dist.get_world_size()
        writer = dcp.HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=numbers, save_distributed=True)
        writer.fs = disk = HashingDisk()
        dcp.save(tensors, storage_writer=writer, process_group=self.group)
        files = {f"{folder.name}/{name}": file.facts() for name, file in disk.files.items()}
        return Written(files, sum(file.tensor_bytes() for file in disk.files.values()))


class HashedFile:
    """A file that hashes what is written to it, so that nobody has to read it again."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.hash, self.size, self.start = file, hashlib.sha256(), 0, b""

    def write(self, data: bytes) -> int:
        """Write and hash."""
        self.hash.update(data)
        self.size += len(data)
        self.start += data[: 8 - len(self.start)]
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def facts(self) -> dict[str, Any]:
        """Size and hash, for the manifest."""
        return {"size": self.size, "sha256": self.hash.hexdigest()}

    def tensor_bytes(self) -> int:
        """Of a safetensors file: what follows its header, whose length its first eight bytes say."""
        return self.size - 8 - int.from_bytes(self.start, "little")


class HashingDisk(FileSystem):
    """The disk that torch's writer writes to, with the files that it wrote there by name."""

    def __init__(self) -> None:
        self.files: dict[str, HashedFile] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[HashedFile]:
        """Open a file to write."""
        with super().create_stream(path, mode) as stream:
            self.files[Path(path).name] = file = HashedFile(stream)
            yield file


def nothing() -> None:
    """What other ranks do in a phase of rank 0."""


def make_folder(temporary: Path, parts: list[str]) -> None:
    """An empty folder to write into. The run's folder itself is not made: if it vanished, its disk did."""
    if temporary.exists():
        discard(temporary)
    temporary.mkdir()
    for part in (*parts, "random_state"):
        (temporary / part).mkdir()


def write_random_state(file: Path, data: bytes) -> Written:
    """Write this rank's random state."""
    write_synced(file, data)
    facts = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return Written({f"{file.parent.name}/{file.name}": facts})


def check_whole(written: list[Written], planned: int) -> None:
    """Raise OSError unless the files of all ranks are different ones and hold `planned` bytes of tensors."""
    name, ranks = Counter(name for one in written for name in one.files).most_common(1)[0]
    if ranks > 1:
        raise OSError(f"{ranks} ranks have written {name}")
    found = sum(one.tensor_bytes for one in written)
    if found != planned:
        raise OSError(f"its files hold {found:,} bytes of tensors, the model and its optimizer have {planned:,}")


def complete_checkpoint(temporary: Path, final: Path, manifest: dict[str, Any]) -> None:
    """The manifest makes it a checkpoint, the rename gives it its name; the disk has each before the next."""
    for folder in (*sorted({(temporary / name).parent for name in manifest["files"]}), temporary):
        sync_folder(folder)
    write_synced(temporary / MANIFEST, json.dumps(manifest, indent=1).encode())
    sync_folder(temporary)
    if final.exists():
        discard(final)
    os.replace(temporary, final)
    sync_folder(final.parent)


def discard(path: Path) -> None:
    """Remove a checkpoint: first its name, so that half of it is never taken for one."""
    trash = path.with_name(path.name + ".deleted")
    shutil.rmtree(trash, ignore_errors=True)
    os.replace(path, trash)
    shutil.rmtree(trash)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
