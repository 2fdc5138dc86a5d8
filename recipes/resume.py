"""Go on from a checkpoint: choose it, check that it is whole and of this run, and load it into the sharded objects."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from checkpoint import MANIFEST, complete_checkpoints, read_manifest, sha256, step_of
from torch import nn
from training_state import frozen_checksum, set_random_state, training_tensors

# Arguments that say which rows come when, or what the saved tensors mean: another value would make the run wrong.
FIXED = ("seed", "group_by_length", "streaming", "use_peft", "lora_r", "lora_alpha", "lora_target_modules")
UNIMPORTANT = (
    *("config", "accelerate_config", "output_dir", "resume_from_checkpoint", "check_hashes", "preview"),
    *("save_steps", "save_total_limit", "on_save_error", "async_save", "load_best_model_at_end"),
    *("report_to", "logging_steps", "eval_steps", "dataset_num_proc", "dataloader_num_workers"),
)


def find_checkpoint(name: str, output_dir: str) -> Path:
    """Return the checkpoint to resume from. `latest` (or True) is the newest complete one of this output folder.

    Raises:
        ValueError: there is none, the named folder is not a complete checkpoint, or output_dir holds later ones, which
            the run would come to mix with its own.
    """
    complete = complete_checkpoints(output_dir)
    known = ", ".join(path.name for path in complete) or "none"
    if name.lower() in ("latest", "true"):
        if not complete:
            raise ValueError(f"--resume_from_checkpoint {name}: no complete checkpoint in {output_dir}.")
        return complete[-1]
    checkpoint = Path(name)
    if not (checkpoint / MANIFEST).is_file():
        raise ValueError(f"--resume_from_checkpoint {name}: not a complete checkpoint. In {output_dir}: {known}.")
    later = [path.name for path in complete if step_of(path) > read_manifest(checkpoint)["step"]]
    if later:
        raise ValueError(
            f"--resume_from_checkpoint {name}: {output_dir} holds {', '.join(later)}, which would be taken for this "
            "run's. Move them away, resume from the latest, or choose another --output_dir."
        )
    return checkpoint


def check_no_checkpoints(output_dir: str) -> None:
    """Raise ValueError if a new run would write its checkpoints among those of an earlier one."""
    found = complete_checkpoints(output_dir)
    if found:
        raise ValueError(
            f"--output_dir {output_dir} holds {found[-1].name} of an earlier run. Continue it with "
            "--resume_from_checkpoint latest, or choose another folder."
        )


def check_files(checkpoint: Path, check_hashes: bool) -> None:
    """Raise ValueError, naming the file, where one is missing or not as long as it was written.

    With `check_hashes` each rank also reads its share of the files, and one whose content changed is named.
    """
    files = read_manifest(checkpoint)["files"]
    problems = []
    for name, facts in files.items():
        path = checkpoint / name
        size = path.stat().st_size if path.is_file() else None
        if size != facts["size"]:
            found = "missing" if size is None else f"{size:,} bytes"
            problems.append(f"{path}: {found}, written were {facts['size']:,} bytes")
    if check_hashes and not problems:
        for name in sorted(files)[dist.get_rank() :: dist.get_world_size()]:
            if sha256(checkpoint / name) != files[name]["sha256"]:
                problems.append(f"{checkpoint / name}: its content is not what was written (sha256)")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError("Damaged checkpoint: " + "; ".join(problems[:3]) + more + ". Resume from an earlier one.")


def run_facts(arguments: Any, keys: dict[str, Any], rows_hash: str, model: nn.Module) -> dict[str, Any]:
    """What a run is, as JSON holds it: kept in each checkpoint, compared by compare_runs. A collective."""
    yaml_keys = {name: entry["value"] for name, entry in keys.items()}
    packed = f" packed to {arguments.max_length}" if arguments.packing else ""
    facts = {"arguments": vars(arguments), "yaml": yaml_keys, "data": rows_hash + packed}
    return json.loads(json.dumps({**facts, "frozen": frozen_checksum(model)}))


def compare_runs(saved: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """What is not as it was when the checkpoint was written, a line each.

    Raises:
        ValueError: a change that would make the continued run wrong.
    """
    before, now = saved["arguments"], run["arguments"]
    wrong = [f"--{name} was {before.get(name)}, now {now[name]}" for name in FIXED if before.get(name) != now[name]]
    if saved["data"] != run["data"]:
        wrong.append(
            "the training rows are others (the data, the tokenizer or its chat template, or how rows are cut, masked "
            "or packed)"
        )
    both = saved["frozen"].keys() & run["frozen"].keys()  # another YAML may store the frozen weights otherwise
    if any(saved["frozen"][dtype] != run["frozen"][dtype] for dtype in both):
        wrong.append(f"the frozen weights of {now['model_name_or_path']} are others")
    if wrong:
        raise ValueError(
            "This is not the run of the checkpoint: " + "; ".join(wrong) + ". Give it what it was started with, or "
            "start a new run from its exported model."
        )
    kinds = (("--", before, now), ("YAML ", saved["yaml"], run["yaml"]))
    return [
        f"changed since the checkpoint: {kind}{name} was {old.get(name)}, now {value}"
        for kind, old, new in kinds
        for name, value in new.items()
        if name not in UNIMPORTANT and old.get(name) != value
    ]


def resume(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    checkpoint: Path,
) -> tuple[dict[str, Any], list[str]]:
    """Load a checkpoint into the sharded model and its optimizer, on any number of ranks and under any wrapping.

    The schedule is moved to its step and follows the arguments of now. Returns (the manifest, what could not be
    restored). A collective.

    Raises:
        ValueError: the checkpoint holds other tensors than the model.
    """
    saved = read_manifest(checkpoint)
    if accelerator.scaler is not None:  # loading steps the optimizer once, and the scaler is made at its first use
        accelerator.scaler.scale(torch.zeros((), device=accelerator.device))
    tensors = training_tensors(model, optimizer)
    for kind, held in tensors.items():
        load_tensors(held, checkpoint / kind)
    if accelerator.scaler is not None and "scaler" in saved:
        accelerator.scaler.load_state_dict(saved["scaler"])
    if saved["schedule_steps"]:
        scheduler.last_epoch = saved["schedule_steps"] - 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no optimizer step came before
            scheduler.step()
    random_file = checkpoint / "random_state" / f"rank-{dist.get_rank():05}.safetensors"
    if random_file.is_file():
        set_random_state(str(random_file), accelerator.device)
    notes = []
    if saved["world_size"] != dist.get_world_size():
        notes.append(
            f"saved by {saved['world_size']} ranks, resumed by {dist.get_world_size()}: the rows go on in the same "
            "order, but dropout draws other masks than an uninterrupted run"
        )
    return saved, notes


def load_weights(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Load the weights of a checkpoint alone. A collective."""
    load_tensors(training_tensors(model, optimizer)["model"], checkpoint / "model")


def load_tensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Fill sharded tensors in place from the files of any number of ranks; each reads its own rows."""
    reader = dcp.HuggingFaceStorageReader(str(folder))
    saved = {name: tuple(facts.size) for name, facts in reader.read_metadata().state_dict_metadata.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    different = sorted(name for name in saved.keys() | wanted.keys() if saved.get(name) != wanted.get(name))
    if different:
        name = different[0]
        raise ValueError(
            f"{folder} holds other tensors than this model: {name} is {saved.get(name, 'missing')} there and "
            f"{wanted.get(name, 'missing')} here ({len(different)} differ). Resume with the model it was saved from."
        )
    dcp.load(tensors, storage_reader=reader)
