"""The two runs that are compared: a model under the recipe's hooks and loop, and one process that holds it whole."""

import dataclasses
import types
from collections.abc import Callable
from contextlib import nullcontext

import finetune
import torch
import torch.distributed as dist
from accelerate import Accelerator
from hooks.apply import apply_hooks, plan_hooks
from hooks.config import HookConfig
from hooks.dtypes import DTYPES
from hooks.live import report_wrap
from hooks.structure import kept_in_fp32
from rows.batches import Step
from saving.folder import START
from saving.state import LiveState
from torch import nn
from training.arguments import FinetuneArguments
from training.launch import make_device_mesh
from training.optimizer import make_optimizer, prepare
from training.progress import Progress
from utils import precision_policies

from .architecture import balancing_weight, norms_by_name, set_buffer_dtype, text_tokens
from .cases import EVAL_STEPS, ROWS, STEPS, Case, RecordingLog, batches_of, held_out_of
from .cpu_ranks import describe
from .exactness import SEED, Run, follow, is_inside, local, recorded_outputs, reference_run


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why an unsharded run of the tiny model did not end."""

    error: str
    described: str  # with its type and place
    is_refusal: bool  # a ValueError: the model says that it cannot be used so


def prepared(
    model: nn.Module,
    config: HookConfig,
    accelerator: Accelerator,
    case: Case,
    compile_blocks: Callable[[nn.Module], None] | None = None,
) -> LiveState:
    """A model under the recipe's hooks in the recipe's order, with its optimizer and schedule.

    Raises ValueError where the live model is not what was planned.
    """
    plan, mesh = plan_hooks(model, config), make_device_mesh(accelerator)
    apply_hooks(model, plan, config, mesh, precision_policies(config), compile_blocks=compile_blocks)
    report_wrap(model, plan, config, is_cpu=True)
    optimizer = make_optimizer(model, arguments_of(case), config)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, case.arithmetic.last_rate, STEPS)
    model, optimizer = prepare(accelerator, model, optimizer)
    return LiveState(accelerator, model, optimizer, scheduler, dict(START))


def train(
    live: LiveState,
    config: HookConfig,
    case: Case,
    expected: Run | None,
    script: types.ModuleType = finetune,
) -> Run:
    """The script's own training loop, every step from the weights that the reference has there; without one, from its
    own. One evaluation in the middle, which must change nothing, and one at the end."""
    model, rank, run, log = live.model, live.accelerator.process_index, Run(), RecordingLog()
    follow(model, live.optimizer.optimizer, run, expected)
    tokens = text_tokens(model)
    batches = batches_of(rank, case.accumulation, tokens)
    steps = iter([Step(micro_batches, {"epoch": 0, "rows_seen": 0}, []) for micro_batches in batches])
    torch.manual_seed(SEED + rank)
    run.outputs.append({})
    with recorded_outputs(model, run.outputs[0]) if expected and expected.outputs else nullcontext():
        script.train(
            live,
            steps,
            held_out_of(rank, tokens),
            log=log,
            progress=Progress(),
            writer=None,
            arguments=arguments_of(case),
            config=config,
        )
    run.logged = [values for values in log.written if "loss" in values]
    run.losses = [values["loss"] for values in run.logged]
    run.norms = [values["grad_norm"] for values in run.logged]
    run.evaluations = [values["eval_loss"] for values in log.written if "eval_loss" in values]
    run.weights.append({n: local(p) for n, p in model.named_parameters() if p.requires_grad})
    live.accelerator.free_memory()
    return run


def arguments_of(case: Case) -> FinetuneArguments:
    """What the script's loop reads of its arguments."""
    arithmetic = case.arithmetic
    return FinetuneArguments(
        learning_rate=arithmetic.learning_rate,
        weight_decay=arithmetic.weight_decay,
        adam_epsilon=arithmetic.adam_epsilon,
        max_grad_norm=arithmetic.max_grad_norm,
        per_device_train_batch_size=ROWS,
        logging_steps=1,
        eval_steps=EVAL_STEPS,
        seed=SEED,
        output_dir="",
    )


def shared_references(
    missing: dict[tuple, Case], configs: dict[Case, HookConfig], build: Callable[[Case], nn.Module]
) -> dict[tuple, Run | Failure]:
    """The unsharded run of each key. One rank makes it and hands it to all; the ranks take turns, the long runs first.
    Every rank must call it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own: dict[tuple, Run | Failure] = {}
    longest_first = sorted(missing, key=lambda key: (missing[key].accumulation, missing[key].is_policy), reverse=True)
    for key in longest_first[rank::world_size]:
        case = missing[key]
        try:
            own[key] = reference_of(build(case), configs[case], world_size, case)
        except Exception as error:
            own[key] = Failure(str(error), describe(error), isinstance(error, ValueError))
    parts: list[dict] = [{}] * world_size
    dist.all_gather_object(parts, own)
    return {key: run for part in parts for key, run in part.items()}


def reference_of(model: nn.Module, config: HookConfig, world_size: int, case: Case) -> Run:
    """One process that holds the whole model and runs the rows of all ranks."""
    tokens = text_tokens(model)
    per_rank = [batches_of(rank, case.accumulation, tokens) for rank in range(world_size)]
    steps = [list(micro_batches) for micro_batches in zip(*per_rank)]
    norms = norms_by_name(model)[0] if config.hook_norm_dtype else frozenset()
    kept = kept_in_fp32(model)[0] if config.hook_param_dtype != "fp32" else []
    dtypes = {"param_dtype": DTYPES[config.hook_param_dtype], "reduce_dtype": DTYPES[config.hook_reduce_dtype]}
    modules = {"fp32_norms": frozenset(norms), "fp32_modules": frozenset(kept) - frozenset(norms)}
    defers = not config.hook_reduce_every_micro_batch
    arithmetic = dataclasses.replace(case.arithmetic, **dtypes, **modules, defers_reduction=defers)
    stays = arithmetic.fp32_norms | arithmetic.fp32_modules
    for name, parameter in model.named_parameters():  # a frozen base is stored in the dtype it computes in
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
        elif not is_inside(name, stays):
            parameter.data = parameter.data.to(arithmetic.param_dtype)
    if config.hook_buffer_dtype is not None:
        set_buffer_dtype(model, DTYPES[config.hook_buffer_dtype])
    held_out = [batch for rank in range(world_size) for batch in held_out_of(rank, tokens)]
    return reference_run(model, steps, arithmetic, balancing_weight(model.config), held_out, EVAL_STEPS)
