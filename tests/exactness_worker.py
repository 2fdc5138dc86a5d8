"""Every cell of the exactness grid in one process pair, results as JSON.

    accelerate launch --config_file accelerate_configs/default.yaml tests/exactness_worker.py OUT [quick | WRAP ...]

The tests run it in forked ranks, with --accelerate_config (cells.py).

A cell is a case of the proof (tools/proof) with a tiny Llama under other keys: the same reference, the same comparison.
"""

import copy
import dataclasses
import functools
import gc
import json
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AutoModelForCausalLM, StoppingCriteriaList

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import finetune
import finetune_mem_limit
import finetune_performance
from hook_cases import adamw
from hooks import apply
from hooks.apply import apply_hooks, plan_hooks
from hooks.config import HookConfig, read_hook_config
from hooks.live import read_units
from hooks.structure import set_use_cache
from hooks.wrap import apply_units, plan_units
from saving.folder import patient_group
from saving.huggingface import write_folder
from saving.state import LiveState
from tiny_models import tiny_llama
from tools.proof import runs
from tools.proof.architecture import text_tokens
from tools.proof.cases import (
    DEFERRED_TOLERANCE,
    STEPS,
    TOLERANCE,
    Case,
    batches_of,
    compare,
    largest,
    reference_key,
    same_bits,
)
from tools.proof.exactness import Run, gradient_errors, local, relative_error
from training import evaluation, losses
from training.arguments import FinetuneArguments
from training.chunked_loss import compute_loss_in_chunks
from training.evaluation import evaluate
from training.kernels import compile_blocks
from training.launch import end, make_accelerator, make_device_mesh
from training.model import add_adapters
from training.optimizer import OffloadedAdamW, check_optimizer, make_optimizer
from utils import precision_policies

LEARNING_RATE = 1e-3
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LOGGED = ("loss", "grad_norm", "loss_scale", "skipped_steps", "learning_rate")
CHUNK_TOKENS = 5  # several chunks in a micro-batch
BLOCK = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
WRAPS = {
    "whole": {"fsdp_auto_wrap_policy": "NO_WRAP"},
    "block": BLOCK,
    "two_blocks": {**BLOCK, "hook_wrap_blocks_per_unit": 2},
    "size": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 3000},
    "embeddings": {**BLOCK, "hook_wrap_embeddings": True},
    "no_reshard": {**BLOCK, "fsdp_reshard_after_forward": False},
    "function": {"hook_wrap_function": f"{Path(__file__).parent / 'user_hooks.py'}:wrap_attention_and_mlp"},
}
RECOMPUTES = {
    "none": {"fsdp_activation_checkpointing": False},
    "every": {"fsdp_activation_checkpointing": True},
    "every_2nd": {"fsdp_activation_checkpointing": True, "hook_checkpoint_every_n_blocks": 2},
    "selective": {"fsdp_activation_checkpointing": True, "hook_checkpoint_mode": "selective"},
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run: how it is wrapped, recomputed, computed, trained."""

    wrap: str
    recompute: str = "none"
    dtype: str = "fp32"
    training: str = "full"  # or lora (dropout 0.1)
    accumulation: int = 1
    tied: bool = False
    extra: tuple[tuple[str, object], ...] = ()
    reduce_dtype: str = "fp32"
    layers: int = 4
    chunk_tokens: int = 0  # the loss as finetune_mem_limit.py has it

    @property
    def case(self) -> Case:
        """What the proof calls it."""
        return Case(
            self.name, self.recompute != "none", accumulation=self.accumulation, use_peft=self.training == "lora"
        )

    @property
    def name(self) -> str:
        """The cell as a test id."""
        parts = [self.wrap, self.recompute, self.dtype, self.training, f"accumulation{self.accumulation}"]
        parts += ["tied"] if self.tied else []
        parts += [f"{key}={value}" for key, value in self.extra]
        parts += [f"reduce_{self.reduce_dtype}"] if self.reduce_dtype != "fp32" else []
        return "-".join(parts)

    def config(self, base: HookConfig) -> HookConfig:
        """The YAML's keys with this cell's in their place."""
        keys = {**WRAPS[self.wrap], **RECOMPUTES[self.recompute], **dict(self.extra)}
        return dataclasses.replace(base, hook_param_dtype=self.dtype, hook_reduce_dtype=self.reduce_dtype, **keys)


def grid() -> list[Cell]:
    """The cells, recompute `none` first so that the others can be compared with it bit by bit.

    Of wrap x dtype x training x accumulation half: that in which any three of them meet in every way. The layout that
    most runs have, all.
    """
    modes = ("none", "every", "every_2nd")
    halves = product(enumerate(WRAPS), enumerate(DTYPES), enumerate(("full", "lora")), enumerate((1, 3)))
    cells = [
        Cell(wrap, recompute, dtype, training, accumulation)
        for (w, wrap), (d, dtype), (t, training), (a, accumulation) in halves
        if (w + d + t + a) % 2 == 0 or wrap == "block"
        for recompute in modes
    ]
    both = list(product(DTYPES, ("full", "lora")))
    cells += [
        Cell("block", "selective", dtype, training, accumulation) for dtype, training in both for accumulation in (1, 3)
    ]
    cells += [Cell(wrap, mode, dtype, tied=True) for wrap, mode, dtype in product(WRAPS, ("none", "every"), DTYPES)]
    for dtype, training in both:
        deferred, ahead = (("hook_reduce_every_micro_batch", False),), (("hook_prefetch_units", 2),)
        cells.append(Cell("two_blocks", "every_2nd", dtype, training, 3, extra=deferred))
        cells.append(Cell("two_blocks", "every", dtype, training, 3, extra=ahead))
        cells.append(Cell("block", "every", dtype, training, 3, extra=(("fsdp_offload_params", True),)))
    norms = (("hook_norm_dtype", "fp32"),)
    wraps = ("whole", "block", "two_blocks", "embeddings")
    cells += [Cell(wrap, "every", "bf16", training, 1, extra=norms) for wrap in wraps for training in ("full", "lora")]
    cells += [Cell("embeddings", "every", "bf16", tied=True, extra=norms)]
    cells += [Cell("embeddings", "every", "bf16", "full", accumulation, reduce_dtype="bf16") for accumulation in (1, 3)]
    return [dataclasses.replace(cell, layers=3) for cell in cells]  # two blocks per unit: the last unit has one


def make_model(cell: Cell) -> torch.nn.Module:
    """The same weights on every rank. Attention dropout stays off; LoRA brings its own."""
    dtype = cell.dtype if cell.training == "lora" else "fp32"
    return copy.deepcopy(built_model(cell.tied, dtype, cell.training, cell.layers))


@functools.cache
def built_model(tied: bool, dtype: str, training: str, layers: int) -> torch.nn.Module:
    """Each kind is built once: adding adapters takes longer than a step."""
    set_seed(0)
    model = tiny_llama(tied, layers)
    model.config.use_cache = False
    model = model.to(DTYPES[dtype])
    arguments = FinetuneArguments(model_name_or_path="", use_peft=training == "lora", lora_r=4, lora_alpha=8)
    arguments.lora_dropout, arguments.lora_target_modules = 0.1, ["q_proj", "v_proj", "down_proj"]
    model = add_adapters(model.train(), arguments)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at the start: the gradient of lora_A would be zero too
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def prepared(cell: Cell, base: HookConfig, accelerator: Accelerator, is_compiled: bool = False) -> LiveState:
    """A cell's model under the recipe's hooks, with its optimizer."""
    config, model = cell.config(base), make_model(cell)
    if cell.chunk_tokens:
        compute_loss_in_chunks(model, cell.chunk_tokens)
    compiled = functools.partial(compile_blocks, class_names=config.fsdp_transformer_layer_cls_to_wrap)
    return runs.prepared(model, config, accelerator, cell.case, compiled if is_compiled else None)


def train(
    cell: Cell,
    base: HookConfig,
    accelerator: Accelerator,
    expected: Run | None = None,
    is_compiled: bool = False,
) -> Run:
    """A sharded run of a cell, every step from the weights of the expected run, if there is one."""
    return runs.train(prepared(cell, base, accelerator, is_compiled), cell.config(base), cell.case, expected)


def references_of(cells: Iterable[Cell], base: HookConfig) -> dict[Cell, Run]:
    """The unsharded run of each cell. Those that differ in wrap, recompute or chunks alone have the same one."""
    by_case = {cell.case: cell for cell in cells}
    configs = {case: cell.config(base) for case, cell in by_case.items()}
    keys = {cell: (*reference_key(case, configs[case]), cell.tied, cell.layers) for case, cell in by_case.items()}
    made = runs.shared_references(
        {key: cell.case for cell, key in keys.items()}, configs, lambda case: make_model(by_case[case])
    )
    return {cell: made[key] for cell, key in keys.items()}


def judged(cell: Cell, found: Run, expected: Run) -> dict:
    """What the proof says of a run."""
    tolerance = DEFERRED_TOLERANCE if ("hook_reduce_every_micro_batch", False) in cell.extra else TOLERANCE
    return {**vars(compare(cell.case, found, expected, "fp32", tolerance)), "norms": found.norms}


def placed(live: LiveState) -> dict:
    """Where a trained cell's tensors are, and in which dtypes."""
    parameters, state = list(live.model.parameters()), live.optimizer.optimizer.state.values()
    return {
        "stored": sorted({str(p.dtype) for p in parameters}),
        "state_dtypes": sorted({str(value.dtype) for values in state for value in values.values()}),
        "is_sharded": all(isinstance(p, DTensor) for p in parameters),
        "is_offloaded": all(unit["cpu_offload"] for unit in read_units(live.model)),
    }


def distance(found: Run, expected: Run) -> dict:
    """The largest error of any step, of each kind."""
    return {
        "loss": largest(map(relative_error, found.losses, expected.losses)),
        "norm": largest(map(relative_error, found.norms, expected.norms)),
        "gradient": largest(error for step in gradient_errors(found, expected) for error in step.values()),
    }


def unsharded_run(cell: Cell, world_size: int, expected: Run) -> Run:
    """One plain fp32 process on all rows at once: what the mathematics says, whatever the split. Every step at the
    weights that the reference has there."""
    model, out = make_model(cell), Run()
    tokens = text_tokens(model)
    per_rank = [batches_of(rank, cell.accumulation, tokens) for rank in range(world_size)]
    for step in range(STEPS):
        batches = [batch for steps in per_rank for batch in steps[step]]
        names = ("input_ids", "attention_mask", "labels")
        ids, mask, labels = (torch.cat([batch[name] for batch in batches]) for name in names)
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        out.losses.append(loss.item())
        out.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), cell.case.arithmetic.max_grad_norm).item())
        out.gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        model.zero_grad()
        with torch.no_grad():
            for name, value in expected.weights[step].items():
                model.get_parameter(name).copy_(value)
    return out


def run_faults(base: HookConfig, accelerator: Accelerator) -> dict:
    """What must stop a run, or a step on every rank. Faults that the comparison must see: tests/verify_worker.py."""
    rank, world_size, plain = accelerator.process_index, accelerator.num_processes, Cell("block")

    def forgets_a_unit(model, units, *args):
        return apply_units(model, units[:-1], *args)

    with mock.patch.object(apply, "apply_units", forgets_a_unit):
        found = {"a key ignored": message_of(lambda: train(plain, base, accelerator))}
    found["overflow on one rank"] = overflow_on_one_rank(wrap(plain, base, accelerator), rank, world_size)
    found["optimizer before wrapping"] = message_of(lambda: optimizer_too_early(plain, base, accelerator))
    found["optimizer after a forward"] = message_of(lambda: optimizer_too_late(plain, base, accelerator))
    return found


def overflow_on_one_rank(model: torch.nn.Module, rank: int, world_size: int) -> dict:
    """fp16's loss scaler when only the last rank's shard of a gradient overflows: what every rank then does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(1, 4, dtype=torch.long)).logits.sum()).backward()
    if rank == world_size - 1:
        model.lm_head.weight.grad.to_local()[0] = float("inf")
    before = [local(p) for p in model.parameters()]
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    changed = any(not torch.equal(b, local(p)) for b, p in zip(before, model.parameters()))
    per_rank = [None] * world_size
    dist.all_gather_object(per_rank, {"changed": changed, "scale": scaler.get_scale()})
    return {"ranks": per_rank}


def run_fp16(base: HookConfig, accelerator: Accelerator) -> dict:
    """The recipe's loop in fp16 under the loss scaler, put by hand where Accelerate puts it on a GPU.

    Two steps overflow. `fused` is the naive way: the fused kernel skips by itself, and Accelerate does not see it.
    """
    cell, out = Cell("block", "every", "fp16"), {}
    own_precision, accelerator.state._mixed_precision = accelerator.state._mixed_precision, "fp16"
    own_amp, accelerator.native_amp = accelerator.native_amp, True
    for name, precision in (("fp16", "fp16"), ("fused", "no")):
        # Far above what fp16 holds in two steps (its end is 2**16), far below it in the third.
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, backoff_factor=2.0**-4)
        live = prepared(cell, dataclasses.replace(base, mixed_precision=precision), accelerator)
        found = runs.train(live, cell.config(base), cell.case, None)
        out[name] = [{key: row[key] for key in LOGGED} for row in found.logged]
        out[f"{name}_state_dtypes"] = placed(live)["state_dtypes"]
    accelerator.scaler, accelerator.native_amp, accelerator.state._mixed_precision = None, own_amp, own_precision
    in_fp32 = dataclasses.replace(cell, dtype="fp32")
    start = {name: value.detach() for name, value in make_model(in_fp32).named_parameters()}  # both first are skipped
    plain = unsharded_run(in_fp32, accelerator.num_processes, Run(weights=[start] * STEPS))
    per_rank = [None] * accelerator.num_processes
    dist.all_gather_object(per_rank, out)
    return {
        **out,
        "same_on_all_ranks": all(json.dumps(other) == json.dumps(out) for other in per_rank),
        "fp32_loss": plain.losses,
        "fp32_norms": plain.norms,
    }


def message_of(run: Callable[[], object]) -> str:
    """The ValueError that a run ends with, empty if it does not."""
    try:
        run()
    except ValueError as error:
        return str(error)
    return ""


def wrap(cell: Cell, base: HookConfig, accelerator: Accelerator) -> torch.nn.Module:
    """A wrapped model, as the recipe wraps it."""
    config, model = cell.config(base), make_model(cell)
    if cell.chunk_tokens:
        compute_loss_in_chunks(model, cell.chunk_tokens)
    apply_units(model, plan_units(model, config), config, make_device_mesh(accelerator), precision_policies(config))
    return model


def optimizer_too_early(cell: Cell, base: HookConfig, accelerator: Accelerator) -> None:
    """The optimizer holds the tensors from before sharding."""
    unwrapped = make_model(cell)
    optimizer = make_optimizer(unwrapped, adamw(LEARNING_RATE), base)
    check_optimizer(wrap(cell, base, accelerator), optimizer)


def optimizer_too_late(cell: Cell, base: HookConfig, accelerator: Accelerator) -> None:
    """The optimizer holds the gathered copies that a forward left behind."""
    model = wrap(cell, base, accelerator)
    with torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.long))  # leaves the root unit gathered
    check_optimizer(model, make_optimizer(model, adamw(LEARNING_RATE), base))


def run_evaluation(base: HookConfig, accelerator: Accelerator) -> dict:
    """An evaluation between backward and step must not change the run, and must count every row once."""
    rank, cell = accelerator.process_index, Cell("block", "every")
    batches = batches_of(rank, 1, text_tokens(make_model(cell)))[0]
    expected = references_of([cell], base)[cell]
    plain = train(cell, base, accelerator, expected)
    evaluated = []

    def clip_after_evaluation(accelerator, model, max_norm):
        evaluated.append(evaluate(accelerator, model, batches, losses.micro_batch_loss))
        return clip(accelerator, model, max_norm)

    clip = finetune.clip_grad_norm
    with mock.patch.object(finetune, "clip_grad_norm", clip_after_evaluation):
        disturbed = train(cell, base, accelerator, expected)
    without_reshard = mock.patch.object(evaluation, "reshard_all", lambda model: None)
    with mock.patch.object(finetune, "clip_grad_norm", clip_after_evaluation), without_reshard:
        naive = train(cell, base, accelerator, expected)
    return {
        "same_bits": same_bits(disturbed, plain),
        "naive_norm_error": relative_error(naive.norms[0], plain.norms[0]),
        "loss_error": relative_error(evaluated[0], expected.losses[0]),
    }


def run_non_finite(base: HookConfig, accelerator: Accelerator) -> dict:
    """A loss that is nan on the last rank alone: every rank must end, before any weight changes."""
    is_last_rank = accelerator.process_index == accelerator.num_processes - 1

    def nan_on_one_rank(logits, labels):
        return logits.float().sum() * (float("nan") if is_last_rank else 1.0)

    code = None
    with mock.patch.object(losses, "token_loss_sum", nan_on_one_rank), mock.patch("torch.optim.AdamW.step") as step:
        try:
            train(Cell("block"), base, accelerator)
        except SystemExit as exit_:
            code = exit_.code
            accelerator.free_memory()
    per_rank = [None] * accelerator.num_processes
    dist.all_gather_object(per_rank, {"exit_code": code, "steps": step.call_count})
    return {"ranks": per_rank}


def run_generation(base: HookConfig, accelerator: Accelerator) -> list[int]:
    """Ranks that stop after 1 and 5 new tokens: both must return."""
    model = wrap(Cell("block"), base, accelerator).eval()
    register_fsdp_forward_method(model, "generate")
    limit = 4 + (1 if accelerator.process_index == 0 else 5)
    stop = StoppingCriteriaList([lambda ids, scores: torch.full((ids.shape[0],), ids.shape[1] >= limit)])
    ids = torch.ones(1, 4, dtype=torch.long)
    output = model.generate(
        ids, do_sample=False, max_new_tokens=9, synced_gpus=True, stopping_criteria=stop, pad_token_id=0
    )
    lengths = [None] * accelerator.num_processes
    dist.all_gather_object(lengths, output.shape[1] - 4)
    return lengths


def run_buffers(base: HookConfig, accelerator: Accelerator) -> dict:
    """Buffers after loading in bf16 and wrapping: rotary frequencies and a persistent buffer of the user's."""
    config = Cell("block", dtype="bf16").config(base)
    model = tiny_llama().to(torch.float32)
    model.register_buffer("statistics", torch.arange(3.0), persistent=True)
    apply_hooks(model, plan_hooks(model, config), config, make_device_mesh(accelerator), precision_policies(config))
    buffers = dict(model.named_buffers())
    return {
        "rotary": sorted({str(b.dtype) for name, b in buffers.items() if "inv_freq" in name}),
        "statistics": buffers["statistics"].tolist(),
        "is_plain": not any(isinstance(b, DTensor) for b in buffers.values()),
    }


def run_export(base: HookConfig, accelerator: Accelerator, folder: Path) -> dict:
    """A tied model, exported in bf16 from its shards and loaded by plain transformers."""
    cell = Cell("embeddings", tied=True)
    tokenizer = types.SimpleNamespace(save_pretrained=lambda folder: None)
    model = wrap(cell, base, accelerator)
    set_use_cache(model, True)
    assert not write_folder(model, tokenizer, folder, torch.bfloat16, patient_group())
    saved = load_file(folder / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(1, 9)[None]
    reference = make_model(cell)
    for parameter in reference.parameters():  # not reference.bfloat16(): that would round the rotary frequencies too
        parameter.data = parameter.data.bfloat16().float()
    with torch.no_grad():
        difference = (loaded.float()(ids).logits - reference(ids).logits).abs().max().item()
    config = json.loads((folder / "config.json").read_text())
    return {
        "head_stored": "lm_head.weight" in saved,
        "odd_names": [name for name in saved if any(word in name for word in ("FSDP", "_orig_mod", "_checkpoint"))],
        "logit_difference": difference,
        "dtypes": sorted({str(tensor.dtype) for tensor in saved.values()}),
        "config": [config["architectures"], config["dtype"], config["use_cache"]],
    }


def run_graph_lifetime(base: HookConfig, accelerator: Accelerator) -> list[bool]:
    """Whether a micro-batch's logits are gone by the time the next micro-batch runs."""
    alive: list[bool] = []
    previous: list[weakref.ref] = []

    def watch(logits, labels):
        alive.extend(reference() is not None for reference in previous)
        previous[:] = [weakref.ref(logits)]
        return token_loss_sum(logits, labels)

    token_loss_sum = losses.token_loss_sum
    with mock.patch.object(losses, "token_loss_sum", watch):
        train(Cell("block", accumulation=3), base, accelerator)
    return alive


def run_chunked(base: HookConfig, accelerator: Accelerator) -> dict:
    """The loss in chunks under finetune_mem_limit.py's loop, against the same references as the plain loss; an
    offloaded optimizer against one that is not; and [all-gathers, reduce-scatters] with and without chunks."""
    found: dict = {"cells": {}, "collectives": {}, "offloaded_same_bits": [], "slices": []}
    offloads = (("hook_offload_optimizer", True),)
    kinds = (("fp32", "full", False), ("fp32", "full", True), ("bf16", "lora", False))
    chunked = [
        Cell(wrap_name, "every", dtype, training, 3, tied, chunk_tokens=CHUNK_TOKENS)
        for wrap_name, (dtype, training, tied) in product(("block", "embeddings"), kinds)
    ]
    dials = (*offloads, ("hook_norm_dtype", "fp32"), ("fsdp_activation_checkpointing_offload", True))
    chunked.append(Cell("embeddings", "every", "bf16", "lora", 3, extra=dials, chunk_tokens=CHUNK_TOKENS))
    expected = references_of(chunked, base)
    with mock.patch.object(OffloadedAdamW, "slice_bytes", 10_000):
        for cell in chunked:
            live = prepared(cell, base, accelerator)
            run = runs.train(live, cell.config(base), cell.case, expected[cell], finetune_mem_limit)
            found["cells"][cell.name] = judged(cell, run, expected[cell]) | placed(live)
        for dtype, training in (("fp32", "full"), ("bf16", "lora")):
            cell = Cell("embeddings", "every", dtype, training, 3)
            cells = [dataclasses.replace(cell, extra=extra) for extra in ((), offloads)]
            lives = [prepared(cell, base, accelerator) for cell in cells]
            both = [runs.train(live, cell.config(base), cell.case, None) for live, cell in zip(lives, cells)]
            optimizers = [live.optimizer.optimizer for live in lives]
            found["slices"].append([len(list(o.slices())) if hasattr(o, "slices") else 0 for o in optimizers])
            found["offloaded_same_bits"].append(same_bits(*both))
    for wrap_name in ("block", "embeddings"):
        plain, chunks = (
            wrap(Cell(wrap_name, dtype="bf16", chunk_tokens=c), base, accelerator) for c in (0, CHUNK_TOKENS)
        )
        found["collectives"][wrap_name] = [collectives_of(plain), collectives_of(chunks, is_chunked=True)]
    return found


def run_performance(base: HookConfig, accelerator: Accelerator) -> dict:
    """finetune_performance.py's loop against the reference and against finetune.py's, to the last bit; compiled blocks
    against the reference, and recomputed ones against those that are not, dropout on.

    The graphs are captured and split for recompute as for a GPU; inductor's code for them would take minutes here.
    """
    found: dict = {"cells": {}, "same_bits": [], "compiled": {}}
    deferred = (("hook_reduce_every_micro_batch", False), ("hook_prefetch_units", 2))
    kinds = (("fp32", "full"), ("bf16", "lora"), ("bf16", "full"))
    cells = [Cell("two_blocks", "every_2nd", *kind, 3, extra=deferred) for kind in kinds]
    compiled = Cell("two_blocks", "every_2nd", accumulation=3)
    expected = references_of([*cells, compiled], base)
    for cell in cells:
        live = prepared(cell, base, accelerator)
        run = runs.train(live, cell.config(base), cell.case, expected[cell], finetune_performance)
        found["cells"][cell.name] = judged(cell, run, expected[cell]) | placed(live)
        found["same_bits"].append(same_bits(run, train(cell, base, accelerator, expected[cell])))
    counters.clear()
    own = torch.nn.Module.compile
    with mock.patch.object(torch.nn.Module, "compile", lambda block: own(block, backend="aot_eager")):
        live = prepared(compiled, base, accelerator, is_compiled=True)
        reference = dataclasses.replace(expected[compiled], outputs=[])
        run = runs.train(live, compiled.config(base), compiled.case, reference, finetune_performance)
        found["compiled"][compiled.name] = judged(compiled, run, reference) | placed(live)
        both = [
            train(Cell("two_blocks", mode, training="lora"), base, accelerator, is_compiled=True)
            for mode in ("none", "every")
        ]
    found["compiled_recompute_same_bits"] = same_bits(*both)
    found["graphs"], found["graph_breaks"] = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return found


def count_collectives(base: HookConfig, accelerator: Accelerator) -> dict:
    """[all-gathers, reduce-scatters] of one forward and backward: ours, and Accelerate's own path at the same units."""
    counts = {}
    layouts = {"block": {}, "embeddings": {"hook_wrap_embeddings": True}, "norms": {"hook_norm_dtype": "fp32"}}
    for name, keys in layouts.items():
        counts[name] = collectives_of(wrap(Cell("block", dtype="bf16", extra=tuple(keys.items())), base, accelerator))
    plugin = accelerator.state.fsdp_plugin
    own_values = dict(plugin.__dict__)
    plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap = transformer_auto_wrap_policy, ["LlamaDecoderLayer"]
    model = make_model(Cell("block"))
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    counts["accelerate"] = collectives_of(model)
    plugin.__dict__.update(own_values)
    accelerator.free_memory()  # Accelerate compares parameter lists, and two models' cannot be compared
    return counts


def collectives_of(model: torch.nn.Module, is_chunked: bool = False) -> list[int]:
    """[all-gathers, reduce-scatters] of one forward and backward."""
    ids = torch.ones(2, 8, dtype=torch.long)
    with CommDebugMode() as mode:
        if is_chunked:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        else:
            losses.token_loss_sum(model(input_ids=ids, use_cache=False).logits, ids).backward()
    counts = {str(op): number for op, number in mode.get_comm_counts().items()}
    gathers = sum(number for op, number in counts.items() if "all_gather" in op or "allgather" in op)
    scatters = sum(number for op, number in counts.items() if "reduce_scatter" in op)
    return [gathers, scatters]


def command_line() -> tuple[Path, list[str], HookConfig]:
    """(the file to write, the words after it, the YAML in fp32)."""
    words, path = sys.argv[1:], None
    if words[-2:-1] == ["--accelerate_config"]:
        *words, _, path = words
    config = dataclasses.replace(read_hook_config(path), hook_reduce_dtype="fp32", hook_offload_optimizer=False)
    return Path(words[0]), words[1:], config


def main() -> None:
    out_path, wraps, base = command_line()
    gc.freeze()  # the imported libraries are never garbage; looking through them would cost more than a cell
    gc.disable()  # each cell collects once, at its end
    for script in (finetune, finetune_mem_limit, finetune_performance):
        script.memory = lambda device: {"live_tensors_gib": 0.0}  # counting live tensors costs more than a tiny step
    accelerator = make_accelerator(base)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    results: dict = {"world_size": world_size, "cells": {}}
    cells = [cell for cell in grid() if not wraps or cell.wrap in wraps]
    if wraps == ["quick"]:  # for other world sizes
        quick = product(("block", "two_blocks", "embeddings"), (("fp32", "full"), ("bf16", "lora")))
        cells = [Cell(wrap, "every", dtype, training, accumulation=3, layers=3) for wrap, (dtype, training) in quick]
    expected, without, unsharded = references_of(cells, base), {}, {}
    for cell in cells:
        live = prepared(cell, base, accelerator)
        found = runs.train(live, cell.config(base), cell.case, expected[cell])
        entry = judged(cell, found, expected[cell]) | placed(live)
        if cell.training == "full" and cell.dtype == "fp32" and not cell.extra:
            key = cell.tied, cell.accumulation
            if key not in unsharded:
                unsharded[key] = unsharded_run(cell, world_size, expected[cell])
            entry["unsharded"] = distance(found, unsharded[key])
        plain = dataclasses.replace(cell, recompute="none")
        if cell.recompute == "none":
            without[cell] = found
        elif plain in without:
            entry["same_bits_as_without_recompute"] = same_bits(found, without[plain])
        results["cells"][cell.name] = entry
    if wraps == ["performance"]:
        results |= run_performance(base, accelerator)
    if wraps == ["chunked"]:
        results |= run_chunked(base, accelerator)
    if not wraps or wraps == ["extras"]:
        results["faults"] = run_faults(base, accelerator)
        results["fp16"] = run_fp16(base, accelerator)
        results["evaluation"] = run_evaluation(base, accelerator)
        results["collectives"] = count_collectives(base, accelerator)
        results["non_finite"] = run_non_finite(base, accelerator)
        results["generated_lengths"] = run_generation(base, accelerator)
        results["buffers"] = run_buffers(base, accelerator)
        results["export"] = run_export(base, accelerator, out_path.parent / "exported")
        results["logits_alive"] = run_graph_lifetime(base, accelerator)
    gathered = [None] * world_size
    dist.all_gather_object(gathered, [entry["norms"] for entry in results["cells"].values()])
    results["norms_equal_on_all_ranks"] = all(other == gathered[0] for other in gathered)
    if rank == 0:
        out_path.write_text(json.dumps(results, indent=1))
    end(accelerator)


if __name__ == "__main__":
    main()
