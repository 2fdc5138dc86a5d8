"""Prove, on a laptop's CPU, that your model trains exactly under your YAML.

    python recipes/verify.py --model_name_or_path Qwen/Qwen3-8B --accelerate_config accelerate_configs/mem_limit.yaml
    python recipes/verify.py --model_name_or_path my_folder --accelerate_config my.yaml --use_peft --json

Only the model's config is read. A tiny model of the same architecture is trained for three steps by two processes with
the recipe's hooks and loop, and compared with one process that holds it whole, in fp32: loss, every gradient, the
norm, the weights. Prints a table; exits 1 if a check fails, naming the module that is first to differ, and 2 if the
tiny model does not run even unsharded.

To copy it: finetune.py with the files it names, architecture.py, cpu_ranks.py, exact_checks.py, exactness.py,
shrink.py, shrink_layers.py, verify_arguments.py and a YAML.
"""

import dataclasses
import sys
import types
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import finetune
import torch
import torch.distributed as dist
from accelerate import Accelerator
from architecture import check_causal, own_loss, packed_isolation, text_tokens
from checkpoint import START
from cpu_ranks import PATIENCE_S, captured, describe, failed_alike, run_on_cpu_ranks
from exact_checks import (
    BALANCING_CASE,
    CASES,
    DEFERRED_TOLERANCE,
    EVAL_STEPS,
    LORA_CASES,
    REDUCED_BF16_TOLERANCE,
    STEPS,
    TOLERANCE,
    Case,
    Check,
    RecordingLog,
    acting_checks,
    batches_of,
    compare,
    gradient_check,
    held_out_of,
    same_bits_check,
)
from exactness import SEED, Run, is_inside, local, recorded_outputs, reference_run
from hook_activation_checkpointing import (
    apply_activation_checkpointing,
    plan_activation_checkpointing,
    recomputed_blocks,
)
from hook_config import HookConfig, read_hook_config
from hook_wrap import apply_units, plan_units
from launch import end, make_accelerator, make_device_mesh, stop_together
from losses import auxiliary_weight
from model_loading import add_adapters
from model_structure import is_norm, kept_in_fp32, num_parameters
from optimizer import make_optimizer, prepare
from shrink import build_tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, HfArgumentParser, PreTrainedConfig
from utils import DTYPES, cast_buffers, cast_stored_parameters, mixed_precision_policy, norm_precision_policy
from verify_arguments import (
    VerifyArguments,
    exit_status,
    json_report,
    load_model_config,
    print_json,
    table,
    verdict,
)
from wrap_report import check_against_plan, read_units

PACKED = "packed documents"


def main() -> None:
    sys.exit(print_json(*captured(run_command)) if "--json" in sys.argv else run_command())


def run_command() -> int:
    """The command; returns its exit status."""
    parser = HfArgumentParser(VerifyArguments)
    arguments, unknown = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    if unknown:
        parser.error(f"unknown argument: {' '.join(unknown)}")
    if arguments.num_processes < 2:
        parser.error(f"--num_processes: found {arguments.num_processes}, allowed: 2 or more (one shards nothing)")
    return run_on_cpu_ranks(prove, arguments, arguments.num_processes)


def prove(arguments: VerifyArguments) -> None:
    """One rank of the command: all checks, the table, the exit status."""
    warnings.filterwarnings("ignore")  # the table is all that is printed
    lora = arguments if arguments.use_peft else None
    with stop_together():
        config = read_hook_config(arguments.accelerate_config)
        model_config = load_model_config(arguments)
        check_causal(model_config)
        for case in (CASES[0], *(LORA_CASES[:1] if lora else ())):
            build_case(model_config, case, lora)
    with stop_together():
        accelerator = make_accelerator(exact_config(config), 1.0)
    checks: list[Check] = []
    try:
        for check in verify(model_config, config, accelerator, lora):
            checks.append(check)
    except Exception as error:  # what is known already is printed all the same
        checks.append(Check("verification", False, detail=describe(error)))
    if arguments.packing:
        checks = [dataclasses.replace(c, is_proof=True) if c.name == PACKED else c for c in checks]
    model, ranks = arguments.model_name_or_path, accelerator.num_processes
    if arguments.json:
        accelerator.print(json_report(model, config.path, ranks, checks))
    else:
        accelerator.print("\n".join(table(checks)))
        accelerator.print(f"{model} {verdict(checks)} under {config.path} (tiny model, CPU) on {ranks} ranks")
    sys.stdout.flush()
    accelerator.wait_for_everyone()  # the first exit ends the others
    end(accelerator)
    sys.exit(exit_status(checks))


def exact_config(config: HookConfig) -> HookConfig:
    """The YAML in fp32, on any number of processes: what the checks run in unless they say otherwise."""
    return dataclasses.replace(config, mixed_precision="no", hook_param_dtype="fp32", num_processes=None)


def build_case(model_config: PreTrainedConfig, case: Case, lora: VerifyArguments | None) -> nn.Module:
    """The tiny model of a case, its weights rounded to bf16 as a checkpoint's are where the YAML's dtypes are proved.

    Raises:
        ValueError: no such model can be built, or no such adapters.
    """
    try:
        model = build_tiny_model(model_config, dropout=case.dropout)
    except Exception as error:
        raise ValueError(f"no tiny model could be built from this config: {type(error).__name__}: {error}") from error
    if case.balances:
        model.config.output_router_logits = True
    if case.is_policy:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.bfloat16()
    if not case.use_peft:
        return model
    torch.manual_seed(SEED)
    adapted = add_adapters(model, lora)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero at the start: the gradient of lora_A would be zero too
            nn.init.normal_(parameter, std=0.02)
    return adapted


def verify(
    model_config: PreTrainedConfig,
    config: HookConfig,
    accelerator: Accelerator,
    lora: VerifyArguments | None = None,
    references: dict[tuple, Run] | None = None,
) -> Iterator[Check]:
    """Run all checks of one model under one YAML, yielding each as it is done. Every rank must call it.

    `references` keeps the unsharded runs for the same model under another YAML.
    """
    references = {} if references is None else references
    has_balancing = getattr(model_config.get_text_config(), "output_router_logits", None) is not None
    cases = [*CASES, *([BALANCING_CASE] if has_balancing else ()), *(LORA_CASES if lora is not None else ())]
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
    runs: dict[Case, Run] = {}
    for case in cases:
        failure, can_run = "", True
        run_config = config_of(case, config, model_config)
        key = reference_key(case, run_config)
        try:
            if key not in references:
                model = build_case(model_config, case, lora)
                references[key] = reference_of(model, run_config, accelerator, case)
        except Exception as error:
            failure, can_run = f"the tiny model does not run ({describe(error)})", False
            if case.dropout and isinstance(error, ValueError):
                yield Check(case.name, True, False, detail=f"not proved: {error}")
                continue
        try:
            if not failure:
                runs[case] = sharded_run(build_case(model_config, case, lora), run_config, accelerator, case)
        except (Exception, SystemExit) as error:  # a model that cannot run is a finding, and the other checks go on
            accelerator.free_memory()
            failure = describe(error)
        if failed_alike(failure, case.name, group):
            yield Check(case.name, False, detail=failure, can_run=can_run)
            continue
        tolerance = TOLERANCE if config.hook_reduce_every_micro_batch else DEFERRED_TOLERANCE
        if run_config.hook_reduce_dtype == "bf16" and accelerator.num_processes > 2:
            tolerance = REDUCED_BF16_TOLERANCE
        yield compare(case, runs[case], references[key], run_config.hook_param_dtype, tolerance)
    yield from same_bits_check(runs)
    yield from acting_checks(runs)
    model = build_case(model_config, CASES[0], lora)
    yield from unit_check(model, config_of(CASES[0], config, model_config))
    if CASES[0] in runs:
        yield from gradient_check(references[reference_key(CASES[0], config_of(CASES[0], config, model_config))])
    isolation = packed_isolation(model)
    yield Check(PACKED, isolation == "isolated", False, detail=isolation)
    yield Check("the model's own loss", True, False, detail=own_loss(model))
    keys = [key for key in ("hook_offload_optimizer", "fsdp_activation_checkpointing_offload") if getattr(config, key)]
    keys += ["fp16 and its loss scaler"] if "fp16" in (config.hook_param_dtype, config.hook_reduce_dtype) else []
    if keys:
        yield Check("needs a GPU", True, False, detail=f"not proved: {', '.join(keys)}")


def reference_key(case: Case, config: HookConfig) -> tuple:
    """What an unsharded run depends on: neither wrapping nor recompute."""
    dtypes = (config.hook_param_dtype, config.hook_reduce_dtype, config.hook_norm_dtype, config.hook_buffer_dtype)
    defers = case.accumulation > 1 and not config.hook_reduce_every_micro_batch
    return case.dropout, case.accumulation, case.use_peft, case.balances, dtypes, defers


def config_of(case: Case, config: HookConfig, model_config: PreTrainedConfig) -> HookConfig:
    """The YAML with what this case changes. A CPU has no fp16 (so bf16), and a tiny model needs a tiny threshold."""
    recompute = case.recompute and (config.fsdp_activation_checkpointing or case.name == "fp32, recompute")
    changes: dict[str, Any] = {"fsdp_activation_checkpointing": recompute, "hook_offload_optimizer": False}
    if config.fsdp_auto_wrap_policy == "SIZE_BASED_WRAP":
        with torch.device("meta"):
            whole = num_parameters(AutoModelForCausalLM.from_config(model_config))
        share = num_parameters(build_tiny_model(model_config)) / whole
        changes["fsdp_min_num_params"] = max(1, round(config.fsdp_min_num_params * share))
    if not case.is_policy:
        exact = {"hook_param_dtype": "fp32", "hook_reduce_dtype": "fp32", "hook_norm_dtype": None}
        return dataclasses.replace(config, **exact, hook_buffer_dtype=None, **changes)
    half = {"hook_param_dtype", "hook_reduce_dtype", "hook_buffer_dtype"}
    changes |= {key: "bf16" for key in half if getattr(config, key) == "fp16"}
    return dataclasses.replace(config, **changes)


def sharded_run(model: nn.Module, config: HookConfig, accelerator: Accelerator, case: Case) -> Run:
    """The recipe's hooks in the recipe's order, then the recipe's own training loop."""
    tokens = text_tokens(model)
    recomputed = plan_activation_checkpointing(model, config)
    units = plan_units(model, config)
    apply_activation_checkpointing(model, recomputed, config, is_cpu=True)
    mesh = make_device_mesh(accelerator)
    apply_units(model, units, config, mesh, mixed_precision_policy(config), norm_precision_policy(config))
    cast_stored_parameters(model, config)
    cast_buffers(model, config)
    check_against_plan(read_units(model), units, recomputed_blocks(model), recomputed)
    arithmetic, run = case.arithmetic, Run()
    rate, decay, epsilon = arithmetic.learning_rate, arithmetic.weight_decay, arithmetic.adam_epsilon
    optimizer = make_optimizer(model, rate, decay, (0.9, 0.999), epsilon)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, arithmetic.last_rate, STEPS)
    model, prepared = prepare(accelerator, model, optimizer)

    def record_gradients(*_: object) -> None:
        named = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        run.gradients.append({n: None if g is None else local(g) for n, g in named.items()})

    optimizer.register_step_pre_hook(record_gradients)
    rank = accelerator.process_index
    steps = iter(
        [(micro_batches, {"epoch": 0, "rows_seen": 0}) for micro_batches in batches_of(rank, case.accumulation, tokens)]
    )
    # One evaluation in the middle, which must change nothing, and one at the end.
    names = {"max_grad_norm": arithmetic.max_grad_norm, "logging_steps": 1, "eval_steps": EVAL_STEPS, "save_steps": 0}
    held_out, log = held_out_of(rank, tokens), RecordingLog()
    options = types.SimpleNamespace(**names)
    torch.manual_seed(SEED + rank)
    with recorded_outputs(model, run.outputs):
        finetune.train(
            accelerator, model, prepared, scheduler, steps, held_out, log, dict(START), None, [], options, config
        )
    trained = [values for values in log.written if "loss" in values]
    run.losses = [values["loss"] for values in trained]
    run.norms = [values["grad_norm"] for values in trained]
    run.evaluations = [values["eval_loss"] for values in log.written if "eval_loss" in values]
    run.weights = {n: local(p) for n, p in model.named_parameters() if p.requires_grad}
    accelerator.free_memory()
    return run


def reference_of(model: nn.Module, config: HookConfig, accelerator: Accelerator, case: Case) -> Run:
    """One process that holds the whole model and runs the rows of all ranks."""
    tokens = text_tokens(model)
    per_rank = [batches_of(rank, case.accumulation, tokens) for rank in range(accelerator.num_processes)]
    steps = [list(micro_batches) for micro_batches in zip(*per_rank)]
    norms = [name for name, module in model.named_modules() if is_norm(module)] if config.hook_norm_dtype else []
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
    cast_buffers(model, config)
    held_out = [batch for rank in range(accelerator.num_processes) for batch in held_out_of(rank, tokens)]
    weight, rank = auxiliary_weight(model), accelerator.process_index
    return reference_run(model, steps, arithmetic, weight, rank, held_out, EVAL_STEPS)


def unit_check(model: nn.Module, config: HookConfig) -> Iterator[Check]:
    """At least two units, the root included, unless the YAML asks for one."""
    try:
        units = plan_units(model, config)
    except Exception as error:  # the user's own function may raise anything
        yield Check("units", False, detail=str(error) if isinstance(error, ValueError) else describe(error))
        return
    is_passed = bool(units) or config.fsdp_auto_wrap_policy == "NO_WRAP"
    yield Check("units", is_passed, detail=f"{len(units) + 1} units, the root included")


if __name__ == "__main__":
    main()
