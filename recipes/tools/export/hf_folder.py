"""A Hugging Face folder from a stream of tensors, and what lies beside the weights."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from safetensors.torch import save_file
from training.run_files import read_metrics
from transformers import GenerationConfig

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
