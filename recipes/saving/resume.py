"""Go on from a checkpoint: check that it is of this run, and load it into the sharded objects."""

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem

from .folder import RunFolder, read_manifest
from .state import LiveState, frozen_checksum, set_random_state, take_quantized, training_tensors

# Arguments that say which rows come when, or what the saved tensors mean: another value would make the run wrong.
FIXED = ("seed", "group_by_length", "streaming", "use_peft")
FIXED_WITH_ADAPTERS = ("lora_r", "lora_alpha", "lora_target_modules")
UNIMPORTANT = (
    *("config", "accelerate_config", "output_dir", "resume_from_checkpoint", "check_hashes", "preview"),
    *("save_steps", "save_total_limit", "on_save_error", "async_save", "load_best_model_at_end"),
    *("report_to", "logging_steps", "eval_steps", "dataset_num_proc", "dataloader_num_workers"),
    *("on_non_finite", "profile", "hang_timeout"),
)
NOT_THE_MODEL = ("transformers_version", "dtype", "torch_dtype", "use_cache", "attn_implementation", "name_or_path")


def identity_of_run(
    arguments: dict[str, Any], keys: dict[str, Any], rows_hash: str, model: nn.Module
) -> dict[str, Any]:
    """What a run is, as JSON holds it: kept in each checkpoint, compared by compare_runs. `keys`: hooks.config's
    as_plain_dict. A collective."""
    config = model.config.to_dict()
    config = {name: value for name, value in config.items() if name not in NOT_THE_MODEL and not name.startswith("_")}
    yaml_keys = {name: entry["value"] for name, entry in keys.items()}
    packed = f" packed to {arguments['max_length']}" if arguments["packing"] else ""
    facts = {"arguments": arguments, "yaml": yaml_keys, "data": rows_hash + packed}
    facts |= {"model": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()}
    rows_per_micro_step = arguments["per_device_train_batch_size"] * dist.get_world_size()
    facts |= {"rows_per_step": rows_per_micro_step * arguments["gradient_accumulation_steps"]}
    return json.loads(json.dumps({**facts, "frozen": frozen_checksum(model)}))


def compare_runs(saved: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """What is not as it was when the checkpoint was written, a line each.

    Raises:
        ValueError: a change that would make the continued run wrong.
    """
    before, now = saved["arguments"], run["arguments"]
    fixed = FIXED + (FIXED_WITH_ADAPTERS if now["use_peft"] else ())
    wrong = [
        f"--{n} was {before.get(n)}, now {now[n]}" for n in fixed if in_any_order(before.get(n)) != in_any_order(now[n])
    ]
    if saved["data"] != run["data"]:
        wrong.append(
            "the training rows are others (the data, the tokenizer or its chat template, or how rows are cut, masked "
            "or packed)"
        )
    both = saved["frozen"].keys() & run["frozen"].keys()  # another YAML may store the frozen weights otherwise
    if any(saved["frozen"][dtype] != run["frozen"][dtype] for dtype in both):
        wrong.append(f"the frozen weights of {now['model_name_or_path']} are others")
    if saved["model"] != run["model"]:
        wrong.append(f"the config of {now['model_name_or_path']} is another")
    if wrong:
        raise ValueError(
            "This is not the run of the checkpoint: " + "; ".join(wrong) + ". Give it what it was started with, or "
            "start a new run from its exported model."
        )
    notes, rows = [], run["rows_per_step"]
    if saved["rows_per_step"] != rows:
        notes.append(
            f"global batch was {saved['rows_per_step']} rows, now {rows}: other losses and another schedule than "
            "without the stop; --gradient_accumulation_steps brings it back"
        )
    if now["group_by_length"] and saved["rows_seen"] and not saved.get("rows_per_group"):
        notes.append(
            "an older version grouped rows by length in another order: until the epoch ends some rows come twice and "
            "others not"
        )
    if now["streaming"] and saved["rows_seen"] and not saved.get("stream"):
        notes.append(
            "an older version did not note where the stream stood: what the epoch has seen is tokenised once more"
        )
    kinds = (("--", before, now), ("YAML ", saved["yaml"], run["yaml"]))
    return notes + [
        f"changed since the checkpoint: {kind}{name} was {old.get(name)}, now {value}"
        for kind, old, new in kinds
        for name, value in new.items()
        if name not in UNIMPORTANT and old.get(name) != value
    ]


def in_any_order(value: Any) -> Any:
    """A list of names without its order."""
    return sorted(value) if isinstance(value, list) else value


def resume(live: LiveState, run: RunFolder, facts: dict[str, Any]) -> list[str]:
    """Load the checkpoint of a run's folder into the sharded model and its optimizer, on any number of ranks and under
    any wrapping; nothing where there is none.

    The schedule is moved to its step and follows the arguments of now. Returns a line on it, what is not as it was, and
    what could not be restored. A collective.

    Raises:
        ValueError: on every rank; this is not the run of the checkpoint, or it holds other tensors than the model.
    """
    if run.checkpoint is None:
        return []
    changes = agreed(lambda: compare_runs(run.manifest, facts), live.group)
    notes = load_checkpoint(live, run.checkpoint)
    return [f"resumed from {run.checkpoint}: step {run.state['step']}", *changes, *notes]


def agreed(function: Callable[[], list[str]], group: dist.ProcessGroup) -> list[str]:
    """What a function returns, unless it fails on a rank: then all raise, before the next collective."""
    result, own, failures = [], None, [None] * dist.get_world_size()
    try:
        result = function()
    except BaseException as error:
        own = error
    told = "" if own is None else str(own) if isinstance(own, ValueError) else f"{type(own).__name__}: {own}"
    dist.all_gather_object(failures, told, group=group)
    if own is not None:
        raise own
    if any(failures):
        raise ValueError(next(text for text in failures if text))
    return result


def load_checkpoint(live: LiveState, checkpoint: Path) -> list[str]:
    """Everything that a checkpoint holds, into what is live; returns what could not be restored. A collective."""
    accelerator, model, optimizer, scheduler = live.accelerator, live.model, live.optimizer, live.scheduler
    saved = read_manifest(checkpoint)
    if accelerator.scaler is not None:  # loading steps the optimizer once, and the scaler is made at its first use
        accelerator.scaler.scale(torch.zeros((), device=accelerator.device))
    tensors = training_tensors(model, optimizer)
    for kind, held in tensors.items():
        load_tensors(held, checkpoint / kind, live.group)
    take_quantized(model, optimizer, tensors["optimizer"])
    if accelerator.scaler is not None and "scaler" in saved:
        accelerator.scaler.load_state_dict(saved["scaler"])
    if saved["schedule_steps"]:
        scheduler.last_epoch = saved["schedule_steps"] - 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no optimizer step came before
            scheduler.step()
    random_file = checkpoint / "random_state" / f"rank-{dist.get_rank():05}.safetensors"
    if random_file.is_file():
        try:
            set_random_state(str(random_file), accelerator.device)
        except SafetensorError as error:
            raise ValueError(unreadable(random_file, str(error))) from error
    notes = []
    if saved["world_size"] != dist.get_world_size():
        notes.append(
            f"saved by {saved['world_size']} ranks, resumed by {dist.get_world_size()}: the rows go on in the same "
            "order, but dropout draws other masks than an uninterrupted run"
        )
    return notes


def load_best(live: LiveState, checkpoint: Path | None) -> str:
    """Load the weights of a checkpoint alone, and say so; "" where there is none. A collective."""
    if checkpoint is None:
        return ""
    load_tensors(training_tensors(live.model, live.optimizer)["model"], checkpoint / "model", live.group)
    return f"lowest eval_loss: {checkpoint}, loaded"


def load_tensors(tensors: dict[str, torch.Tensor], folder: Path, group: dist.ProcessGroup) -> None:
    """Fill sharded tensors in place from the files of any number of ranks; each reads its own slices. A collective.

    Raises:
        ValueError: on every rank, where one cannot read, or where the folder holds other tensors.
    """
    reader, failure = reader_of(folder), ""
    try:
        saved = {name: tuple(facts.size) for name, facts in reader.read_metadata().state_dict_metadata.items()}
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    failures = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure, group=group)  # before the next collective, in which the others would wait
    if any(failures):
        rank = next(rank for rank, text in enumerate(failures) if text)
        raise ValueError(unreadable(folder, f"rank {rank}: {failures[rank]}"))
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    different = sorted(name for name in saved.keys() | wanted.keys() if saved.get(name) != wanted.get(name))
    if different:
        name = different[0]
        raise ValueError(
            f"{folder} holds other tensors than this model: {name} is {saved.get(name, 'missing')} there and "
            f"{wanted.get(name, 'missing')} here ({len(different)} differ). Resume with the model it was saved from."
        )
    try:
        dcp.load(tensors, storage_reader=reader, process_group=group)
    except dcp.CheckpointException as error:  # raised on every rank
        what = "; ".join(f"rank {rank}: {wrapped[0]}" for rank, wrapped in error.failures.items())
        raise ValueError(unreadable(folder, what)) from error


class DiskOfManifest(FileSystem):
    """A checkpoint's disk, on which a folder holds what the manifest names, whatever a network disk lists: torch's
    reader would not miss the rows of a file that it is not shown."""

    def ls(self, path: str | os.PathLike) -> list[str]:
        """The files of a folder."""
        checkpoint, part = Path(path).parent, Path(path).name
        names = read_manifest(checkpoint)["files"]
        return [str(checkpoint / name) for name in names if Path(name).parts[0] == part]


def reader_of(folder: Path) -> dcp.HuggingFaceStorageReader:
    """What reads the tensors of a checkpoint's folder, model/ or optimizer/."""
    reader = dcp.HuggingFaceStorageReader(str(folder))
    reader.fs = DiskOfManifest()
    return reader


def unreadable(folder: Path, what: str) -> str:
    """The message for files that cannot be read."""
    return f"{folder} cannot be read: {what}. --check_hashes names a damaged file; resume from an earlier checkpoint."
