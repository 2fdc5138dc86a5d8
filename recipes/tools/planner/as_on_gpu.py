"""What lets a script's step be planned as a GPU would run it: its model without weights, attention as on a GPU, what is
left out, and stand-ins for what needs the real thing.

A step runs on fake CPU tensors. transformers takes a fake tensor for one that is being traced, and offloading copies to
a host that a CPU run cannot tell from its device.
"""

import contextlib
import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from hooks.structure import set_use_cache
from torch import nn
from training.arguments import FinetuneArguments
from training.model import check_not_quantized, learned_positions
from training.optimizer import OffloadedAdamW
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..private_transformers import attention_of, saving_with, supports_attention, with_attention, without_packed_mask
from ..proof.architecture import check_architecture, flash_isolation
from .memory_trace import MemoryTrace

STAND_IN = "without_mask"


def load_without_weights(arguments: FinetuneArguments) -> nn.Module:
    """The model as training.model.open_model would give it, from its config alone."""
    source = {"revision": arguments.model_revision, "trust_remote_code": arguments.trust_remote_code}
    config = AutoConfig.from_pretrained(arguments.model_name_or_path, **source)
    check_not_quantized(config)
    dtype = config.dtype or config.get_text_config().dtype or torch.bfloat16  # bf16 where none is named
    options = {"dtype": dtype, "trust_remote_code": arguments.trust_remote_code}
    if uses_flash(arguments):  # stood in for: settle_attention
        try:
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa", **options)
        except ValueError:  # a family without it
            model = AutoModelForCausalLM.from_config(config, **options)
    else:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=arguments.attn_implementation, **options)
    set_use_cache(model, False)
    return model.train()


def leave_meta(model: nn.Module) -> None:
    """Give a model on the meta device fake tensors of the CPU in place; tied ones stay tied.

    nn.Module.to_empty would untie them, and peft cannot move fake parameters.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if value not in made:
                made[value] = torch.empty_like(value, device="cpu")
                if isinstance(value, nn.Parameter):
                    made[value] = nn.Parameter(made[value], value.requires_grad)
            setattr(module, name, made[value])


def settle_attention(arguments: FinetuneArguments, compute_dtype: str, model: nn.Module) -> None:
    """Give a model the attention that a GPU with flash-attn would run, under its name in `arguments`: the named one, or
    flash attention where finetune_performance.py chooses it by itself (training/kernels.py).

    In flash attention's place stands torch's own without a mask, which keeps the same tensors.

    Raises:
        ValueError: packed documents would see each other.
    """
    chooses = hasattr(arguments, "torch_compile") and arguments.attn_implementation is None
    fits = arguments.packing and arguments.per_device_train_batch_size == 1 and compute_dtype in ("bf16", "fp16")
    with contextlib.suppress(Exception):  # a family of which no tiny model can be built
        if chooses and fits and supports_attention(model, "flash_attn") and flash_isolation(model.config) == "isolated":
            arguments.attn_implementation = "flash_attention_2"
    if arguments.packing:
        attention = arguments.attn_implementation or attention_of(model.config)
        check_architecture(with_attention(model.config, attention), packing=True)
    if uses_flash(arguments) and not supports_attention(model, "sdpa"):  # whose own is eager: it holds T x T scores
        AttentionInterface.register(STAND_IN, without_mask)
        model.set_attn_implementation(STAND_IN)


def without_mask(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Attention that keeps what flash attention keeps: sinks and soft caps, left out here, would keep no more."""
    options = {name: kwargs[name] for name in ("scaling", "dropout") if name in kwargs}
    return sdpa_attention_forward(module, query, key, value, None, **options)


def settle_length(arguments: FinetuneArguments, model: nn.Module) -> list[str]:
    """Cut `max_length` to a table of learned positions, which no unpacked row goes beyond; returns the note on it."""
    limit = learned_positions(model)
    if arguments.packing or limit is None or arguments.max_length <= limit:
        return []
    arguments.max_length = limit
    return [f"rows counted with {limit} tokens: the model has no more positions"]


def reads_documents(arguments: FinetuneArguments) -> bool:
    """Whether attention is handed a mask of the documents in a packed row."""
    return arguments.packing and not uses_flash(arguments)


def uses_flash(arguments: FinetuneArguments) -> bool:
    """Whether a GPU's attention would be flash attention: it is handed no mask."""
    return (arguments.attn_implementation or "").startswith("flash")


def notes_on(arguments: FinetuneArguments, is_padded: bool, traced: int) -> list[str]:
    """What is counted otherwise than it would run, or refused."""
    notes = []
    if getattr(arguments, "optim", "adamw_torch_fused") == "adamw_torch_8bit":
        raise ValueError("--optim adamw_torch_8bit: its compiled update does not run on fake tensors; plan without it")
    if getattr(arguments, "torch_compile", False):
        notes.append("--torch_compile: counted without; compiled blocks need less")
    if getattr(arguments, "use_liger_kernel", False):
        notes.append("--use_liger_kernel: counted without; its kernels need less")
    if uses_flash(arguments):
        notes.append("attention counted as flash attention (flash-attn must be installed): no mask of T x T")
    elif is_padded or arguments.packing:
        notes.append("attention counted with a mask of T x T, which padded or packed rows need without flash attention")
    if arguments.gradient_accumulation_steps > traced:
        notes.append(f"{traced} of {arguments.gradient_accumulation_steps} micro-batches were run")
    return notes


def stand_in(world_size: int) -> SimpleNamespace:
    """What forward_backward asks of an Accelerator: Accelerate's own does not run on fake tensors."""
    return SimpleNamespace(
        num_processes=world_size,
        process_index=0,
        device=torch.device("cpu"),
        scaler=None,
        backward=lambda loss: loss.backward(),
    )


@contextlib.contextmanager
def on_a_gpu(has_mask: bool) -> Iterator[None]:
    """What a fake CPU would do otherwise than a GPU: a mask of T x T, copies of saved inputs off an accelerator."""
    with contextlib.nullcontext() if has_mask else without_packed_mask(), saving_with(SavedOnHost):
        yield


class SavedOnHost(torch.autograd.graph.saved_tensors_hooks):
    """torch's save_on_cpu, with a host that is told apart by the trace alone."""

    trace: MemoryTrace | None = None

    def __init__(self, **_: Any) -> None:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if SavedOnHost.trace is None:
                return tensor.clone()
            SavedOnHost.trace.counts["host copied"] += tensor.nbytes
            with SavedOnHost.trace.host():
                return tensor.clone()

        super().__init__(pack, torch.clone)


@contextlib.contextmanager
def offloading_seen(trace: MemoryTrace) -> Iterator[None]:
    """Count copies in host memory as such."""
    take_back = OffloadedAdamW.take_back

    def to_host(self: OffloadedAdamW, *args: Any) -> None:
        with trace.host():
            take_back(self, *args)

    with mock.patch.object(OffloadedAdamW, "take_back", to_host), mock.patch.object(SavedOnHost, "trace", trace):
        yield


def use_experts_that_can_be_faked(model: Any, compute_dtype: str) -> list[str]:
    """In fp32 a mixture's default kernel does not run on fake tensors; another one does, and needs other memory.

    Returns the note that says so.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    experts = base.get_experts_implementation()  # of the model, and of its parts
    if compute_dtype != "fp32" or experts.get("text_config", experts[""]) != "grouped_mm":
        return []
    base.set_experts_implementation("batched_mm")
    return ["experts counted with experts_implementation batched_mm, which holds other tensors than grouped_mm"]
