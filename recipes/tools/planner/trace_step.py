"""Trace one training step of a script under a YAML, on fake tensors in a fake process group: what a rank of any world
size holds and sends, on one CPU and in seconds.

The model, its adapters, the hooks, the optimizer and forward_backward are the script's own. As a command it reads a
request from standard input and writes what it found to standard output (planned_step.py runs it so).
"""

import contextlib
import dataclasses
import gc
import importlib
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from hooks.apply import apply_hooks, plan_hooks
from hooks.config import HookConfig
from hooks.live import padding_notes
from hooks.wrap import local, reshard_all
from saving.huggingface import FILE_BYTES, blocks, left_out
from torch import nn
from training.arguments import FinetuneArguments
from training.chunked_loss import compute_loss_in_chunks
from training.launch import make_device_mesh
from training.model import add_adapters, dtype_named
from training.optimizer import check_optimizer, make_optimizer
from training.progress import Progress
from utils import precision_policies

from ..private_torch import NEEDS_VALUES, fake_tensors
from .allocator_replay import reserved_bytes
from .as_on_gpu import (
    leave_meta,
    load_without_weights,
    notes_on,
    offloading_seen,
    on_a_gpu,
    reads_documents,
    settle_attention,
    settle_length,
    stand_in,
    use_experts_that_can_be_faked,
)
from .memory_trace import OTHER, MemoryTrace
from .planned_step import PlannedStep, Request

PHASES = {"clipping": "clip", "the optimizer's step": "optimizer step"}  # the scripts' words -> a plan's
TRACED_MICRO_BATCHES = 2  # the second one finds the gradients of the first; a third finds no more


def main() -> None:
    """Answer the request of standard input."""
    warnings.filterwarnings("ignore")
    gc.freeze()  # the imported libraries are never garbage; looking through them takes seconds
    values = json.load(sys.stdin)
    request = Request(**values)
    try:
        answer: dict[str, Any] = dataclasses.asdict(run_step(request))
    except NEEDS_VALUES as error:
        why = f"what its forward does depends on the values of its tensors ({error.func}), and a plan has none"
        answer = {"error": f"{why}; measure it in a short run instead"}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))


def run_step(request: Request) -> PlannedStep:
    """Build, warm up, and trace one step, here and now."""
    started = time.perf_counter()
    arguments, config = request.script_arguments(), request.config()
    with ready(request) as it:
        trace = MemoryTrace(it.model, it.optimizer, request.round_to, config.fsdp_offload_params)
        for value in (value for batch in it.batches for value in batch.values()):
            trace.tag(value, OTHER)
        state = state_bytes(it.model, it.optimizer)
        with trace, offloading_seen(trace):
            first = it.run(trace)
            end_of_step = len(trace.log)
            untraced = arguments.gradient_accumulation_steps - len(it.batches)  # micro-batches like the first
            counts = {name: n + first[name] * untraced for name, n in trace.counts.items()}
            it.evaluate(trace)
        return PlannedStep(
            peak=trace.peak,
            peak_at=trace.peak_at,
            parts=trace.peak_parts,
            phase_peaks=trace.phase_peaks,
            reserved=reserved_bytes(trace.log[:end_of_step], trace.start),
            host=trace.host_peak,
            peak_with_host=trace.peak_with_host,
            counts=counts,
            timeline=trace.points(),
            parameters=it.parameters,
            trainable=sum(p.numel() for p in it.model.parameters() if p.requires_grad),
            state=state,
            loaded=it.loaded,
            exported=it.exported,
            length=it.batches[0]["labels"].shape[1],
            notes=it.notes,
            seconds=time.perf_counter() - started,
        )


@dataclass
class Ready:
    """A model and its optimizer after a first step, and the batches of the next."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[dict[str, torch.Tensor]]
    run: Callable[[MemoryTrace | None], Counter[str]]  # a step; the trace's counts after its first micro-batch
    evaluate: Callable[[MemoryTrace], None]
    parameters: int
    loaded: int  # bytes of the model as it lies on disk
    exported: int  # of it, those that rank 0 holds at once at the end
    notes: list[str]


@contextlib.contextmanager
def ready(request: Request) -> Iterator[Ready]:
    """Build what the script builds and take one step, so that the optimizer's state is there.

    Runs in the process group that there is, or makes a fake one and leaves it behind.
    """
    arguments, config = request.script_arguments(), request.config()
    is_of_another_size = dist.is_initialized() and dist.get_world_size() != request.num_processes
    if is_of_another_size:
        dist.destroy_process_group()
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=request.num_processes)
    rows, test_rows = arguments.per_device_train_batch_size, arguments.per_device_eval_batch_size
    is_padded, is_test_padded = request.is_padded(rows), request.is_padded(test_rows)
    accelerator = stand_in(request.num_processes)
    mesh = make_device_mesh(accelerator)
    torch.manual_seed(0)
    script = imported(request.script)
    device = torch.device("meta" if request.is_fake else "cpu")
    with device:
        model = load_without_weights(arguments)
    size, loaded = sum(p.numel() for p in model.parameters()), sum(p.nbytes for p in model.parameters())
    exported = exported_bytes(model, arguments)
    settle_attention(arguments, config.hook_param_dtype, model)
    notes = [*settle_length(arguments, model), *notes_on(arguments, is_padded, TRACED_MICRO_BATCHES)]
    with device:
        model = add_adapters(model, arguments)
    mode = fake_tensors() if request.is_fake else contextlib.nullcontext()
    with mode, on_a_gpu(has_mask=is_padded or reads_documents(arguments)):
        if request.is_fake:
            leave_meta(model)
        notes += use_experts_that_can_be_faked(model, config.hook_param_dtype)
        model = build(model, arguments, config, mesh, getattr(script, "LOSS_CHUNK_TOKENS", None))
        notes += padding_notes(model)
        optimizer = make_optimizer(model, arguments, config)
        check_optimizer(model, optimizer)
        window = min(arguments.gradient_accumulation_steps, TRACED_MICRO_BATCHES)
        batches = [make_batch(model, arguments, is_padded) for _ in range(window)]
        run = partial(step, script, accelerator, model, optimizer, config=config, max_grad_norm=arguments.max_grad_norm)
        run(batches[:1], trace=None)
        test = partial(evaluate, script, model, arguments, is_test_padded)
        yield Ready(
            model, optimizer, batches, lambda trace: run(batches, trace=trace), test, size, loaded, exported, notes
        )


def exported_bytes(model: nn.Module, arguments: FinetuneArguments) -> int:
    """What rank 0 holds in host memory while it writes a model (saving/huggingface.py): a file, and a block twice."""
    dtype = dtype_named(arguments.dtype) or model.config.dtype or torch.float32
    sizes = {name: value.numel() * dtype.itemsize for name, value in model.state_dict().items()}
    sizes = {name: size for name, size in sizes.items() if name not in left_out(model)}
    largest = max(sum(sizes[name] for name in names) for names in blocks(sizes))
    return min(FILE_BYTES, sum(sizes.values())) + 2 * largest


def imported(script: str) -> Any:
    """The module of a script in this folder. Raises ValueError where its name is none that Python imports."""
    try:
        return importlib.import_module(Path(script).stem)
    except ModuleNotFoundError as error:
        raise ValueError(f"{script} is not imported by that name from {sys.path[0]}: {error}") from error


def build(
    model: nn.Module, arguments: FinetuneArguments, config: HookConfig, mesh: Any, chunk_tokens: int | None
) -> nn.Module:
    """What the scripts do after the adapters: chunked loss, hooks."""
    if chunk_tokens is not None:
        compute_loss_in_chunks(model, chunk_tokens)
    dtype, policies = dtype_named(arguments.dtype), precision_policies(config)
    return apply_hooks(model, plan_hooks(model, config), config, mesh, policies, frozen_dtype=dtype, is_cpu=False)


def make_batch(
    model: nn.Module, arguments: FinetuneArguments, is_padded: bool, batch_size: int = 0
) -> dict[str, torch.Tensor]:
    """Rows of max_length tokens, as the scripts' batches are: packed, padded, or all of one length."""
    shape = batch_size or arguments.per_device_train_batch_size, arguments.max_length
    ids = torch.randint(0, model.config.get_text_config().vocab_size, shape)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if arguments.packing:
        half = shape[1] // 2
        positions = torch.cat([torch.arange(half), torch.arange(shape[1] - half)])
        batch["position_ids"] = positions.expand(shape).contiguous()
    elif is_padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][:, -1] = 0
        batch["labels"][:, -1] = -100
    return batch


class Marks(Progress):
    """The loop's own marks, handed to a trace; `first`: the trace's counts after the first micro-batch."""

    def __init__(self, trace: MemoryTrace | None) -> None:
        super().__init__()
        self.trace, self.first = trace, None

    @contextlib.contextmanager
    def mark(self, phase: str) -> Iterator[None]:
        """Run a block of code as this phase of the trace."""
        if self.trace is not None:
            self.trace.mark(PHASES.get(phase, phase))
        yield
        if phase == "backward" and self.first is None:
            self.first = Counter(self.trace.counts) if self.trace is not None else Counter()


def step(
    script: Any,
    accelerator: SimpleNamespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[dict[str, torch.Tensor]],
    *,
    config: HookConfig,
    max_grad_norm: float,
    trace: MemoryTrace | None,
) -> Counter[str]:
    """An optimizer step of the script, its phases marked; returns the trace's counts after the first micro-batch."""
    marks = Marks(trace)
    tokens = sum(batch["labels"].numel() for batch in batches) * accelerator.num_processes
    script.forward_backward(accelerator, model, batches, label_tokens=tokens, config=config, progress=marks)
    with marks.mark("clipping"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    with marks.mark("the optimizer's step"):
        optimizer.step()
    optimizer.zero_grad()
    return marks.first


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Shards of parameters and optimizer state, and of gradients as they will be."""
    parameters = [local(parameter) for parameter in model.parameters()]
    gradients = sum(p.nbytes for p in parameters if p.requires_grad)
    held = [local(value) for state in optimizer.state.values() for value in state.values() if value.ndim]
    return sum(value.nbytes for value in [*parameters, *held]) + gradients


def evaluate(script: Any, model: nn.Module, arguments: FinetuneArguments, is_padded: bool, trace: MemoryTrace) -> None:
    """A batch of evaluation.evaluate."""
    rows, plain = arguments.per_device_eval_batch_size, dataclasses.replace(arguments, packing=False)
    batch = make_batch(model, plain, is_padded, batch_size=rows)
    trace.mark("evaluation")
    with torch.no_grad():
        model.eval()
        script.micro_batch_loss(model, batch, 1, 1)
        reshard_all(model)
        model.train()


if __name__ == "__main__":
    main()
