"""The live model as a Hugging Face folder."""

import shutil
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedTokenizerBase


def export_model(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype, is_main_process: bool
) -> None:
    """Write the live model (or, for LoRA, the adapter alone) so that plain transformers / peft loads it.

    Weights are gathered to rank 0's host memory, cast to `dtype` (an adapter stays fp32, tied weights are stored once),
    and written as safetensors beside the tokenizer. The folder appears when it is complete. What the
    config says goes with it: switch on first what training has switched off (use_cache). A collective.
    """
    is_adapter = hasattr(model, "peft_config")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=is_adapter)
    weights = get_model_state_dict(model, options=options)  # empty on all ranks but the first
    if not is_main_process:
        return
    incomplete = folder.with_name(folder.name + ".incomplete")
    shutil.rmtree(incomplete, ignore_errors=True)
    if not is_adapter:
        weights = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
        for name in getattr(model, "all_tied_weights_keys", None) or ():
            weights.pop(name, None)
    sharded_class = type(model)
    if not is_adapter:  # a hub model's own code is saved
        model.__class__ = next(kind for kind in sharded_class.__mro__ if not issubclass(kind, FSDPModule))
    try:
        model.save_pretrained(incomplete, state_dict=weights)
        if not is_adapter:
            model.config.dtype = dtype  # save_pretrained wrote the dtype of the fp32 masters
            model.config.save_pretrained(incomplete)
        tokenizer.save_pretrained(incomplete)
    except Exception as error:
        shutil.rmtree(incomplete, ignore_errors=True)
        hint = "export.py makes it from a checkpoint, if the run saved one"
        raise OSError(f"{folder} could not be written: {error}; {hint}.") from error
    finally:
        model.__class__ = sharded_class
    if folder.exists():
        shutil.rmtree(folder)
    incomplete.rename(folder)
