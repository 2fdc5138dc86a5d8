"""Prove, on a laptop's CPU, that your model trains exactly under your YAML.

    python recipes/verify.py --model_name_or_path Qwen/Qwen3-8B --accelerate_config accelerate_configs/mem_limit.yaml
    python recipes/verify.py --model_name_or_path my_folder --accelerate_config my.yaml --use_peft --json

Only the model's config is read. A tiny model of the same architecture is trained for three steps by two processes with
the recipe's hooks and loop, and compared with one process that holds it whole, in fp32: loss, every gradient, the
norm, the weights. Prints a table; exits 1 if a check fails, naming the module that is first to differ.

To copy it: finetune.py with the files it names, exactness.py, shrink.py, shrink_layers.py and a YAML.
"""

import dataclasses
import json
import os
import socket
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import finetune
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from exactness import (
    SEED,
    Arithmetic,
    Batch,
    Run,
    first_different_module,
    gradient_errors,
    local,
    recorded_outputs,
    reference_run,
    relative_error,
    weight_errors,
)
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
from model_structure import is_norm
from optimizer import make_optimizer, prepare
from shrink import build_tiny_model
from torch import nn
from transformers import AutoConfig, HfArgumentParser, PreTrainedConfig
from utils import DTYPES, cast_stored_parameters, mixed_precision_policy, norm_precision_policy
from wrap_report import check_against_plan, read_units

STEPS, ROWS, LENGTH = 3, 2, 16  # LENGTH beyond the tiny model's sliding windows
DROPOUT = 0.1
DEFERRED_TOLERANCE = 5e-6  # one reduction of a window: the additions are grouped otherwise
TOLERANCE = 1e-6  # fp32 rounding of another order of additions
LATER_STEPS = 5  # AdamW's first updates have the sign of the gradient and amplify rounding
WEIGHT_TOLERANCE = 5e-5
PACKED_TOLERANCE = 1e-5


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


@dataclass
class Check:
    """One line of the table. `errors` are relative (weights: absolute), in the order of COLUMNS."""

    name: str
    is_passed: bool
    errors: dict[str, float] = field(default_factory=dict)
    tolerance: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class Case:
    """One sharded run: what it changes in the YAML and in the model."""

    name: str
    recompute: bool = False
    dropout: float = 0.0
    accumulation: int = 1
    is_policy: bool = False  # the YAML's dtypes; else fp32
    use_peft: bool = False


COLUMNS = ("loss", "gradient", "norm", "weights")
CASES = (
    Case("fp32"),
    Case("fp32, recompute", recompute=True),
    Case("dropout, no recompute", dropout=DROPOUT),
    Case("dropout, recompute", recompute=True, dropout=DROPOUT),
    Case("accumulation 3", recompute=True, accumulation=3),
    Case("the YAML's dtypes", recompute=True, is_policy=True),
)
LORA_CASES = (
    Case("LoRA with dropout", recompute=True, accumulation=3, use_peft=True),
    Case("LoRA, the YAML's dtypes", recompute=True, is_policy=True, use_peft=True),
)


def main() -> None:
    (arguments,) = HfArgumentParser(VerifyArguments).parse_args_into_dataclasses()
    sys.exit(run_on_cpu_ranks(prove, arguments, arguments.num_processes))


def run_on_cpu_ranks(function: Callable[[Any], None], argument: Any, num_processes: int) -> int:
    """Call a function in processes that form one distributed run over gloo; returns the exit status of the first."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    arguments = (function, argument, num_processes, port)
    try:
        torch.multiprocessing.start_processes(run_rank, arguments, num_processes, start_method="fork")
    except torch.multiprocessing.ProcessExitedException as stopped:  # a rank that stopped has said why
        return abs(stopped.exit_code)
    return 0


def run_rank(rank: int, function: Callable[[Any], None], argument: Any, num_processes: int, port: int) -> None:
    """Be one rank: the environment that a launcher would set, one thread, then the function."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    function(argument)


def prove(arguments: VerifyArguments) -> None:
    """One rank of the command: all checks, the table, the exit status."""
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
        if not case.use_peft:
            return model
        torch.manual_seed(SEED)
        adapted = add_adapters(model, lora)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:  # zero at the start: the gradient of lora_A would be zero too
                nn.init.normal_(parameter, std=0.02)
        return adapted

    cases = [*CASES, *(LORA_CASES if lora is not None else ())]
    runs: dict[Case, Run] = {}
    for case in cases:
        try:
            run_config = config_of(case, config)
            runs[case] = sharded_run(build(case), run_config, accelerator, case.accumulation)
            key = reference_key(case, run_config)
            if key not in references:
                references[key] = reference_of(build(case), run_config, accelerator, case.accumulation)
        except Exception as error:  # a model that cannot run is a finding, and the other checks go on
            accelerator.free_memory()
            place = traceback.extract_tb(error.__traceback__)[-1]
            detail = f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"
            yield Check(case.name, False, detail=detail)
            continue
        yield compare(case, runs[case], references[key], run_config)
    yield from same_bits_check(runs)
    yield from unit_check(build(CASES[0]), config)
    if CASES[0] in runs:
        yield from gradient_check(references[reference_key(CASES[0], config_of(CASES[0], config))])
    yield from model_checks(build(CASES[0]))


def reference_key(case: Case, config: HookConfig) -> tuple:
    """What an unsharded run depends on: neither wrapping nor recompute."""
    dtypes = (config.hook_param_dtype, config.hook_reduce_dtype, config.hook_norm_dtype)
    return case.dropout, case.accumulation, case.use_peft, dtypes


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


def batches_of(rank: int, accumulation: int) -> list[list[Batch]]:
    """A rank's micro-batches of each step, uneven on purpose: padded rows, few labels here and many there."""
    steps = []
    for step in range(STEPS):
        micro_batches = []
        for micro in range(accumulation):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
            ids = torch.randint(67, 96, (ROWS, LENGTH), generator=generator)  # special in no tiny model
            labels, mask = ids.clone(), torch.ones_like(ids)
            labels[0, : 9 if rank == 0 else 3] = -100
            mask[1, 11:] = 0
            labels[1, 11:] = -100
            if rank > 0 and micro > 0:
                labels[:] = -100
            micro_batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
        steps.append(micro_batches)
    return steps


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


def sharded_run(model: nn.Module, config: HookConfig, accelerator: Accelerator, accumulation: int) -> Run:
    """The recipe's hooks in the recipe's order, then the recipe's own training loop."""
    recomputed = plan_activation_checkpointing(model, config)
    units = plan_units(model, config)
    apply_activation_checkpointing(model, recomputed, config, is_cpu=True)
    mesh = make_device_mesh(accelerator)
    apply_units(model, units, config, mesh, mixed_precision_policy(config), norm_precision_policy(config))
    cast_stored_parameters(model, config)
    check_against_plan(read_units(model), units, recomputed_blocks(model), recomputed)
    arithmetic, run = Arithmetic(), Run()
    optimizer = make_optimizer(model, arithmetic.learning_rate, arithmetic.weight_decay, (0.9, 0.999), 1e-8)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    model, prepared = prepare(accelerator, model, optimizer)

    def record_gradients(*_: object) -> None:
        named = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        run.gradients.append({n: None if g is None else local(g) for n, g in named.items()})

    optimizer.register_step_pre_hook(record_gradients)
    rank = accelerator.process_index
    steps = iter([(micro_batches, {"epoch": 0, "rows_seen": 0}) for micro_batches in batches_of(rank, accumulation)])
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


def reference_of(model: nn.Module, config: HookConfig, accelerator: Accelerator, accumulation: int) -> Run:
    """One process that holds the whole model and runs the rows of all ranks."""
    per_rank = [batches_of(rank, accumulation) for rank in range(accelerator.num_processes)]
    steps = [list(micro_batches) for micro_batches in zip(*per_rank)]
    norms = [name for name, module in model.named_modules() if is_norm(module)] if config.hook_norm_dtype else []
    arithmetic = Arithmetic(DTYPES[config.hook_param_dtype], DTYPES[config.hook_reduce_dtype], frozenset(norms))
    if any(not p.requires_grad for p in model.parameters()):  # a frozen base is stored in the dtype it computes in
        for parameter in model.parameters():
            parameter.data = parameter.data if parameter.requires_grad else parameter.data.to(arithmetic.param_dtype)
    return reference_run(model, steps, arithmetic, auxiliary_weight(model), accelerator.process_index)


def compare(case: Case, found: Run, expected: Run, config: HookConfig) -> Check:
    """Hold a sharded run against the reference; the detail names where it differs first."""
    tolerance = TOLERANCE if config.hook_reduce_every_micro_batch else DEFERRED_TOLERANCE
    gradients, weights = gradient_errors(found, expected), weight_errors(found, expected)
    losses = [relative_error(f, e) for f, e in zip(found.losses, expected.losses, strict=True)]
    norms = [relative_error(f, e) for f, e in zip(found.norms, expected.norms, strict=True)]
    worst = [max(step.values()) for step in gradients]
    errors = {"loss": max(losses), "gradient": max(worst), "norm": max(norms), "weights": max(weights.values())}
    is_passed = (
        max(losses[0], worst[0], norms[0]) <= tolerance
        and max(errors["loss"], errors["gradient"], errors["norm"]) <= LATER_STEPS * tolerance
        and errors["weights"] <= WEIGHT_TOLERANCE
    )
    detail = ""
    if not is_passed:
        module = first_different_module(found, expected, tolerance)
        wrong = [name for name, error in gradients[0].items() if error > tolerance]
        detail = f"first module whose output differs: {module or 'none'}; "
        detail += (
            f"{len(wrong)} gradients differ, last in the model: {wrong[-1]}" if wrong else "no first gradient does"
        )
    return Check(case.name, is_passed, errors, tolerance, detail)


def same_bits_check(runs: dict[Case, Run]) -> Iterator[Check]:
    """Recompute with dropout must draw the same masks: equal to the last bit to no recompute."""
    pair = [runs[case] for case in runs if case.dropout and not case.use_peft]
    if len(pair) == 2:
        is_same = pair[0].losses == pair[1].losses and all(
            (f[name] is None) == (e[name] is None) and (e[name] is None or torch.equal(f[name], e[name]))
            for f, e in zip(pair[0].gradients, pair[1].gradients)
            for name in e
        )
        yield Check("dropout masks of recompute", is_same, detail="" if is_same else "recompute draws another mask")


def unit_check(model: nn.Module, config: HookConfig) -> Iterator[Check]:
    """At least two units, the root included, unless the YAML asks for one."""
    try:
        units = plan_units(model, config)
    except ValueError as error:
        yield Check("units", False, detail=str(error))
        return
    is_passed = bool(units) or config.fsdp_auto_wrap_policy == "NO_WRAP"
    yield Check("units", is_passed, detail=f"{len(units) + 1} units, the root included")


def gradient_check(reference: Run) -> Iterator[Check]:
    """Every trainable tensor has a gradient in the reference; one without cannot be proved."""
    without = [name for name, gradient in reference.gradients[0].items() if not gradient.any()]
    detail = f"{len(without)} tensors get no gradient from text, such as {without[0]}" if without else ""
    yield Check("gradient in every tensor", not without, detail=detail)


@torch.no_grad()
def model_checks(model: nn.Module) -> Iterator[Check]:
    """What the architecture itself can do, measured on the whole model: packing, and the loss of its own forward."""
    model.eval()
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(67, 96, (1, length), generator=generator) for length in (5, 4, 7)]
    packed = {"input_ids": torch.cat(documents, 1), "use_cache": False}
    packed["position_ids"] = torch.cat([torch.arange(d.shape[1])[None] for d in documents], 1)
    advice = "leave --packing off for this architecture"
    try:
        together = model(**packed).logits
        alone = torch.cat([model(input_ids=d, use_cache=False).logits for d in documents], 1)
        error = ((together - alone).norm() / alone.norm()).item()
        detail = "isolated" if error <= PACKED_TOLERANCE else f"packed documents see each other ({error:.0e}): {advice}"
    except Exception as failure:
        detail = f"{type(failure).__name__}: {str(failure)[:80]}: {advice}"
    yield Check("packed documents", True, detail=detail)
    try:
        ids = packed["input_ids"]
        outputs = model(input_ids=ids, labels=ids, use_cache=False)
        ours = F.cross_entropy(outputs.logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        error = relative_error(ours.item(), outputs.loss.item())
        detail = (
            "equal to ours" if error <= PACKED_TOLERANCE else f"differs from next-token cross-entropy by {error:.0e}"
        )
    except Exception as failure:
        detail = f"{type(failure).__name__}: {str(failure)[:80]}"
    yield Check("the model's own loss", True, detail=detail)


def table(checks: list[Check]) -> list[str]:
    """The checks as aligned lines: measured errors beside the tolerance."""
    lines = [f"{'check':<28}" + "".join(f"{column:>10}" for column in COLUMNS) + f"{'tolerance':>11}"]
    for check in checks:
        errors = "".join(f"{check.errors[column]:>10.1e}" if check.errors else " " * 10 for column in COLUMNS)
        tolerance = f"{check.tolerance:>11.0e}" if check.tolerance else " " * 11
        lines.append(f"{check.name:<28}{errors}{tolerance}  {'pass' if check.is_passed else 'FAIL'}  {check.detail}")
    return lines


if __name__ == "__main__":
    main()
