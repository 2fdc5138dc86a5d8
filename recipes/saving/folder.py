"""A run's folder: who writes to it, and the checkpoints in it."""

import hashlib
import json
import math
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from filelock import FileLock, Timeout

START = {"step": 0, "epoch": 0, "rows_seen": 0, "tokens_seen": 0}  # of a new run
START |= {"skipped_steps": 0, "skipped_in_a_row": 0, "rows_per_group": 0, "stream": {}}  # which older ones do not say
START |= {"rows_per_piece": 0}  # of finetune_mem_limit.py, once it was out of memory
MANIFEST, LOCK = "manifest.json", ".lock"
FORMAT = 1  # of a checkpoint's folder and manifest
MANIFEST_TYPES = {"step": int, "epoch": int, "rows_seen": int, "tokens_seen": int, "schedule_steps": int}
MANIFEST_TYPES |= {"rows_per_step": int, "world_size": int, "arguments": dict, "yaml": dict, "frozen": dict}
MANIFEST_TYPES |= {"data": str, "model": str, "files": dict, "versions": dict}


@dataclass
class RunFolder:
    """A run's folder, held by this run while the object lives, and the checkpoint that it goes on from, if any."""

    checkpoint: Path | None
    manifest: dict[str, Any]  # of the checkpoint
    lock: FileLock | None  # rank 0's

    @property
    def state(self) -> dict[str, Any]:
        """Where the run stands: at its start, or where the checkpoint was written."""
        return {name: self.manifest.get(name, value) for name, value in START.items()}


def open_run(output_dir: str, resume_from: str | None, check_hashes: bool = False) -> RunFolder:
    """Make a run's folder, hold it until this process ends, and find where the run goes on. Every rank must call it.

    Ranks whose launcher was killed train on: a second run would remove what they write.

    Raises:
        ValueError: another run holds the folder, a rank sees another disk than rank 0, or find_checkpoint's and
            check_files' reasons.
    """
    lock, told, group = None, [(None, "")], patient_group()
    if dist.get_rank() == 0:  # what ranks read from a disk must not differ
        try:
            lock = hold_folder(output_dir)
            told = [(find_checkpoint(resume_from, output_dir), "")]
        except (ValueError, OSError) as error:
            told = [(None, str(error))]
        except BaseException as error:  # the others wait below
            told = [(None, f"{type(error).__name__}: {error}")]
    dist.broadcast_object_list(told, group=group)
    checkpoint, failure = told[0]
    if failure:
        raise ValueError(failure)
    if not Path(output_dir, LOCK).exists():  # each machine would hold a part of a checkpoint
        raise ValueError(f"--output_dir {output_dir} is not on a disk that all ranks share.")
    manifest = checked_manifest(checkpoint, check_hashes, dist.get_rank(), dist.get_world_size())
    return RunFolder(checkpoint, manifest, lock)


def patient_group() -> dist.ProcessGroup:
    """A gloo group to wait in for ranks that do unequal work: NCCL would give up in minutes. A collective."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=1))


def hold_folder(folder: str) -> FileLock:
    """Make a folder and lock it. Raises ValueError where another run holds it."""
    path = Path(folder, LOCK)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(
            f"--output_dir {folder}: another run is still writing to it. End its processes (they outlive a launcher "
            f"that was killed); if there are none, on any machine, remove {path}."
        ) from None
    return lock


def complete_checkpoints(folder: str | Path) -> list[Path]:
    """Complete checkpoints in a run's folder, oldest step first."""
    found = [path.parent for path in Path(folder).glob(f"checkpoint-*/{MANIFEST}")]
    return sorted((path for path in found if step_of(path) >= 0), key=step_of)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name, -1 if it is none."""
    number = path.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint says of itself. Raises ValueError, naming the file, where it is not what we write."""
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, this version reads {FORMAT}")
        wrong = [name for name, kind in MANIFEST_TYPES.items() if not isinstance(manifest[name], kind)]
        if wrong:
            raise ValueError(f"{wrong[0]} is {manifest[wrong[0]]!r}")
        outside = [name for name in manifest["files"] if Path(name).is_absolute() or ".." in Path(name).parts]
        if outside:
            raise ValueError(f"it lists {outside[0]}, which lies outside of the checkpoint")
        for facts in manifest["files"].values():
            int(facts["size"]), str(facts["sha256"])
    except (ValueError, TypeError, KeyError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is not the manifest of a checkpoint: {what}. Resume from another one.") from error
    return manifest


def checked_manifest(checkpoint: Path | None, reads_all: bool, rank: int, world_size: int) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are there (`reads_all`: by their hashes), {} without a checkpoint.

    Raises ValueError as check_files and read_manifest do.
    """
    if checkpoint is None:
        return {}
    check_files(checkpoint, "" if reads_all else None, rank, world_size)
    return read_manifest(checkpoint)


def best_checkpoint(folder: str | Path) -> Path | None:
    """The complete checkpoint of the lowest eval_loss, None if none was evaluated. A damaged one is passed over."""
    losses = {}
    for path in complete_checkpoints(folder):
        try:
            loss = read_manifest(path).get("eval_loss")
        except ValueError:
            continue
        if loss is not None and math.isfinite(loss):
            losses[path] = loss
    return min(losses, key=losses.__getitem__, default=None)


def find_checkpoint(name: str | None, output_dir: str) -> Path | None:
    """Return the checkpoint to resume from, None for a new run. `latest` (or True) is the newest complete one of this
    output folder.

    Raises:
        ValueError: there is none, the named folder is not a complete checkpoint, or output_dir holds later ones, which
            would be taken for this run's.
    """
    complete = complete_checkpoints(output_dir)
    if name is None or name.lower() in ("false", "none"):
        if complete:
            raise ValueError(
                f"--output_dir {output_dir} holds {complete[-1].name} of an earlier run. Continue it with "
                "--resume_from_checkpoint latest, or choose another folder."
            )
        return None
    if name.lower() in ("latest", "true"):
        if not complete:
            raise ValueError(f"--resume_from_checkpoint {name}: no complete checkpoint in {output_dir}.")
        return complete[-1]
    checkpoint = next((path for path in (Path(name), Path(output_dir, name)) if (path / MANIFEST).is_file()), None)
    if checkpoint is None:
        known = ", ".join(path.name for path in complete) or "none"
        raise ValueError(f"--resume_from_checkpoint {name}: not a complete checkpoint. In {output_dir}: {known}.")
    later = [path.name for path in complete if step_of(path) > read_manifest(checkpoint)["step"]]
    if later:
        raise ValueError(
            f"--resume_from_checkpoint {name}: {output_dir} holds {', '.join(later)}, which would be taken for this "
            "run's. Move them away, resume from the latest, or choose another --output_dir."
        )
    return checkpoint


def check_files(checkpoint: Path, hashed: str | None = None, rank: int = 0, world_size: int = 1) -> None:
    """Raise ValueError, naming the file, where one is missing or not as long as it was written.

    Files whose name starts with `hashed` are read as well, each rank its share, and one whose content changed is named.
    """
    files = read_manifest(checkpoint)["files"]
    problems = []
    for name, facts in files.items():
        path = checkpoint / name
        size = path.stat().st_size if path.is_file() else None
        if size != facts["size"]:
            found = "missing" if size is None else f"{size:,} bytes"
            problems.append(f"{path}: {found}, written were {facts['size']:,} bytes")
    if hashed is not None and not problems:
        for name in sorted(name for name in files if name.startswith(hashed))[rank::world_size]:
            if sha256(checkpoint / name) != files[name]["sha256"]:
                problems.append(f"{checkpoint / name}: its content is not what was written (sha256)")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError("Damaged checkpoint: " + "; ".join(problems[:3]) + more + ". Use an earlier one.")


def sha256(path: Path) -> str:
    """The hash of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
