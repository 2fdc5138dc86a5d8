"""Training state on disk: sharded checkpoints to resume from, and the final Hugging Face folder."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from model_structure import base_model, set_use_cache
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import PreTrainedTokenizerBase

MANIFEST = "manifest.json"


def save_checkpoint(accelerator: Accelerator, output_dir: str, state: dict[str, Any], limit: int | None) -> Path:
    """Write model, optimizer, schedule and random state of every rank to output_dir/checkpoint-STEP.

    Written beside its final name, marked complete with a manifest, renamed, and only then are the oldest ones pruned:
    what a kill leaves behind is never taken for a checkpoint. Every rank must call it.
    """
    final = Path(output_dir, f"checkpoint-{state['step']}")
    temporary = final.with_name(final.name + ".incomplete")
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(temporary))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_synced(temporary / MANIFEST, json.dumps({**state, "world_size": accelerator.num_processes}))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        complete = complete_checkpoints(output_dir)
        for old in complete[: -limit or None] if limit else []:
            if old != final:  # a folder may hold later steps of another run
                shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return final


def write_synced(path: Path, text: str) -> None:
    """Write a file and wait until the disk has it."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def complete_checkpoints(output_dir: str) -> list[Path]:
    """Complete checkpoints in a run's folder, oldest step first."""
    found = [path.parent for path in Path(output_dir).glob(f"checkpoint-*/{MANIFEST}") if path.parent.suffix == ""]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def find_checkpoint(name: str, output_dir: str) -> Path:
    """Return the checkpoint to resume from. `latest` (or True) is the newest complete one of this output folder.

    Raises:
        ValueError: there is none, or the named folder is not a complete checkpoint.
    """
    complete = complete_checkpoints(output_dir)
    if name.lower() in ("latest", "true"):
        if not complete:
            raise ValueError(f"--resume_from_checkpoint {name}: no complete checkpoint in {output_dir}.")
        return complete[-1]
    if not Path(name, MANIFEST).is_file():
        known = ", ".join(path.name for path in complete) or "none"
        raise ValueError(f"--resume_from_checkpoint {name}: not a complete checkpoint. In {output_dir}: {known}.")
    return Path(name)


def check_no_checkpoints(output_dir: str) -> None:
    """Raise ValueError if a new run would write its checkpoints among those of an earlier one."""
    found = complete_checkpoints(output_dir)
    if found:
        raise ValueError(
            f"--output_dir {output_dir} holds {found[-1].name} of an earlier run. Continue it with "
            "--resume_from_checkpoint latest, or choose another folder."
        )


def resume(accelerator: Accelerator, checkpoint: Path) -> dict[str, Any]:
    """Load a checkpoint into the prepared objects, and return the state it was saved with (step, data position)."""
    state = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    if accelerator.scaler is not None:  # loading steps the optimizer once, and the scaler is made at its first use
        accelerator.scaler.scale(torch.zeros((), device=accelerator.device))
    accelerator.load_state(str(checkpoint))
    return state


def export_model(
    accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: str, dtype: torch.dtype
) -> None:
    """Write the model (or, for LoRA, the adapter alone) so that plain transformers / peft loads it.

    Weights are gathered to rank 0's host memory, cast to `dtype` (an adapter stays fp32, tied weights are stored once),
    and written as safetensors beside the tokenizer. Every rank must call it.
    """
    is_adapter = hasattr(model, "peft_config")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=is_adapter)
    weights = get_model_state_dict(model, options=options)  # empty on all ranks but the first
    if accelerator.is_main_process:
        config = base_model(model).config
        set_use_cache(model, True)
        if not is_adapter:
            weights = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
            for name in getattr(model, "all_tied_weights_keys", None) or ():
                weights.pop(name, None)
        sharded_class = type(model)
        if not is_adapter:
            model.__class__ = sharded_class.__mro__[2]  # [FSDPName, FSDPModule, Name]: a hub model's own code is saved
        model.save_pretrained(folder, state_dict=weights)
        model.__class__ = sharded_class
        if not is_adapter:
            config.dtype = dtype  # save_pretrained wrote the dtype of the fp32 masters
            config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        set_use_cache(model, False)
    accelerator.wait_for_everyone()
