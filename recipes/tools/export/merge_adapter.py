"""A LoRA adapter added to its base model's weights, one file of the base at a time.

R rank of the adapter; a linear layer's weight is (out, in).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import safe_open
from saving.private_transformers import as_on_disk
from saving.state import checksum
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, has_file


def merged_tensors(
    adapter: dict[str, torch.Tensor], model: nn.Module, run: SimpleNamespace, frozen: dict[str, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The base model's weights, file by file, with the adapter added: W + lora_alpha / lora_r * B A, in fp32.

    Raises:
        ValueError: the base is not the one that the adapter was trained on, or adapters of other than linear layers.
    """
    files = base_files(run)
    names = names_on_disk(model, files)
    check_base(run, files, names, frozen)
    factors = {}
    for name, value in adapter.items():
        module = name.removeprefix("base_model.model.").partition(".lora_")[0]
        layer = dict(model.named_modules()).get(module)
        if not isinstance(layer, (nn.Linear, Conv1D)) or f"{module}.weight" not in names or ".lora_" not in name:
            raise ValueError(
                f"--merge_adapter: {name} does not adapt a linear layer of its own (experts and embeddings do not); "
                "export without it, load base and adapter in peft, and merge_and_unload() there."
            )
        if ".lora_A." in name:
            is_transposed = isinstance(layer, Conv1D)  # GPT-2 stores (in, out)
            factors[names[f"{module}.weight"]] = adapter[name.replace(".lora_A.", ".lora_B.")], value, is_transposed
    scale = run.lora_alpha / run.lora_r
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                weight = file.get_tensor(name)
                if name in factors:
                    b, a, is_transposed = factors[name]  # (out, R), (R, in)
                    delta = scale * (b.float() @ a.float())
                    weight = weight.float() + (delta.T if is_transposed else delta)
                yield name, weight


def names_on_disk(model: nn.Module, files: list[Path]) -> dict[str, str]:
    """Name of each parameter -> its name in the files, where it has one of its own (experts may be merged on load)."""
    stored: set[str] = set()
    for path in files:
        with safe_open(path, framework="pt") as file:
            stored |= set(file.keys())
    names = {}
    for name, parameter in model.named_parameters():
        for found in as_on_disk(model, {name: parameter}):
            # Older files (GPT-2's) leave out the name of the decoder.
            for candidate in (found, found.removeprefix(f"{model.base_model_prefix}.")):
                if candidate in stored:
                    names[name if name not in names else f"{name} {candidate}"] = candidate
                    break
    return names


def check_base(run: SimpleNamespace, files: list[Path], names: dict[str, str], frozen: dict[str, int]) -> None:
    """Raise ValueError where the base's weights are not those that were frozen in the run."""
    (dtype, expected), *others = frozen.items()
    if others:
        print("note: the base's weights were frozen in several dtypes; that they are the same was not checked")
        return
    found = 0
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in set(names.values()) & set(file.keys()):
                found += checksum(file.get_tensor(name).to(getattr(torch, dtype))).item()
    if (found - expected) % 2**64:
        raise ValueError(
            f"the weights of {run.model_name_or_path} are not those that the adapter was trained on; "
            "--model_name_or_path names another base."
        )


def base_files(run: SimpleNamespace) -> list[Path]:
    """The safetensors files of the base model, local or from the hub's cache."""
    folder, revision = run.model_name_or_path, run.model_revision
    if has_file(folder, SAFE_WEIGHTS_INDEX_NAME, revision):
        index = cached_file(folder, SAFE_WEIGHTS_INDEX_NAME, revision=revision)
        names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
        return [Path(cached_file(folder, name, revision=revision)) for name in names]
    if not has_file(folder, SAFE_WEIGHTS_NAME, revision):
        raise ValueError(f"{folder} holds no safetensors weights to merge into.")
    return [Path(cached_file(folder, SAFE_WEIGHTS_NAME, revision=revision))]
