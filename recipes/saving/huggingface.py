"""A Hugging Face folder: weights from the live shards or from a stream of tensors, and what lies beside them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from hooks.structure import base_model, set_use_cache
from huggingface_hub import ModelCard, ModelCardData
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from training.metrics import read_metrics
from transformers import GenerationConfig, PreTrainedTokenizerBase

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"  # the names that transformers reads


def write_model(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path, limit: int) -> None:
    """Write tensors as they come, in files of at most `limit` bytes, with the index that names each one's file."""
    files: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    size = total = 0

    def write() -> None:
        save_file(held, folder / f"part-{len(files)}", metadata={"format": "pt"})
        files.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > limit:
            write()
            size = 0
        held[name] = tensor.contiguous()
        size, total = size + tensor.nbytes, total + tensor.nbytes
    write()
    names = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    names = [WEIGHTS] if len(files) == 1 else names
    for i, name in enumerate(names):
        (folder / f"part-{i}").rename(folder / name)
    if len(files) > 1:
        index = {n: name for name, held_names in zip(names, files) for n in held_names}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2, sort_keys=True)
        (folder / INDEX).write_text(text + "\n", encoding="utf-8")


def save_generation_config(run: Any, folder: Path) -> None:
    """The base model's generation config, where it has one."""
    try:
        config = GenerationConfig.from_pretrained(run.model_name_or_path, revision=run.model_revision)
    except OSError:
        return
    config.save_pretrained(folder)


def write_card(checkpoint: Path, manifest: dict[str, Any], run: Any, folder: Path) -> None:
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


def export_model(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype, is_main_process: bool
) -> None:
    """Write the live model (or, for LoRA, the adapter alone) so that plain transformers / peft loads it.

    Weights are gathered to rank 0's host memory, cast to `dtype` (an adapter stays fp32, tied weights are stored once),
    and written as safetensors beside the tokenizer. The folder appears when it is complete. A collective.
    """
    is_adapter = hasattr(model, "peft_config")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=is_adapter)
    weights = get_model_state_dict(model, options=options)  # empty on all ranks but the first
    if not is_main_process:
        return
    incomplete = folder.with_name(folder.name + ".incomplete")
    shutil.rmtree(incomplete, ignore_errors=True)
    config = base_model(model).config
    set_use_cache(model, True)
    if not is_adapter:
        weights = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
        for name in getattr(model, "all_tied_weights_keys", None) or ():
            weights.pop(name, None)
    sharded_class = type(model)
    if not is_adapter:
        model.__class__ = sharded_class.__mro__[2]  # [FSDPName, FSDPModule, Name]: a hub model's own code is saved
    try:
        model.save_pretrained(incomplete, state_dict=weights)
        if not is_adapter:
            config.dtype = dtype  # save_pretrained wrote the dtype of the fp32 masters
            config.save_pretrained(incomplete)
        tokenizer.save_pretrained(incomplete)
    except Exception as error:
        shutil.rmtree(incomplete, ignore_errors=True)
        hint = "recipes/export.py makes it from a checkpoint, if the run saved one"
        raise OSError(f"{folder} could not be written: {error}; {hint}.") from error
    finally:
        model.__class__ = sharded_class
    set_use_cache(model, False)
    if folder.exists():
        shutil.rmtree(folder)
    incomplete.rename(folder)
