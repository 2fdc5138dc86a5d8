"""All checks of one model under one YAML: what verify.py runs on its ranks, and tests on theirs."""

import dataclasses
import sys
import warnings
from collections.abc import Iterator
from functools import partial

from accelerate import Accelerator
from hooks.apply import plan_hooks
from hooks.config import HookConfig, read_hook_config
from torch import nn
from training.launch import end, make_accelerator, stop_together
from transformers import HfArgumentParser, PreTrainedConfig

from .architecture import (
    balancing_term,
    check_causal,
    own_loss,
    packed_isolation,
    scaled_threshold,
    unsized_model,
)
from .cases import (
    BALANCING_CASE,
    BALANCING_LORA_CASE,
    CASES,
    DEFERRED_TOLERANCE,
    LORA_CASES,
    REDUCED_BF16_TOLERANCE,
    TOLERANCE,
    Case,
    Check,
    acting_checks,
    compare,
    config_of,
    exact_config,
    gradient_check,
    reference_key,
    same_bits_check,
)
from .cpu_ranks import agreement_group, captured, describe, failed_alike, run_on_cpu_ranks
from .exactness import Run
from .proof_arguments import VerifyArguments, build_case, load_model_config
from .proof_report import exit_status, json_report, print_json, table, verdict
from .runs import Failure, prepared, shared_references, train
from .shrink import build_tiny_model
from .structure_checks import adapter_check, structure_checks

MAX_LAYERS = 48  # of a tiny model that keeps the number of layers
PACKED, REAL_UNITS = "packed documents", "units at real size"


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
        build = tiny_builder(model_config, config)
        for case in (CASES[0], *(LORA_CASES[:1] if lora else ())):
            build_case(build, case, lora)
    with stop_together():
        accelerator = make_accelerator(exact_config(config))
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
    cases += [BALANCING_LORA_CASE] if has_balancing and lora is not None else []
    build = tiny_builder(model_config, config)
    group = agreement_group()
    whole, cause = unsized_model(model_config)
    min_num_params = scaled_threshold(config.fsdp_min_num_params, build(), whole)
    runs: dict[Case, Run] = {}
    configs = {case: config_of(case, config, min_num_params) for case in cases}
    keys = {case: (*reference_key(case, configs[case]), build.keywords["keeps_layers"]) for case in cases}
    missing = {key: case for case, key in keys.items() if key not in references}
    known = references | shared_references(missing, configs, lambda case: build_case(build, case, lora))
    references |= {key: run for key, run in known.items() if isinstance(run, Run)}
    for case in cases:
        run_config, expected, failure = configs[case], known[keys[case]], ""
        if isinstance(expected, Failure):  # the same on every rank
            is_refused = expected.is_refusal and case.dropout > 0
            detail = f"not proved: {expected.error}"
            detail = detail if is_refused else f"the tiny model does not run ({expected.described})"
            yield Check(case.name, is_refused, not is_refused, detail=detail, can_run=is_refused)
            continue
        try:
            model = build_case(build, case, lora)
            runs[case] = train(prepared(model, run_config, accelerator, case), run_config, case, expected)
        except (Exception, SystemExit) as error:  # a model that cannot run is a finding, and the other checks go on
            accelerator.free_memory()
            failure = describe(error)
        if failed_alike(failure, case.name, group):
            yield Check(case.name, False, detail=failure)
            continue
        tolerance = TOLERANCE if config.hook_reduce_every_micro_batch else DEFERRED_TOLERANCE
        if run_config.hook_reduce_dtype == "bf16" and accelerator.num_processes > 2:
            tolerance = REDUCED_BF16_TOLERANCE
        check = compare(case, runs[case], expected, run_config.hook_param_dtype, tolerance)
        if case.use_peft and lora.lora_dropout and not model.peft_config["default"].lora_dropout:
            check.detail = "; ".join(filter(None, (check.detail, "run with --lora_dropout 0, which its experts need")))
        yield check
        if case in (CASES[0], LORA_CASES[0]):
            yield from gradient_check(expected, "gradient in every " + ("adapter" if case.use_peft else "tensor"))
    yield from same_bits_check(runs)
    experts = build_case(build, BALANCING_CASE, None) if BALANCING_CASE in runs else None
    yield from acting_checks(runs, 0.0 if experts is None else balancing_term(experts))
    yield from model_checks(config, build, lora, min_num_params, whole, cause)


def model_checks(
    config: HookConfig, build: partial, lora: VerifyArguments | None, limit: int, whole: nn.Module | None, cause: str
) -> Iterator[Check]:
    """What needs no training: units, what the hooks find in the model, what its architecture can do."""
    if whole is None:
        yield Check(REAL_UNITS, True, False, detail=f"not proved: the real model could not be built ({cause})")
    else:
        yield from unit_check(whole, config, REAL_UNITS)
    model = build_case(build, CASES[0], None)
    yield from unit_check(model, config_of(CASES[0], config, limit), "units")
    if (config.hook_wrap_function or config.hook_checkpoint_function) and not build.keywords["keeps_layers"]:
        detail = f"not proved: more than {MAX_LAYERS} layers, so that a function of the user meets other names here"
        yield Check("the user's function", True, False, detail=detail)
    yield from structure_checks(model, config.hook_norm_dtype is not None)
    if lora is not None:
        yield from adapter_check(build_case(build, LORA_CASES[0], lora), lora.lora_alpha / lora.lora_r)
    isolation = packed_isolation(model)
    yield Check(PACKED, isolation == "isolated", False, detail=isolation)
    yield Check("the model's own loss", True, False, detail=own_loss(model))
    keys = [key for key in ("hook_offload_optimizer", "fsdp_activation_checkpointing_offload") if getattr(config, key)]
    keys += ["fp16 and its loss scaler"] if "fp16" in (config.hook_param_dtype, config.hook_reduce_dtype) else []
    if keys:
        yield Check("needs a GPU", True, False, detail=f"not proved: {', '.join(keys)}")


def tiny_builder(model_config: PreTrainedConfig, config: HookConfig) -> partial:
    """Makes tiny models, with as many layers as the real one where a function of the user may name them."""
    names_layers = bool(config.hook_wrap_function or config.hook_checkpoint_function)
    num_layers = getattr(model_config.get_text_config(), "num_hidden_layers", None) or 0
    return partial(build_tiny_model, model_config, keeps_layers=names_layers and num_layers <= MAX_LAYERS)


def unit_check(model: nn.Module, config: HookConfig, name: str) -> Iterator[Check]:
    """At least two units, the root included, unless the YAML asks for one; and a plan of what is recomputed."""
    try:
        units = plan_hooks(model, config).units
    except Exception as error:  # the user's own function may raise anything
        yield Check(name, False, detail=str(error) if isinstance(error, ValueError) else describe(error))
        return
    is_passed = bool(units) or config.fsdp_auto_wrap_policy == "NO_WRAP"
    yield Check(name, is_passed, detail=f"{len(units) + 1} units, the root included")
