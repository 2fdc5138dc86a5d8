"""The command line of verify.py: its arguments, the tiny models that they ask for, and how the answer is printed."""

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from exact_checks import DROPOUT, Case, Check
from model_loading import add_adapters, check_not_quantized
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

COLUMNS = ("loss", "gradient", "norm", "later", "weights")
EXACT, WRONG, UNPROVED = 0, 1, 2  # exit statuses


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
    packing: bool = field(default=False, metadata={"help": "Fail where packed documents see each other."})
    json: bool = field(default=False, metadata={"help": "Print one JSON object and nothing else."})


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


def build_case(build: Callable[..., nn.Module], case: Case, lora: VerifyArguments | None) -> nn.Module:
    """The tiny model of a case, its weights rounded to bf16 as a checkpoint's are where the YAML's dtypes are proved.

    Raises:
        ValueError: no such model can be built, or no such adapters.
    """
    try:
        model = build(dropout=case.dropout)
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
    torch.manual_seed(0)  # the same adapters on every rank, sharded and whole
    try:
        adapted = add_adapters(model, lora)
    except ValueError as error:
        if not lora.lora_dropout or "--lora_dropout 0" not in str(error):
            raise
        return build_case(build, case, dataclasses.replace(lora, lora_dropout=0.0))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero at the start: the gradient of lora_A would be zero too
            nn.init.normal_(parameter, std=0.02)
    return adapted


def table(checks: list[Check]) -> list[str]:
    """The checks as aligned lines: measured errors beside the tolerance."""
    lines = [f"{'check':<28}" + "".join(f"{column:>10}" for column in COLUMNS) + f"{'tolerance':>11}"]
    for check in checks:
        errors = "".join(f"{check.errors[column]:>10.1e}" if check.errors else " " * 10 for column in COLUMNS)
        tolerance = f"{check.tolerance:>11.0e}" if check.tolerance else " " * 11
        status = "-" if not check.is_proof else "pass" if check.is_passed else "FAIL"
        lines.append(f"{check.name:<28}{errors}{tolerance}  {status:<4}  {check.detail}".rstrip())
    return lines


def exit_status(checks: list[Check]) -> int:
    """EXACT if all proofs hold, WRONG if one does not, UNPROVED if the tiny model itself does not run."""
    failed = [check for check in checks if check.is_proof and not check.is_passed]
    return EXACT if not failed else WRONG if any(check.can_run for check in failed) else UNPROVED


def unproved(checks: list[Check]) -> list[str]:
    """Names of the checks that leave something open."""
    return [
        check.name
        for check in checks
        if "not proved" in check.detail or not check.can_run or not (check.is_proof or check.is_passed)
    ]


def why_unproved(checks: list[Check]) -> str:
    """Why nothing could be proved."""
    return next(f"could not be proved: {check.detail}" for check in checks if not check.can_run)


def verdict(checks: list[Check]) -> str:
    """The last line's answer."""
    status, names = exit_status(checks), unproved(checks)
    if status == UNPROVED:
        return why_unproved(checks) + ","
    if status == WRONG:
        return "does NOT train exactly"
    return "trains exactly" + (f", but for {len(names)} thing(s) not proved," if names else "")


def json_report(model: str, yaml: str, num_processes: int, checks: list[Check]) -> str:
    """The answer as one JSON object; an error that is not a finite number becomes 1e308, since JSON has no infinity."""
    status = exit_status(checks)
    report = {"model": model, "yaml": yaml, "num_processes": num_processes, "is_exact": status == EXACT}
    report |= {"error": why_unproved(checks)} if status == UNPROVED else {}
    lines = [asdict(check) for check in checks]
    for line in lines:
        line["errors"] = {name: error if math.isfinite(error) else 1e308 for name, error in line["errors"].items()}
    return json.dumps({**report, "not_proved": unproved(checks), "checks": lines}, allow_nan=False)


def print_json(status: int, printed: str, errors: str) -> int:
    """Print one JSON object, whatever became of the command that printed this; returns its exit status."""
    sys.stderr.write(errors)
    lines = printed.splitlines()
    if status == 0 and not (lines and lines[-1].startswith("{")):  # --help
        print(printed, end="")
        return status
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--model_name_or_path", "--accelerate_config"):
        parser.add_argument(name, nargs="?")
    given = parser.parse_known_args()[0]
    report = {"model": given.model_name_or_path, "yaml": given.accelerate_config, "is_exact": False}
    report |= json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    if status != 0 and (report["is_exact"] or "checks" not in report):
        found = re.search(r"^Error: (.*?)(\n\n|\Z)", errors, re.DOTALL | re.MULTILINE)
        text = found[1] if found else (errors.strip().splitlines() or ["no message"])[-1]
        report |= {"is_exact": False, "error": text.strip()}
    print(json.dumps(report))
    return status
