"""Mixtures of experts whose number the ranks do not divide, against one unsharded process; JSON to OUT.

    save FOLDER    a checkpoint of each plain run, and its tensors whole
    load FOLDER    these checkpoints, and whether every tensor is as it was saved

The tests run it in forked ranks (cells.py). A case is one of the proof's (tools/proof), and goes through the script's
own loop.
"""

import dataclasses
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import finetune
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from exactness_worker import command_line
from hooks.config import HookConfig
from hooks.live import cut_of, read_units
from safetensors.torch import load_file, save_file
from saving.checkpoint import CheckpointWriter
from saving.resume import load_checkpoint
from saving.state import LiveState, checksum, frozen_checksum, training_tensors
from tiny_models import count_all_padding, tiny_mixtral
from tools.proof import runs
from tools.proof.cases import BALANCING_CASE, TOLERANCE, Case, compare, reference_key
from torch import nn
from torch.distributed.tensor import DTensor
from training.arguments import FinetuneArguments
from training.launch import end, make_accelerator
from training.model import add_adapters
from transformers import GptOssConfig, GptOssForCausalLM

FULL = Case("full", recompute=True, accumulation=3)
LORA = Case("LoRA", recompute=True, use_peft=True)
IN_BF16 = {"hook_param_dtype": "bf16"}
TWO_BLOCKS = {"hook_wrap_blocks_per_unit": 2, "fsdp_reshard_after_forward": False, "hook_wrap_embeddings": True}
KEYS = {  # what else the YAML says, and the case
    "plain": ({}, FULL),
    "balancing": ({}, BALANCING_CASE),
    "bf16": (IN_BF16, dataclasses.replace(FULL, is_policy=True)),
    "parameters offloaded": ({"fsdp_offload_params": True}, FULL),
    "optimizer offloaded": ({"hook_offload_optimizer": True}, FULL),
    "two blocks, not resharded": (TWO_BLOCKS, FULL),
    "LoRA": ({}, LORA),
    "LoRA, bf16": (IN_BF16, dataclasses.replace(LORA, is_policy=True)),
}
SOME = ("plain", "bf16", "LoRA")
FACTS = {"arguments": {}, "yaml": {}, "data": "", "model": "", "frozen": {}, "rows_per_step": 1}  # a manifest's


def gpt_oss(experts: int) -> nn.Module:
    """Experts that are stored the other way round, with biases; a tied embedding whose rows neither 3 nor 4 divide."""
    sizes = {"hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 97, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True, "num_experts_per_tok": 2}
    config = GptOssConfig(**sizes, **heads, num_local_experts=experts, initializer_range=0.1, pad_token_id=None)
    return GptOssForCausalLM(config)


def built(family: Callable[[int], nn.Module], experts: int, case: Case) -> nn.Module:
    """A model as the scripts make it of what is loaded, with the same weights on every rank."""
    set_seed(0)
    model = family(experts)
    model.config.use_cache, model.config.output_router_logits = False, case.balances
    arguments = FinetuneArguments(model_name_or_path="", use_peft=case.use_peft, lora_r=4, lora_alpha=8, lora_dropout=0)
    arguments.lora_target_modules = ["w1", "w2", "w3", "q_proj"]  # Mixtral's experts, by their names on disk
    model = add_adapters(model.train(), arguments)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at the start: the gradient of lora_A would be zero too
            nn.init.normal_(parameter, std=0.02)
    return model


def run_case(
    build: Callable[[Case], nn.Module], config: HookConfig, case: Case, accelerator: Accelerator, references: dict
) -> tuple[LiveState, dict]:
    """The sharded run, and what the proof says of it beside the unsharded one (`references`: made once of a model)."""
    key = reference_key(case, config)
    if key not in references:
        references |= runs.shared_references({key: case}, {case: config}, build)
    reference = references[key]
    if isinstance(reference, runs.Failure):
        raise RuntimeError(reference.described)
    live = runs.prepared(build(case), config, accelerator, case)
    found = runs.train(live, config, case, reference)
    units, parameters = read_units(live.model), dict(live.model.named_parameters())
    facts = {
        "dims": {name: cut_of(parameter)[0] for name, parameter in parameters.items()},
        "padding": sum(unit["gathered_parameters"] for unit in units) / sum(unit["parameters"] for unit in units) - 1,
        "stored": sorted({str(parameter.dtype) for parameter in parameters.values()}),
        "trained": [name for name, parameter in parameters.items() if parameter.requires_grad],
        "tied": live.model.get_output_embeddings().weight is live.model.get_input_embeddings().weight,
    }
    if case.use_peft:
        facts["frozen"], expected = frozen_checksum(live.model), 0
        for name, parameter in build(case).named_parameters():
            if not parameter.requires_grad:
                expected += checksum(parameter.to(parameters[name].dtype)).item()
        facts["frozen_unsharded"] = expected
    judged = compare(case, found, reference, config.hook_param_dtype, TOLERANCE)
    return live, vars(judged) | facts


def whole(live: LiveState) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint in full."""
    tensors = training_tensors(live.model, live.optimizer)
    named = {f"{kind} {name}": value for kind, held in tensors.items() for name, value in held.items()}
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).clone().contiguous() for n, v in named.items()}


def save(live: LiveState, folder: Path, is_main: bool) -> None:
    """A checkpoint in a folder, and its tensors whole beside it."""
    options = SimpleNamespace(
        output_dir=str(folder), save_total_limit=None, load_best_model_at_end=False, async_save=False, on_save_error=""
    )
    folder.mkdir(exist_ok=True)
    live.state["step"] = 3
    CheckpointWriter(live, options, FACTS).save()
    tensors = whole(live)
    if is_main:
        save_file(tensors, folder / "whole.safetensors")


def loaded(live: LiveState, folder: Path) -> dict:
    """{same: tensors that are as they were saved, to the last bit; other: those that are not}."""
    expected = load_file(folder / "whole.safetensors")
    before = whole(live)
    load_checkpoint(live, folder / "checkpoint-3")
    found = whole(live)
    assert found.keys() == expected.keys()
    same = [name for name in found if torch.equal(found[name], expected[name])]
    changed = [name for name in found if not torch.equal(found[name], before[name])]
    return {"same": same, "other": sorted(found.keys() - set(same)), "changed": changed}


def main() -> None:
    out, (action, folder), base = command_line()
    gc.disable()
    finetune.memory = lambda device: {"live_tensors_gib": 0.0}  # counting live tensors costs more than a tiny step
    count_all_padding()
    accelerator = make_accelerator(base)
    is_main = accelerator.is_main_process
    results: dict = {"cases": {}, "loaded": {}}
    for family, experts, names in ((tiny_mixtral, 2, KEYS), (tiny_mixtral, 8, SOME), (gpt_oss, 5, SOME)):
        references: dict = {}

        def build(case: Case, family: Callable = family, experts: int = experts) -> nn.Module:
            return built(family, experts, case)

        own = f"{family.__name__}, {experts} experts"
        for name in names:
            keys, case = KEYS[name]
            config = dataclasses.replace(base, **{"hook_param_dtype": "fp32", **keys})
            live, found = run_case(build, config, case, accelerator, references)
            results["cases"][f"{own}, {name}"] = found
            if name == "plain" and action == "save":
                save(live, Path(folder, own), is_main)
        if action == "load":
            config = dataclasses.replace(base, hook_param_dtype="fp32", hook_offload_optimizer=True)
            live = runs.prepared(build(FULL), config, accelerator, FULL)
            results["loaded"][own] = loaded(live, Path(folder, own))
            accelerator.free_memory()  # Accelerate compares parameter lists, and two models' cannot be compared
    if is_main:
        out.write_text(json.dumps(results, indent=1))
    end(accelerator)


if __name__ == "__main__":
    main()
