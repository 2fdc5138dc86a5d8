"""Prove, on a laptop's CPU, that your model trains exactly under your YAML.

    python recipes/verify.py --model_name_or_path Qwen/Qwen3-8B --accelerate_config accelerate_configs/mem_limit.yaml
    python recipes/verify.py --model_name_or_path my_folder --accelerate_config my.yaml --use_peft --json

Only the model's config is read. A tiny model of the same architecture is trained for three steps by two processes with
the recipe's hooks and loop, and compared with one process that holds it whole, in fp32: loss, every gradient, the
norm, the weights. Prints a table; exits 1 if a check fails, naming the module that is first to differ.

To copy it: finetune.py with the files it names, architecture.py, cpu_ranks.py, exact_checks.py, exactness.py,
shrink.py, shrink_layers.py and a YAML.
"""

import dataclasses
import json
import os
import sys
import traceback
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import finetune
import torch
from accelerate import Accelerator
from architecture import own_loss, packed_isolation
from cpu_ranks import run_on_cpu_ranks
from exact_checks import (
    BALANCING_CASE,
    CASES,
    DROPOUT,
    LORA_CASES,
    STEPS,
    Case,
    Check,
    batches_of,
    compare,
    gradient_check,
    same_bits_check,
    table,
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
from model_loading import add_adapters, check_not_quantized
from model_structure import is_norm, kept_in_fp32
from optimizer import make_optimizer, prepare
from shrink import build_tiny_model
from torch import nn
from transformers import AutoConfig, HfArgumentParser, PreTrainedConfig
from utils import DTYPES, cast_stored_parameters, mixed_precision_policy, norm_precision_policy
from wrap_report import check_against_plan, read_units


@dataclass
class VerifyArguments:
    """Prove that a model trains exactly under a YAML."""

    model_name_or_path: str = field(metadata={"help": "Local folder or hub name; only its config is read."})
    accelerate_config: str = field(metadata={"help": "The Accelerate YAML to prove."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the hub."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that the model's repository brings."})
    num_processes: int = field(default=2, metadata={"help": "Processes to shard over."})
    use_peft: bool = field(default=False, metadata={"help": "Check LoRA as well."})
    lora_r: int = field(default=4, metadata={"help": "Rank of the adapters in the tiny model."})
    lora_alpha: int = field(default=8, metadata={"help": "Scale of the adapters is lora_alpha / lora_r."})
    lora_dropout: float = field(default=DROPOUT, metadata={"help": "Dropout in the adapters."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"], metadata={"help": "Module names to adapt, or all-linear."}
    )
    json: bool = field(default=False, metadata={"help": "Print one JSON object and nothing else."})


def main() -> None:
    (arguments,) = HfArgumentParser(VerifyArguments).parse_args_into_dataclasses()
    sys.exit(run_on_cpu_ranks(prove, arguments, arguments.num_processes))


def prove(arguments: VerifyArguments) -> None:
    """One rank of the command: all checks, the table, the exit status."""
    warnings.filterwarnings("ignore")  # the table is all that is printed
    with stop_together():
        config = read_hook_config(arguments.accelerate_config)
        model_config = load_model_config(arguments)
        accelerator = make_accelerator(exact_config(config), 1.0)
    checks = list(verify(model_config, config, accelerator, arguments if arguments.use_peft else None))
    is_exact = all(check.is_passed for check in checks)
    if arguments.json:
        report = {"model": arguments.model_name_or_path, "yaml": config.path, "is_exact": is_exact}
        accelerator.print(json.dumps({**report, "checks": [dataclasses.asdict(check) for check in checks]}))
    else:
        accelerator.print("\n".join(table(checks)))
        verdict = "trains exactly" if is_exact else "does NOT train exactly"
        accelerator.print(f"{arguments.model_name_or_path} {verdict} under {config.path} (tiny model, CPU)")
    end(accelerator)
    sys.exit(0 if is_exact else 1)


def exact_config(config: HookConfig) -> HookConfig:
    """The YAML in fp32, on any number of processes: what the checks run in unless they say otherwise."""
    return dataclasses.replace(config, mixed_precision="no", hook_param_dtype="fp32", num_processes=None)


def load_model_config(arguments: VerifyArguments) -> PreTrainedConfig:
    """The model's config, from a folder or the hub. Raises ValueError where there is none, or weights are quantized."""
    name = arguments.model_name_or_path
    try:
        config = AutoConfig.from_pretrained(
            name, revision=arguments.model_revision, trust_remote_code=arguments.trust_remote_code
        )
    except Exception as error:
        raise ValueError(f"--model_name_or_path {name}: no config could be loaded: {error}") from error
    check_not_quantized(config)
    return config


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

    def build(case: Case) -> nn.Module:
        model = build_tiny_model(model_config, dropout=case.dropout)
        if case.balances:
            model.config.output_router_logits = True
        if not case.use_peft:
            return model
        torch.manual_seed(SEED)
        adapted = add_adapters(model, lora)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zero at the start: the gradient of lora_A would be zero too
                nn.init.normal_(parameter, std=0.02)
        return adapted

    has_balancing = getattr(model_config.get_text_config(), "output_router_logits", None) is not None
    cases = [*CASES, *([BALANCING_CASE] if has_balancing else ()), *(LORA_CASES if lora is not None else ())]
    runs: dict[Case, Run] = {}
    for case in cases:
        try:
            run_config = config_of(case, config)
            key = reference_key(case, run_config)
            if key not in references:
                try:
                    references[key] = reference_of(build(case), run_config, accelerator, case)
                except ValueError as error:
                    if not case.dropout:
                        raise
                    yield Check(case.name, True, detail=f"not possible with this architecture: {error}")
                    continue
            runs[case] = sharded_run(build(case), run_config, accelerator, case)
        except Exception as error:  # a model that cannot run is a finding, and the other checks go on
            accelerator.free_memory()
            place = traceback.extract_tb(error.__traceback__)[-1]
            detail = f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"
            yield Check(case.name, False, detail=detail)
            continue
        yield compare(
            case, runs[case], references[key], run_config.hook_param_dtype, not config.hook_reduce_every_micro_batch
        )
    yield from same_bits_check(runs)
    yield from unit_check(build(CASES[0]), config)
    if CASES[0] in runs:
        yield from gradient_check(references[reference_key(CASES[0], config_of(CASES[0], config))])
    yield Check("packed documents", True, detail=packed_isolation(build(CASES[0])))
    yield Check("the model's own loss", True, detail=own_loss(build(CASES[0])))


def reference_key(case: Case, config: HookConfig) -> tuple:
    """What an unsharded run depends on: neither wrapping nor recompute."""
    dtypes = (config.hook_param_dtype, config.hook_reduce_dtype, config.hook_norm_dtype)
    return case.dropout, case.accumulation, case.use_peft, case.balances, dtypes


def config_of(case: Case, config: HookConfig) -> HookConfig:
    """The YAML with what this case changes; a CPU has no fp16, so a policy of fp16 is checked as bf16."""
    recompute = case.recompute and (config.fsdp_activation_checkpointing or case.name == "fp32, recompute")
    changes = {"fsdp_activation_checkpointing": recompute, "hook_offload_optimizer": False}
    if not case.is_policy:
        return dataclasses.replace(
            config, hook_param_dtype="fp32", hook_reduce_dtype="fp32", hook_norm_dtype=None, **changes
        )
    half = {"hook_param_dtype", "hook_reduce_dtype"}
    changes |= {key: "bf16" for key in half if getattr(config, key) == "fp16"}
    return dataclasses.replace(config, **changes)


class RecordingLog:
    """Stands where the recipe's MetricsLog stands, and keeps what is written."""

    def __init__(self) -> None:
        self.total_steps, self.written = STEPS, []
        self.bar = types.SimpleNamespace(update=lambda: None)

    def say(self, text: str) -> None:
        """Nothing: the table is all that is printed."""

    def write(self, step: int, values: dict) -> None:
        """Keep one step's values."""
        self.written.append(values)


def sharded_run(model: nn.Module, config: HookConfig, accelerator: Accelerator, case: Case) -> Run:
    """The recipe's hooks in the recipe's order, then the recipe's own training loop."""
    recomputed = plan_activation_checkpointing(model, config)
    units = plan_units(model, config)
    apply_activation_checkpointing(model, recomputed, config, is_cpu=True)
    mesh = make_device_mesh(accelerator)
    apply_units(model, units, config, mesh, mixed_precision_policy(config), norm_precision_policy(config))
    cast_stored_parameters(model, config)
    check_against_plan(read_units(model), units, recomputed_blocks(model), recomputed)
    arithmetic, run = case.arithmetic, Run()
    rate, decay, epsilon = arithmetic.learning_rate, arithmetic.weight_decay, arithmetic.adam_epsilon
    optimizer = make_optimizer(model, rate, decay, (0.9, 0.999), epsilon)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    model, prepared = prepare(accelerator, model, optimizer)

    def record_gradients(*_: object) -> None:
        named = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        run.gradients.append({n: None if g is None else local(g) for n, g in named.items()})

    optimizer.register_step_pre_hook(record_gradients)
    rank = accelerator.process_index
    steps = iter(
        [(micro_batches, {"epoch": 0, "rows_seen": 0}) for micro_batches in batches_of(rank, case.accumulation)]
    )
    names = {"max_grad_norm": arithmetic.max_grad_norm, "logging_steps": 1, "eval_steps": 0, "save_steps": 0}
    log = RecordingLog()
    torch.manual_seed(SEED + rank)
    with recorded_outputs(model, run.outputs):
        finetune.train(
            accelerator, model, prepared, scheduler, steps, [], log, 0, types.SimpleNamespace(**names), config
        )
    run.losses = [values["loss"] for values in log.written]
    run.norms = [values["grad_norm"] for values in log.written]
    run.weights = {n: local(p) for n, p in model.named_parameters() if p.requires_grad}
    accelerator.free_memory()
    return run


def reference_of(model: nn.Module, config: HookConfig, accelerator: Accelerator, case: Case) -> Run:
    """One process that holds the whole model and runs the rows of all ranks."""
    per_rank = [batches_of(rank, case.accumulation) for rank in range(accelerator.num_processes)]
    steps = [list(micro_batches) for micro_batches in zip(*per_rank)]
    norms = [name for name, module in model.named_modules() if is_norm(module)] if config.hook_norm_dtype else []
    kept = kept_in_fp32(model)[0] if config.hook_param_dtype != "fp32" else []
    dtypes = {"param_dtype": DTYPES[config.hook_param_dtype], "reduce_dtype": DTYPES[config.hook_reduce_dtype]}
    modules = {"fp32_norms": frozenset(norms), "fp32_modules": frozenset(kept) - frozenset(norms)}
    arithmetic = dataclasses.replace(case.arithmetic, **dtypes, **modules)
    if any(not p.requires_grad for p in model.parameters()):  # a frozen base is stored in the dtype it computes in
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad and not is_inside(name, arithmetic.fp32_norms | arithmetic.fp32_modules):
                parameter.data = parameter.data.to(arithmetic.param_dtype)
    return reference_run(model, steps, arithmetic, auxiliary_weight(model), accelerator.process_index)


def unit_check(model: nn.Module, config: HookConfig) -> Iterator[Check]:
    """At least two units, the root included, unless the YAML asks for one."""
    try:
        units = plan_units(model, config)
    except ValueError as error:
        yield Check("units", False, detail=str(error))
        return
    is_passed = bool(units) or config.fsdp_auto_wrap_policy == "NO_WRAP"
    yield Check("units", is_passed, detail=f"{len(units) + 1} units, the root included")


if __name__ == "__main__":
    main()
