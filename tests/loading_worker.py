"""Load models a slice per rank, and note what was read and held: loading_worker.py RESULT FOLDER [FOLDER ...].

Each folder holds a model. RESULT gets, by folder's name and from every rank: what differs from the model that
transformers loads whole, the bytes read of the files, those of the rank's shards, those of its largest unit, and how
far private memory rose above what it was before. With --whole each rank loads the whole model and cuts it, instead.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from hooks.apply import apply_hooks, plan_hooks
from hooks.config import read_hook_config
from hooks.live import read_units
from hooks.wrap import local
from launching import CONFIGS, private_bytes
from tools.proof.cases import exact_config
from training import weights
from training.arguments import FinetuneArguments
from training.launch import end, make_accelerator, make_device_mesh
from training.model import open_model
from transformers import AutoModelForCausalLM
from utils import precision_policies


class CountedFile:
    """A safetensors file that counts the bytes read of it."""

    read = 0

    def __init__(self, path: str, framework: str) -> None:
        self.file = SAFE_OPEN(path, framework=framework)
        self.keys = self.file.keys

    def get_slice(self, key: str) -> "CountedSlice":
        return CountedSlice(self.file.get_slice(key))


class CountedSlice:
    """A tensor of it."""

    def __init__(self, found: object) -> None:
        self.found, self.get_shape, self.get_dtype = found, found.get_shape, found.get_dtype

    def __getitem__(self, part: object) -> torch.Tensor:
        tensor = self.found[part]
        CountedFile.read += tensor.nbytes
        return tensor


SAFE_OPEN = weights.safe_open


def load(folder: str, mesh: object, config: object) -> dict:
    """What a rank found while it loaded a model."""
    before, peak, CountedFile.read = private_bytes(), [0], 0
    put = weights.put

    def put_and_look(*arguments: object) -> None:
        put(*arguments)
        peak[0] = max(peak[0], private_bytes())

    weights.put = put_and_look
    with open_model(FinetuneArguments(model_name_or_path=folder), print) as (model, files):
        held = sum(p.untyped_storage().nbytes() for p in model.parameters() if not p.is_meta)
        apply_hooks(model, plan_hooks(model, config), config, mesh, precision_policies(config))
        files.fill(torch.device("cpu"), False)
    weights.put = put
    units = [unit["parameters"] * 4 for unit in read_units(model)]
    shards = sum(local(p).nbytes for p in model.parameters())
    found = {"held_at_first": held, "read": CountedFile.read, "shards": shards, "unit": max(units)}
    return found | {"rose": peak[0] - before, "different": differences(model, folder)}


def load_whole(folder: str, mesh: object, config: object) -> dict:
    """The same of a rank that loads as transformers does: all of the files."""
    before, size = private_bytes(), sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").train()
    loaded = private_bytes()
    apply_hooks(model, plan_hooks(model, config), config, mesh, precision_policies(config))
    return {"read": size, "rose": max(loaded, private_bytes()) - before}


def differences(model: torch.nn.Module, folder: str) -> list[str]:
    """Names of tensors that are not this rank's slices of the whole model's."""
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    mine, theirs = tensors_of(model), tensors_of(whole)
    wrong = [name for name in mine.keys() | theirs.keys() if (name in mine) != (name in theirs)]
    wrong += ["ties"] if ties(mine) != ties(theirs) else []
    both = (name for name in mine if name in theirs)
    expected = {name: weights.own_slice(theirs[name].detach(), mine[name]) for name in both}
    return wrong + [name for name, part in expected.items() if not is_same(local(mine[name].detach()), part)]


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, tied ones under each."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def ties(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """Names of one tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def is_same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """The same shape and values; masters are fp32."""
    return mine.device == theirs.device and mine.shape == theirs.shape and torch.equal(mine, theirs.to(mine.dtype))


def main() -> None:
    result, *folders = sys.argv[1 : sys.argv.index("--accelerate_config")]
    is_whole = folders[-1] == "--whole"
    weights.safe_open = CountedFile
    config = exact_config(read_hook_config(str(CONFIGS / "default.yaml")))
    accelerator = make_accelerator(config)
    mesh, found = make_device_mesh(accelerator), {}
    for folder in folders[: -1 if is_whole else None]:
        own = (load_whole if is_whole else load)(folder, mesh, config)
        found[Path(folder).name] = [None] * accelerator.num_processes
        dist.all_gather_object(found[Path(folder).name], own)
    if accelerator.is_main_process:
        Path(result).write_text(json.dumps(found))
    end(accelerator)


if __name__ == "__main__":
    main()
