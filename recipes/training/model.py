"""Tokenizer, model and LoRA adapters, from a local folder or the hub.

A model is built without memory, with its adapters; its weights are read once it is sharded: weights.py.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from hooks.private_transformers import opening_with
from hooks.structure import set_use_cache
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils import cached_file

from .arguments import FinetuneArguments
from .on_demand import tool
from .weights import Weights


def load_tokenizer(arguments: FinetuneArguments) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer. Raises ValueError where it is missing or slow (no character offsets)."""
    name = arguments.model_name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, revision=arguments.model_revision, trust_remote_code=arguments.trust_remote_code
        )
    except Exception as error:  # from_pretrained raises many kinds; all of them mean that nothing was loaded
        hint = "" if os.path.isdir(name) else "no such local folder, and as a hub name "
        raise ValueError(f"--model_name_or_path {name}: {hint}no tokenizer could be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"--model_name_or_path {name}: needs a fast tokenizer (tokenizer.json) to place the label mask."
        )
    if tokenizer.pad_token_id is None:  # it only fills rows: masks come from lengths
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    for name in ("local_files_only", "is_local"):  # how it was loaded, which an export would say of itself
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


@contextmanager
def open_model(arguments: FinetuneArguments, say: Callable[[str], object]) -> Iterator[tuple[nn.Module, Weights]]:
    """The model in training mode with its cache off, without memory, and its weights, which are read once it is sharded
    (`Weights.fill`, inside the block). Of files that are not safetensors the model as it was saved, on the CPU: inside
    the block it is this rank's turn on its machine.

    Raises:
        ValueError: it cannot be loaded, is quantized, or weights are missing on disk and would be random.
    """
    weights = Weights()
    try:
        yield build_without_memory(arguments, weights, say), weights
    finally:
        weights.end_turn()


def build_without_memory(arguments: FinetuneArguments, weights: Weights, say: Callable[[str], object]) -> nn.Module:
    """What open_model says."""
    name = arguments.model_name_or_path
    source = {"revision": arguments.model_revision, "trust_remote_code": arguments.trust_remote_code}
    try:
        if arguments.trust_remote_code:  # its files are copied to where Python imports them from
            weights.take_turn()
        config = AutoConfig.from_pretrained(name, **source)
        check_not_quantized(config)
        with opening_with(weights.open):
            model, info = AutoModelForCausalLM.from_pretrained(
                name,
                config=config,
                dtype="auto",
                **source,
                attn_implementation=arguments.attn_implementation,
                output_loading_info=True,
            )
    except Exception as error:
        raise ValueError(f"--model_name_or_path {name} could not be loaded: {type(error).__name__}: {error}") from error
    if info["missing_keys"] or info["mismatched_keys"]:
        bad = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
        raise ValueError(f"--model_name_or_path {name}: {len(bad)} weights are missing or misshapen, such as {bad[0]}.")
    set_use_cache(model, False)  # a recomputed block would fill the cache a second time
    model.config.dtype = saved_dtype(model)  # what to export in, unless another is named
    if weights.slices:
        weights.remember(model)
        weights.end_turn()
    else:
        say(f"note: {name} has no safetensors files: each rank loads the whole model, one at a time on each machine")
    return model.train()


def weight_files(arguments: FinetuneArguments) -> dict[str, int | str]:
    """The bytes of each safetensors file that the model was loaded from, of one from the hub its commit too; or why
    they cannot be told."""
    name, found = arguments.model_name_or_path, {}
    try:
        folder = Path(name)
        if not folder.is_dir():
            config = cached_file(name, "config.json", revision=arguments.model_revision, local_files_only=True)
            folder = Path(config).parent
            found["commit"] = folder.name
        return found | {path.name: path.stat().st_size for path in sorted(folder.glob("*.safetensors"))}
    except OSError as error:
        return {"error": str(error)}


def dtype_named(name: str) -> torch.dtype | None:
    """The dtype of --dtype, None for auto."""
    return None if name == "auto" else getattr(torch, name)


def check_not_quantized(config: PreTrainedConfig) -> None:
    """Raise ValueError for a checkpoint saved in 8 or 4 bits: FSDP2 cannot shard and train packed integers."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise ValueError(
            f"the weights are quantized ({method}), and packed integers cannot be sharded, reduced and trained here. "
            "Use the unquantized checkpoint; with --use_peft its frozen weights stay bf16, sharded."
        )


def add_adapters(model: nn.Module, arguments: FinetuneArguments) -> nn.Module:
    """Freeze the model and add LoRA adapters if --use_peft, made in fp32 from the current random state.

    Raises:
        ValueError: --lora_target_modules matches nothing, or parameters whose adapters take no dropout.
    """
    if not arguments.use_peft:
        return model
    targets = arguments.lora_target_modules
    config = LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():  # peft 0.21 reads a name that transformers deprecates
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            with on_cpu_without_memory(model):
                adapted = get_peft_model(model, config, revision=arguments.model_revision).train()
    except ValueError as error:
        if "lora_dropout" in str(error):  # adapters of parameters that belong to no layer of their own (experts)
            raise ValueError(f"--lora_dropout {arguments.lora_dropout}: {error} Use --lora_dropout 0.") from error
        raise ValueError(f"--lora_target_modules {' '.join(targets)}: {error}") from error
    if os.path.isdir(arguments.model_name_or_path):  # the adapter must find its base from anywhere
        adapted.peft_config["default"].base_model_name_or_path = os.path.abspath(arguments.model_name_or_path)
    return adapted


@contextmanager
def on_cpu_without_memory(model: nn.Module) -> Iterator[None]:
    """Inside, parameters on the meta device are on the CPU, one number each: peft makes adapters where the weights are,
    and those need values."""
    stands_for = {
        p: nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape), p.requires_grad)
        for p in model.parameters()
        if p.is_meta
    }
    replace_parameters(model, stands_for)
    yield
    replace_parameters(model, {new: nn.Parameter(old.detach(), new.requires_grad) for old, new in stands_for.items()})


def replace_parameters(model: nn.Module, others: dict[nn.Parameter, nn.Parameter]) -> None:
    """Put others in the place of parameters; tied ones stay tied."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in others:
                setattr(module, name, others[parameter])


def check_architecture(model: nn.Module, packing: bool, say: Callable[[str], object]) -> None:
    """Raise ValueError where positions see later ones or, under --packing, documents see each other: measured by a tool
    on a tiny model of this architecture."""
    goes_without = "check that positions see no later ones" + (", and documents not each other" if packing else "")
    architecture = tool("proof.architecture", goes_without, say)
    if architecture is not None:
        architecture.check_architecture(model.config, packing)


def check_rows(model: nn.Module, *data_sets: Dataset | None) -> None:
    """Raise ValueError for a token that the embedding does not have, or rows longer than a learned position table (a
    rotary model may go beyond its length)."""
    longest = largest = 0
    for rows in data_sets:
        for batch in rows.with_format("arrow").iter(10_000) if rows is not None else ():
            ids = batch["input_ids"].combine_chunks()
            longest = max(longest, int(np.diff(ids.offsets.to_numpy()).max()))
            largest = max(largest, int(ids.flatten().to_numpy().max()))
    limit = learned_positions(model)
    if limit is not None and longest > limit:
        raise ValueError(
            f"the longest row has {longest} tokens, but this model has {limit} positions: --max_length {limit}"
        )
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if largest >= vocabulary:
        raise ValueError(
            f"the tokenizer made token {largest}, but the model's embedding has {vocabulary} rows: the tokenizer in "
            "--model_name_or_path does not belong to these weights."
        )


def learned_positions(model: nn.Module) -> int | None:
    """Length of a learned position table, None for a model without one (a rotary model may go beyond its length)."""
    limit = getattr(model.config, "max_position_embeddings", None)
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    vocabulary = model.get_input_embeddings().weight.shape[0]
    is_learned = limit is not None and any(size in range(limit, limit + 4) and size != vocabulary for size in tables)
    return limit if is_learned else None


def saved_dtype(model: nn.Module) -> torch.dtype:
    """The dtype that most of the model's parameters have on disk: the dtype to export in under --dtype auto."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=counts.get)
