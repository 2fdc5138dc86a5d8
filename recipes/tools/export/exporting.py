"""A checkpoint as a Hugging Face folder: what export.py does."""

import argparse
import json
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import convert_file_size_to_int
from hooks.dtypes import DTYPES
from huggingface_hub import HfApi, ModelCard, ModelCardData
from safetensors import SafetensorError
from saving.folder import MANIFEST, check_files, read_manifest
from saving.huggingface import blocks, on_disk, write_weights
from saving.resume import reader_of
from torch import nn
from training.model import add_adapters, check_not_quantized, load_tokenizer
from training.run_files import read_metrics
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.dynamic_module_utils import custom_object_save

from .merge_adapter import merged_tensors

NAMED_DTYPES = DTYPES | {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint as a Hugging Face model.")
    parser.add_argument("checkpoint", type=Path, help="a checkpoint-STEP folder of a run")
    parser.add_argument("--output_dir", type=Path, required=True, help="a new folder")
    parser.add_argument("--merge_adapter", action="store_true", help="add a LoRA adapter to its base's weights")
    parser.add_argument("--dtype", choices=NAMED_DTYPES, help="of the weights; without it the base model's")
    parser.add_argument("--max_shard_size", default="5GB", help="of one safetensors file")
    parser.add_argument("--model_name_or_path", help="the base model, if it moved since the run")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that the model brings")
    parser.add_argument("--push_to_hub", metavar="REPO", help="upload the folder to this hub repository")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as meant: one process
    try:
        export_checkpoint(**vars(arguments))
    except (ValueError, OSError, SafetensorError) as error:
        sys.exit(f"Error: {error}")


def export_checkpoint(
    checkpoint: Path,
    output_dir: Path,
    *,
    merge_adapter: bool = False,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    model_name_or_path: str | None = None,
    trust_remote_code: bool = False,
    push_to_hub: str | None = None,
) -> None:
    """Write output_dir, which appears when it is complete.

    Raises:
        ValueError: not a complete checkpoint, another base model than the run's, or nothing to merge.
    """
    if not (checkpoint / MANIFEST).is_file():
        raise ValueError(f"{checkpoint} is not a complete checkpoint: it has no {MANIFEST}.")
    check_files(checkpoint, hashed="model/")
    if output_dir.exists():
        raise ValueError(f"--output_dir {output_dir} exists; name a new folder.")
    manifest = read_manifest(checkpoint)
    run = SimpleNamespace(**{**manifest["arguments"], "trust_remote_code": trust_remote_code})
    run.model_name_or_path = model_name_or_path or run.model_name_or_path
    if merge_adapter and not run.use_peft:
        raise ValueError(f"--merge_adapter: {checkpoint} holds a whole model, there is no adapter to merge.")
    model = meta_model(run)
    as_run = None if run.dtype == "auto" else run.dtype
    dtype = NAMED_DTYPES[dtype or as_run] if dtype or as_run else model.config.dtype or torch.float32
    limit = read_size(max_shard_size)
    if push_to_hub:  # before the work: the name or the token may be wrong
        HfApi().create_repo(push_to_hub, exist_ok=True, private=True)
    incomplete = output_dir.with_name(output_dir.name + ".incomplete")
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)
    try:
        write_folder(
            checkpoint, manifest, model, run, incomplete, merge_adapter=merge_adapter, dtype=dtype, limit=limit
        )
    except BaseException:
        shutil.rmtree(incomplete)
        raise
    incomplete.rename(output_dir)
    print(f"{output_dir}: {sum(p.stat().st_size for p in output_dir.iterdir()) / 2**20:,.1f} MiB")
    if push_to_hub:
        print(f"if this fails: hf upload {push_to_hub} {output_dir}")
        print(HfApi().upload_folder(repo_id=push_to_hub, folder_path=output_dir))


def read_size(text: str) -> int:
    """Bytes of `5GB`, `500MB` or a plain number. Raises ValueError for anything else, and for nothing."""
    try:
        size = int(text) if text.isdecimal() else convert_file_size_to_int(text)
    except ValueError:
        size = 0
    if size <= 0:
        raise ValueError(f"--max_shard_size: found {text}, allowed: bytes above 0, as in 5GB, 500MiB or 1000000")
    return size


def write_folder(
    checkpoint: Path,
    manifest: dict[str, Any],
    model: nn.Module,
    run: SimpleNamespace,
    folder: Path,
    *,
    merge_adapter: bool,
    dtype: torch.dtype,
    limit: int,
) -> None:
    """Weights, config, tokenizer and card, into an empty folder."""
    if run.use_peft and not merge_adapter:
        add_adapters(model, run).save_pretrained(folder, state_dict=read_all(checkpoint / "model"))
    else:
        tensors = saved_tensors(checkpoint, model)
        if merge_adapter:
            tensors = merged_tensors(read_all(checkpoint / "model"), model, run, manifest["frozen"])
        write_weights(((name, t.to(dtype) if t.is_floating_point() else t) for name, t in tensors), folder, limit)
        model.config.dtype = dtype
        model.config.save_pretrained(folder)
        if getattr(model.config, "auto_map", None):
            custom_object_save(model, folder, config=model.config)
        save_generation_config(run, folder)
    load_tokenizer(run).save_pretrained(folder)
    write_card(checkpoint, manifest, run, folder)


def meta_model(run: SimpleNamespace) -> nn.Module:
    """The base model of a run without its weights."""
    source = {"revision": run.model_revision, "trust_remote_code": run.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(run.model_name_or_path, **source)
        check_not_quantized(config)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=run.trust_remote_code)
    except Exception as error:
        raise ValueError(
            f"the base model {run.model_name_or_path} could not be read (if it moved: --model_name_or_path): {error}"
        ) from error


def saved_tensors(checkpoint: Path, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a whole model, under the names that its family has on disk, a block at a time.

    Raises:
        ValueError: the checkpoint holds other tensors than the base model.
    """
    reader = reader_of(checkpoint / "model")
    saved = reader.read_metadata().state_dict_metadata
    shapes = {name: tuple(facts.size) for name, facts in saved.items()}
    wanted = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())  # may stand under either name
    wrong = sorted(n for n in shapes.keys() | wanted.keys() - tied if shapes.get(n) != wanted.get(n))
    if wrong:
        raise ValueError(
            f"{checkpoint / 'model'} and the base model are not the same: {wrong[0]} is "
            f"{shapes.get(wrong[0], 'missing')} and {wanted.get(wrong[0], 'missing')} ({len(wrong)} differ)."
        )

    def read() -> Iterator[dict[str, torch.Tensor]]:
        for names in blocks(saved):
            piece = {name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype) for name in names}
            dcp.load(piece, storage_reader=reader, no_dist=True)
            yield piece

    yield from on_disk(model, read())


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's folder, whole: for an adapter."""
    reader = reader_of(folder)
    saved = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(facts.size, dtype=facts.properties.dtype) for name, facts in saved.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def save_generation_config(run: SimpleNamespace, folder: Path) -> None:
    """The base model's generation config, where it has one."""
    try:
        config = GenerationConfig.from_pretrained(run.model_name_or_path, revision=run.model_revision)
    except OSError:
        return
    config.save_pretrained(folder)


def write_card(checkpoint: Path, manifest: dict[str, Any], run: SimpleNamespace, folder: Path) -> None:
    """README.md: base model, data, arguments and what was measured."""
    data = ModelCardData(base_model=run.model_name_or_path, library_name="peft" if run.use_peft else "transformers")
    facts = {name: manifest[name] for name in ("step", "epoch", "tokens_seen", "eval_loss") if name in manifest}
    measured = read_metrics(checkpoint.parent / "metrics.jsonl")
    losses = [row["loss"] for row in measured if row.get("loss") is not None and row["step"] <= manifest["step"]]
    facts |= {"loss": losses[-1]} if losses else {}
    text = [f"---\n{data.to_yaml()}\n---", f"# {folder.name.removesuffix('.incomplete')}", ""]
    text += [f"Fine-tuned from `{run.model_name_or_path}` on `{run.dataset_name}` with FSDP2.", ""]
    text += ["| measured | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), ""]
    text += ["Arguments of the run:", "", "```json", json.dumps(manifest["arguments"], indent=1), "```", ""]
    text += ["Versions: " + ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())]
    ModelCard("\n".join(text) + "\n").save(folder / "README.md")
