"""The trained model as a Hugging Face folder."""

import torch
from accelerate import Accelerator
from model_structure import base_model, set_use_cache
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import PreTrainedTokenizerBase


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
