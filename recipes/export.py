"""Write a checkpoint as a Hugging Face folder that plain transformers or peft loads.

    python recipes/export.py outputs/run1/checkpoint-500 --output_dir my_model
    python recipes/export.py outputs/lora/checkpoint-500 --output_dir merged --merge_adapter --dtype bfloat16

One process on a CPU, which holds one file of --max_shard_size at a time (and a block of the model), never all weights.

To copy it: the files that finetune.py names.
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import convert_file_size_to_int
from checkpoint import MANIFEST, read_manifest
from hf_folder import INDEX, WEIGHTS, save_generation_config, write_card, write_model
from huggingface_hub import HfApi
from model_loading import add_adapters, check_not_quantized, load_tokenizer
from resume import check_files
from safetensors import safe_open
from torch import nn
from training_state import checksum
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils.hub import cached_file

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPES |= {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint as a Hugging Face model.")
    parser.add_argument("checkpoint", type=Path, help="a checkpoint-STEP folder of a run")
    parser.add_argument("--output_dir", type=Path, required=True, help="a new folder")
    parser.add_argument("--merge_adapter", action="store_true", help="add a LoRA adapter to its base's weights")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; without it the base model's")
    parser.add_argument("--max_shard_size", default="5GB", help="of one safetensors file")
    parser.add_argument("--model_name_or_path", help="the base model, if it moved since the run")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that the model brings")
    parser.add_argument("--push_to_hub", metavar="REPO", help="upload the folder to this hub repository")
    arguments = parser.parse_args()
    try:
        export_checkpoint(**vars(arguments))
    except (ValueError, OSError) as error:
        sys.exit(f"Error: {error}")


def export_checkpoint(
    checkpoint: Path,
    output_dir: Path,
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
    check_files(checkpoint, check_hashes=False)
    if output_dir.exists():
        raise ValueError(f"--output_dir {output_dir} exists; name a new folder.")
    manifest = read_manifest(checkpoint)
    run = SimpleNamespace(**{**manifest["arguments"], "trust_remote_code": trust_remote_code})
    run.model_name_or_path = model_name_or_path or run.model_name_or_path
    if merge_adapter and not run.use_peft:
        raise ValueError(f"--merge_adapter: {checkpoint} holds a whole model, there is no adapter to merge.")
    model = meta_model(run)
    as_run = None if run.dtype == "auto" else run.dtype
    dtype = DTYPES[dtype or as_run] if dtype or as_run else model.config.dtype or torch.float32
    limit = convert_file_size_to_int(max_shard_size)
    incomplete = output_dir.with_name(output_dir.name + ".incomplete")
    shutil.rmtree(incomplete, ignore_errors=True)
    incomplete.mkdir(parents=True)
    try:
        write_folder(checkpoint, manifest, model, run, incomplete, merge_adapter, dtype, limit)
    except BaseException:
        shutil.rmtree(incomplete)
        raise
    incomplete.rename(output_dir)
    print(f"{output_dir}: {sum(p.stat().st_size for p in output_dir.iterdir()) / 2**20:,.1f} MiB")
    if push_to_hub:
        HfApi().create_repo(push_to_hub, exist_ok=True, private=True)
        print(HfApi().upload_folder(repo_id=push_to_hub, folder_path=output_dir))


def write_folder(
    checkpoint: Path,
    manifest: dict[str, Any],
    model: nn.Module,
    run: Any,
    folder: Path,
    merge_adapter: bool,
    dtype: torch.dtype,
    limit: int,
) -> None:
    """Weights, config, tokenizer and card, into an empty folder."""
    if run.use_peft and not merge_adapter:
        export_adapter(checkpoint, model, run, folder)
    else:
        tensors = saved_tensors(checkpoint, model)
        if merge_adapter:
            tensors = merged_tensors(checkpoint, model, run, manifest["frozen"])
        write_model(((name, t.to(dtype) if t.is_floating_point() else t) for name, t in tensors), folder, limit)
        model.config.dtype = dtype
        model.config.save_pretrained(folder)
        if getattr(model.config, "auto_map", None):
            custom_object_save(model, folder, config=model.config)
        save_generation_config(run, folder)
    load_tokenizer(run).save_pretrained(folder)
    write_card(checkpoint, manifest, run, folder)


def meta_model(run: Any) -> nn.Module:
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
    reader = dcp.HuggingFaceStorageReader(str(checkpoint / "model"))
    saved = reader.read_metadata().state_dict_metadata
    shapes = {name: tuple(facts.size) for name, facts in saved.items()}
    check_same_tensors(shapes, model, f"{checkpoint / 'model'}")
    pieces: dict[str, list[str]] = {}
    for name in saved:  # what a family merges on load lies in one block
        block = re.match(r".*?\.\d+\.", name)
        pieces.setdefault(block[0] if block else "", []).append(name)
    for names in pieces.values():
        piece = {name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype) for name in names}
        dcp.load(piece, storage_reader=reader, no_dist=True)
        yield from revert_weight_conversion(model, piece).items()


def check_same_tensors(shapes: dict[str, tuple[int, ...]], model: nn.Module, what: str) -> None:
    """Raise ValueError where tensors are not those of the model (a tied one may stand under either name)."""
    wanted = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    wrong = sorted(n for n in shapes.keys() | wanted.keys() - tied if shapes.get(n) != wanted.get(n))
    if wrong:
        raise ValueError(
            f"{what} and the base model are not the same: {wrong[0]} is {shapes.get(wrong[0], 'missing')} and "
            f"{wanted.get(wrong[0], 'missing')} ({len(wrong)} differ)."
        )


def merged_tensors(
    checkpoint: Path, model: nn.Module, run: Any, frozen: dict[str, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The base model's weights, file by file, with the adapter added: W + lora_alpha / lora_r * B A, in fp32.

    Raises:
        ValueError: the base is not the one that the adapter was trained on.
    """
    adapter, factors = read_all(checkpoint / "model"), {}
    for name in adapter:
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").partition(".lora_A.")[0]
            on_disk = revert_weight_conversion(model, {f"{module}.weight": torch.empty(1, 1, device="meta")})
            factors[next(iter(on_disk))] = adapter[name.replace("lora_A", "lora_B")], adapter[name]
    check_base(model, run, frozen)
    scale, added = run.lora_alpha / run.lora_r, set()
    for path in base_files(run):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                weight = file.get_tensor(name)
                if name in factors:
                    b, a = factors[name]  # (out, R), (R, in)
                    delta = scale * (b.float() @ a.float())
                    delta = delta.T if delta.shape != weight.shape else delta  # GPT-2's Conv1D is (in, out)
                    weight = weight.float() + delta
                    added.add(name)
                yield name, weight
    if added != set(factors):
        missing = sorted(set(factors) - added)
        raise ValueError(f"the base model's files do not hold {missing[0]}, which the adapter changes.")


def check_base(model: nn.Module, run: Any, frozen: dict[str, int]) -> None:
    """Raise ValueError where the base's weights are not those that were frozen in the run."""
    names = set(revert_weight_conversion(model, dict(model.named_parameters())))
    (dtype, expected), *others = frozen.items()
    if others:  # which weights were stored in which dtype is not known
        return
    found = 0
    for path in base_files(run):
        with safe_open(path, framework="pt") as file:
            for name in names & set(file.keys()):
                found += checksum(file.get_tensor(name).to(DTYPES[dtype])).item()
    if (found - expected) % 2**64:
        raise ValueError(
            f"the weights of {run.model_name_or_path} are not those that the adapter was trained on; "
            "--model_name_or_path names another base."
        )


def base_files(run: Any) -> list[Path]:
    """The safetensors files of the base model, local or from the hub's cache."""
    folder, revision = run.model_name_or_path, run.model_revision
    options = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    index = cached_file(folder, INDEX, **options)
    if index is not None:
        names = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
        return [Path(cached_file(folder, name, revision=revision)) for name in names]
    path = cached_file(folder, WEIGHTS, **options)
    if path is None:
        raise ValueError(f"{folder} holds no safetensors weights to merge into.")
    return [Path(path)]


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's folder, whole: for an adapter."""
    reader = dcp.HuggingFaceStorageReader(str(folder))
    saved = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(facts.size, dtype=facts.properties.dtype) for name, facts in saved.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def export_adapter(checkpoint: Path, model: nn.Module, run: Any, folder: Path) -> None:
    """adapter_model.safetensors and adapter_config.json, as peft reads them."""
    adapted = add_adapters(model, run)
    adapted.save_pretrained(folder, state_dict=read_all(checkpoint / "model"))


if __name__ == "__main__":
    main()
