"""Run under `accelerate launch`: every cell of the exactness grid in one process pair, results as JSON.

    accelerate launch --config_file accelerate_configs/default.yaml tests/exactness_worker.py OUT [quick | WRAP ...]

Each cell builds a tiny model, hands it to the recipe's own hooks and training loop, and compares loss, gradients, norm
and weights with a replica that knows neither FSDP2 nor recompute: every rank runs its own rows through the plain model
(same random state, weights cast to the compute dtype), gradients are averaged with one all-reduce.
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import json
import sys
import types
import weakref
from collections.abc import Callable
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
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedModel, StoppingCriteriaList

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import finetune
import finetune_mem_limit
import finetune_performance
from hook_cases import adamw
from hooks import apply, live
from hooks import wrap as hook_wrap
from hooks.apply import apply_hooks, plan_hooks
from hooks.config import HookConfig, read_hook_config
from hooks.structure import is_norm, set_use_cache
from hooks.wrap import apply_units, plan_units
from rows.batches import Step
from saving.folder import START
from saving.huggingface import export_model
from saving.state import LiveState
from tiny_models import tiny_llama
from tools.proof.cases import RecordingLog
from tools.proof.exactness import local
from training import evaluation, losses
from training.arguments import FinetuneArguments
from training.chunked_loss import compute_loss_in_chunks
from training.evaluation import evaluate
from training.kernels import compile_blocks
from training.launch import end, make_accelerator, make_device_mesh
from training.model import add_adapters
from training.optimizer import OffloadedAdamW, check_optimizer, make_optimizer, prepare
from training.progress import Progress
from utils import precision_policies

LEARNING_RATE, STEPS, MAX_GRAD_NORM, WEIGHT_DECAY = 1e-3, 3, 1.0, 0.1
ROWS = 2  # of a micro-batch
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LOGGED = ("loss", "grad_norm", "loss_scale", "skipped_steps", "learning_rate")
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


def make_batches(cell: Cell, rank: int, world_size: int) -> list[list[dict[str, torch.Tensor]]]:
    """Steps of micro-batches, uneven on purpose: few labels here, many there, none in the last rank's last one, and
    each window one micro-batch shorter than the one before."""
    steps = []
    for step in range(STEPS):
        micro_batches = []
        accumulation = max(1, cell.accumulation - step)
        for micro in range(accumulation):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
            ids = torch.randint(1, 96, (ROWS, 12), generator=generator)
            labels = ids.clone()
            labels[0, : 9 if rank == 0 else 3] = -100
            labels[1, 8:] = -100
            if world_size > 1 and rank == world_size - 1 and micro == accumulation - 1 and accumulation > 1:
                labels[:] = -100
            micro_batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
        steps.append(micro_batches)
    return steps


def replica_run(cell: Cell, world_size: int, rank: int) -> dict:
    """The reference: no FSDP2, no recompute, no code of the recipes' loop."""
    model = make_model(cell).float() if cell.training == "full" else make_model(cell)
    names = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decayed = [p for p in names.values() if p.ndim > 1]
    others = [p for p in names.values() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=LEARNING_RATE, fused=True)  # the same rounding
    norm_is_fp32 = dict(cell.extra).get("hook_norm_dtype") == "fp32"
    fp32_names = {f"{n}.weight" for n, m in model.named_modules() if is_norm(m)} if norm_is_fp32 else set()
    out = {"losses": [], "norms": [], "gradients": []}
    set_seed(7, device_specific=False)
    torch.manual_seed(7 + rank)
    for micro_batches in make_batches(cell, rank, world_size):
        count = sum((b["labels"][:, 1:] != -100).sum() for b in micro_batches)
        dist.all_reduce(count)
        summed = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in names.items()}
        loss_sum = torch.zeros(())
        for batch in micro_batches:
            weights = {n: p if n in fp32_names else p.to(DTYPES[cell.dtype]) for n, p in model.named_parameters()}
            with norms_in_fp32(model, fp32_names, DTYPES[cell.dtype]):
                logits = functional_call(
                    model, weights, (), {"input_ids": batch["input_ids"], "use_cache": False}
                ).logits
            loss = F.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
            )
            gradients = torch.autograd.grad(loss * world_size / count, list(names.values()))
            loss_sum += loss.detach()
            for name, gradient in zip(names, gradients):
                gradient = gradient.to(DTYPES[cell.reduce_dtype])
                dist.all_reduce(gradient)
                summed[name] += (gradient / world_size).float()
        dist.all_reduce(loss_sum)
        for name, parameter in names.items():
            parameter.grad = summed[name].to(parameter.dtype)
        norm = torch.nn.utils.clip_grad_norm_(list(names.values()), MAX_GRAD_NORM)
        out["losses"].append((loss_sum / count).item())
        out["norms"].append(norm.item())
        out["gradients"].append({name: p.grad.clone() for name, p in names.items()})
        optimizer.step()
    out["weights"] = {name: p.detach().clone() for name, p in names.items()}
    return out


@contextlib.contextmanager
def norms_in_fp32(model: torch.nn.Module, fp32_names: set[str], dtype: torch.dtype):
    """Norms take fp32 in and hand the compute dtype out, as the norm unit does."""
    handles = []
    for name, module in model.named_modules():
        if f"{name}.weight" in fp32_names:
            handles.append(module.register_forward_pre_hook(lambda m, args: tuple(a.float() for a in args)))
            handles.append(module.register_forward_hook(lambda m, args, output: output.to(dtype)))
    yield
    for handle in handles:
        handle.remove()


def sharded_run(
    cell: Cell,
    base: HookConfig,
    accelerator: Accelerator,
    uses_scaler: bool = False,
    chunk_tokens: int = 0,
    before_training: Callable[[torch.nn.Module, torch.optim.Optimizer], None] = lambda *_: None,
    script: types.ModuleType = finetune,
    is_compiled: bool = False,
) -> dict:
    """The recipe's hooks in the recipe's order, then the recipe's own training loop; with `chunk_tokens` those of
    finetune_mem_limit.py."""
    config = cell.config(base)
    model = make_model(cell)
    if chunk_tokens:
        compute_loss_in_chunks(model, chunk_tokens)
    plan = plan_hooks(model, config)
    compiled = functools.partial(compile_blocks, class_names=config.fsdp_transformer_layer_cls_to_wrap)
    compiled, mesh = compiled if is_compiled else None, make_device_mesh(accelerator)
    apply_hooks(model, plan, config, mesh, precision_policies(config), compile_blocks=compiled)
    live.report_wrap(model, plan, config, is_cpu=True)
    arguments = FinetuneArguments(
        learning_rate=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        logging_steps=1,
        per_device_train_batch_size=ROWS,
        seed=0,
        output_dir="",
    )
    scaled = dataclasses.replace(config, mixed_precision="fp16" if uses_scaler else "no")
    optimizer = make_optimizer(model, arguments, scaled)
    check_optimizer(model, optimizer)
    out = {"gradients": []}
    out["slices"] = len(list(optimizer.slices())) if isinstance(optimizer, OffloadedAdamW) else 0
    out["is_offloaded"] = all(unit["cpu_offload"] for unit in live.read_units(model))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1.0 if accelerator.scaler is None else 0.5, STEPS)
    model, prepared = prepare(accelerator, model, optimizer)
    num_trained = sum(p.requires_grad for p in model.parameters())

    def record_gradients(*_: object) -> None:
        if sum(len(group["params"]) for group in optimizer.param_groups) < num_trained:
            return  # a slice of the step
        named = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        out["gradients"].append({n: None if g is None else local(g) for n, g in named.items()})

    optimizer.register_step_pre_hook(record_gradients)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    steps = iter([Step(b, {"epoch": 0, "rows_seen": 0}, []) for b in make_batches(cell, rank, world_size)])
    log, state = RecordingLog(), LiveState(accelerator, model, prepared, scheduler, dict(START))
    before_training(model, optimizer)
    torch.manual_seed(7 + rank)
    script = finetune_mem_limit if chunk_tokens else script
    script.train(state, steps, [], log=log, progress=Progress(), writer=None, arguments=arguments, config=config)
    out["losses"] = [values["loss"] for values in log.written]
    out["norms"] = [values["grad_norm"] for values in log.written]
    out["log"] = log.written
    out["weights"] = {n: local(p) for n, p in model.named_parameters() if p.requires_grad}
    out["stored"] = sorted({str(p.dtype) for p in model.parameters()})
    out["state_dtypes"] = sorted({str(v.dtype) for s in optimizer.state.values() for v in s.values()})
    out["is_sharded"] = all(isinstance(p, DTensor) for p in model.parameters())
    accelerator.free_memory()
    return out


def tensor_errors(found: list[dict], expected: list[dict]) -> list[float]:
    """Per step, the worst |f - e| / max(|e|, 1e-4 x global norm) over tensors.

    A tensor that is zero in exact arithmetic does not count as wrong for its rounding. A gradient that one side lacks
    counts as zero there.
    """
    squares = []
    for f, e in zip(found, expected):
        for name, value in e.items():
            value = local(value).double()
            other = torch.zeros_like(value) if f.get(name) is None else f[name].double()
            squares.append(torch.stack([(other - value).square().sum(), value.square().sum()]))
    squares = torch.stack(squares)
    dist.all_reduce(squares)
    errors, norms = squares.view(len(expected), -1, 2).sqrt().unbind(-1)
    floors = 1e-4 * norms.norm(dim=1, keepdim=True)
    return (errors / torch.maximum(norms, floors)).amax(dim=1).tolist()


def compare(found: dict, expected: dict) -> dict:
    """Errors of a run against its reference, step by step."""
    largest = [(found["weights"][n] - local(w)).abs().max() for n, w in expected["weights"].items() if local(w).numel()]
    weight = torch.stack(largest).max().float().nan_to_num(nan=float("inf"))  # gloo's MAX drops nan
    dist.all_reduce(weight, dist.ReduceOp.MAX)
    return {
        "loss": [abs(f - e) / e for f, e in zip(found["losses"], expected["losses"])],
        "norm": [abs(f - e) / e for f, e in zip(found["norms"], expected["norms"])],
        "gradient": tensor_errors(found["gradients"], expected["gradients"]),
        "weight": weight.item(),
        "norms_before_clipping": found["norms"],
        "is_sharded": found["is_sharded"],
        "is_offloaded": found["is_offloaded"],
        "stored": found["stored"],
        "state_dtypes": found["state_dtypes"],
    }


def same_bits(found: dict, expected: dict) -> bool:
    """Whether two runs took the same steps to the last bit."""
    return found["losses"] == expected["losses"] and all(
        torch.equal(f[name], e[name]) for f, e in zip(found["gradients"], expected["gradients"]) for name in e
    )


def unsharded_run(cell: Cell, world_size: int) -> dict:
    """One plain fp32 process on all rows at once: what the mathematics says, whatever the split."""
    model = make_model(dataclasses.replace(cell, dtype="fp32"))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE)
    out = {"losses": [], "norms": [], "gradients": []}
    per_rank = [make_batches(cell, rank, world_size) for rank in range(world_size)]
    for step in range(STEPS):
        batches = [batch for steps in per_rank for batch in steps[step]]
        ids, labels = (torch.cat([batch[name] for batch in batches]) for name in ("input_ids", "labels"))
        logits = model(ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        out["losses"].append(loss.item())
        out["norms"].append(norm.item())
        out["gradients"].append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    out["weights"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return out


def run_faults(base: HookConfig, accelerator: Accelerator) -> dict:
    """Plant each classic fault in the recipe's path; the tests demand that the comparison above sees it."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    found = {}
    enable = PreTrainedModel.activation_checkpointing_enable

    def enable_without_random_state(model, activation_checkpointing_kwargs, **kwargs):
        forgetful = {**activation_checkpointing_kwargs, "preserve_rng_state": False}
        return enable(model, activation_checkpointing_kwargs=forgetful, **kwargs)

    dropout = Cell("block", "every", "fp32", "lora")
    with mock.patch.object(PreTrainedModel, "activation_checkpointing_enable", enable_without_random_state):
        run = sharded_run(dropout, base, accelerator)
    found["dropout state not kept"] = compare(run, replica_run(dropout, world_size, rank))

    def mean_of_means(model, batch, step_label_tokens, world_size):
        local_tokens = max(losses.num_label_tokens(batch["labels"]), 1)
        return losses.micro_batch_loss(model, batch, local_tokens * world_size, world_size)

    def loss_in_bf16(logits, labels):
        logits, labels = logits[:, :-1].bfloat16().flatten(0, 1), labels[:, 1:].flatten()
        return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")

    def forgets_a_unit(model, units, *args):
        return hook_wrap.apply_units(model, units[:-1], *args)

    plain = Cell("block")
    expected = unsharded_run(plain, world_size)
    with mock.patch.object(finetune, "micro_batch_loss", mean_of_means):
        found["mean of means"] = compare(sharded_run(plain, base, accelerator), expected)
    with mock.patch.object(losses, "token_loss_sum", loss_in_bf16):
        found["loss in bf16"] = compare(sharded_run(plain, base, accelerator), expected)
    with mock.patch.object(apply, "apply_units", forgets_a_unit):
        found["a key ignored"] = message_of(lambda: sharded_run(plain, base, accelerator))
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
    for name, uses_scaler in (("fp16", True), ("fused", False)):
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17)  # fp16 ends at 2**16
        found = sharded_run(cell, base, accelerator, uses_scaler)
        out[name] = [{key: row[key] for key in LOGGED} for row in found["log"]]
        out[f"{name}_state_dtypes"] = found["state_dtypes"]
    accelerator.scaler, accelerator.native_amp, accelerator.state._mixed_precision = None, own_amp, own_precision
    plain = replica_run(dataclasses.replace(cell, dtype="fp32"), accelerator.num_processes, accelerator.process_index)
    per_rank = [None] * accelerator.num_processes
    dist.all_gather_object(per_rank, out)
    return {
        **out,
        "same_on_all_ranks": all(json.dumps(other) == json.dumps(out) for other in per_rank),
        "fp32_loss": plain["losses"],
        "fp32_norms": plain["norms"],
    }


def message_of(run: Callable[[], object]) -> str:
    """The ValueError that a run ends with, empty if it does not."""
    try:
        run()
    except ValueError as error:
        return str(error)
    return ""


def wrap(cell: Cell, base: HookConfig, accelerator: Accelerator, chunk_tokens: int = 0) -> torch.nn.Module:
    """A wrapped model, as the recipe wraps it."""
    config, model = cell.config(base), make_model(cell)
    if chunk_tokens:
        compute_loss_in_chunks(model, chunk_tokens)
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
    rank, world_size = accelerator.process_index, accelerator.num_processes
    cell = Cell("block", "every")
    batches = make_batches(cell, rank, world_size)[0]
    plain = sharded_run(cell, base, accelerator)
    evaluated = []

    def clip_after_evaluation(accelerator, model, max_norm):
        evaluated.append(evaluate(accelerator, model, batches, losses.micro_batch_loss))
        return clip(accelerator, model, max_norm)

    clip = finetune.clip_grad_norm
    with mock.patch.object(finetune, "clip_grad_norm", clip_after_evaluation):
        disturbed = sharded_run(cell, base, accelerator)
    without_reshard = mock.patch.object(evaluation, "reshard_all", lambda model: None)
    with mock.patch.object(finetune, "clip_grad_norm", clip_after_evaluation), without_reshard:
        naive = sharded_run(cell, base, accelerator)
    expected = unsharded_run(cell, world_size)["losses"][0]
    return {
        "same_bits": same_bits(disturbed, plain),
        "naive_norm_error": abs(naive["norms"][0] - plain["norms"][0]) / plain["norms"][0],
        "loss_error": abs(evaluated[0] - expected) / expected,
    }


def run_non_finite(base: HookConfig, accelerator: Accelerator) -> dict:
    """A loss that is nan on the last rank alone: every rank must end, before any weight changes."""
    is_last_rank = accelerator.process_index == accelerator.num_processes - 1

    def nan_on_one_rank(logits, labels):
        return logits.float().sum() * (float("nan") if is_last_rank else 1.0)

    code = None
    with mock.patch.object(losses, "token_loss_sum", nan_on_one_rank), mock.patch("torch.optim.AdamW.step") as step:
        try:
            sharded_run(Cell("block"), base, accelerator)
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
    export_model(model, tokenizer, folder, torch.bfloat16, accelerator.is_main_process)
    accelerator.wait_for_everyone()
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
        sharded_run(Cell("block", accumulation=3), base, accelerator)
    return alive


def run_chunked(base: HookConfig, accelerator: Accelerator) -> dict:
    """The loss in chunks: of 5 tokens, so several per micro-batch, against the same replicas as the plain loss; and
    [all-gathers, reduce-scatters] with and without it."""
    found: dict = {"cells": {}, "collectives": {}, "offloaded_same_bits": [], "slices": []}
    offloads = (("hook_offload_optimizer", True),)
    with mock.patch.object(OffloadedAdamW, "slice_bytes", 10_000):
        for dtype, training in (("fp32", "full"), ("bf16", "lora")):
            cell = Cell("embeddings", "every", dtype, training, 3)
            runs = [sharded_run(dataclasses.replace(cell, extra=extra), base, accelerator) for extra in ((), offloads)]
            equal = [torch.equal(runs[0]["weights"][name], runs[1]["weights"][name]) for name in runs[0]["weights"]]
            found["offloaded_same_bits"].append(same_bits(*runs) and all(equal))
            found["slices"].append([run["slices"] for run in runs])
    for wrap_name in ("block", "embeddings"):
        for dtype, training, tied in (("fp32", "full", False), ("fp32", "full", True), ("bf16", "lora", False)):
            cell = Cell(wrap_name, "every", dtype, training, 3, tied)
            expected = replica_run(cell, accelerator.num_processes, accelerator.process_index)
            found["cells"][cell.name] = compare(sharded_run(cell, base, accelerator, chunk_tokens=5), expected)
        plain, chunked = (wrap(Cell(wrap_name, dtype="bf16"), base, accelerator, chunk) for chunk in (0, 5))
        found["collectives"][wrap_name] = [collectives_of(plain), collectives_of(chunked, is_chunked=True)]
    dials = (*offloads, ("hook_norm_dtype", "fp32"), ("fsdp_activation_checkpointing_offload", True))
    cell = Cell("embeddings", "every", "bf16", "lora", 3, extra=dials)
    expected = replica_run(cell, accelerator.num_processes, accelerator.process_index)
    with mock.patch.object(OffloadedAdamW, "slice_bytes", 10_000):
        found["cells"]["all dials"] = compare(sharded_run(cell, base, accelerator, chunk_tokens=5), expected)
    return found


def run_performance(base: HookConfig, accelerator: Accelerator) -> dict:
    """finetune_performance.py's loop against the replica and against finetune.py's, to the last bit; compiled blocks
    against the replica, and recomputed ones against those that are not, dropout on.

    The graphs are captured and split for recompute as for a GPU; inductor's code for them would take minutes here.
    """
    found: dict = {"cells": {}, "same_bits": [], "compiled": {}}
    deferred = (("hook_reduce_every_micro_batch", False), ("hook_prefetch_units", 2))
    for dtype, training in (("fp32", "full"), ("bf16", "lora"), ("bf16", "full")):
        cell = Cell("two_blocks", "every_2nd", dtype, training, 3, extra=deferred)
        expected = replica_run(cell, accelerator.num_processes, accelerator.process_index)
        run = sharded_run(cell, base, accelerator, script=finetune_performance)
        found["cells"][cell.name] = compare(run, expected)
        found["same_bits"].append(same_bits(run, sharded_run(cell, base, accelerator)))
    counters.clear()
    cell = Cell("two_blocks", "every_2nd", accumulation=3)
    expected = replica_run(cell, accelerator.num_processes, accelerator.process_index)
    own = torch.nn.Module.compile
    with mock.patch.object(torch.nn.Module, "compile", lambda block: own(block, backend="aot_eager")):
        run = sharded_run(cell, base, accelerator, script=finetune_performance, is_compiled=True)
        found["compiled"][cell.name] = compare(run, expected)
        runs = [
            sharded_run(Cell("two_blocks", mode, training="lora"), base, accelerator, is_compiled=True)
            for mode in ("none", "every")
        ]
    found["compiled_recompute_same_bits"] = same_bits(*runs)
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


def main() -> None:
    out_path, *wraps = sys.argv[1:]
    gc.freeze()  # the imported libraries are never garbage; looking through them would cost more than a cell
    gc.disable()  # each cell collects once, at its end
    for script in (finetune, finetune_mem_limit, finetune_performance):
        script.memory = lambda device: {"live_tensors_gib": 0.0}  # counting live tensors costs more than a tiny step
    base = read_hook_config(None)
    base = dataclasses.replace(base, hook_reduce_dtype="fp32", hook_offload_optimizer=False)
    accelerator = make_accelerator(base)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    results: dict = {"world_size": world_size, "cells": {}, "unsharded": {}}
    cells = [cell for cell in grid() if not wraps or cell.wrap in wraps]
    if wraps == ["quick"]:  # for other world sizes
        quick = product(("block", "two_blocks", "embeddings"), (("fp32", "full"), ("bf16", "lora")))
        cells = [Cell(wrap, "every", dtype, training, accumulation=3, layers=3) for wrap, (dtype, training) in quick]
    references: dict = {}
    for cell in cells:
        key = dataclasses.replace(
            cell, wrap="", recompute="", extra=tuple(e for e in cell.extra if e[0] == "hook_norm_dtype")
        )
        if key not in references:
            references[key] = replica_run(cell, world_size, rank)
        found = sharded_run(cell, base, accelerator)
        entry = compare(found, references[key])
        if cell.training == "full" and cell.dtype == "fp32" and not cell.extra:
            plain = Cell("", tied=cell.tied, accumulation=cell.accumulation, training="unsharded")
            if plain not in references:
                references[plain] = unsharded_run(cell, world_size)
            entry["unsharded"] = compare(found, references[plain])
        without = dataclasses.replace(cell, recompute="none")
        if cell.recompute == "none":
            references[without] = found
        elif without in references:
            entry["same_bits_as_without_recompute"] = same_bits(found, references[without])
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
        results["export"] = run_export(base, accelerator, Path(out_path).parent / "exported")
        results["logits_alive"] = run_graph_lifetime(base, accelerator)
    gathered = [None] * world_size
    dist.all_gather_object(gathered, [entry["norms_before_clipping"] for entry in results["cells"].values()])
    results["norms_equal_on_all_ranks"] = all(other == gathered[0] for other in gathered)
    if rank == 0:
        Path(out_path).write_text(json.dumps(results, indent=1))
    end(accelerator)


if __name__ == "__main__":
    main()
