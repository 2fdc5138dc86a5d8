"""The cases that a verification runs, the rows it runs them on, and how a result is judged and printed."""

import dataclasses
import math
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from hooks.config import HookConfig

from .exactness import (
    Arithmetic,
    Batch,
    Run,
    first_different_module,
    gradient_errors,
    largest_over_ranks,
    relative_error,
    weight_errors,
)

STEPS, ROWS, LENGTH = 3, 2, 16  # LENGTH beyond the tiny model's sliding windows
EVAL_STEPS = 2
DROPOUT = 0.1
DEFERRED_TOLERANCE = 5e-6  # one reduction of a window: the additions are grouped otherwise
REDUCED_BF16_TOLERANCE = 1e-2  # three ranks or more add in the backend's order, each sum rounded to bf16
TOLERANCE = 1e-6  # fp32 rounding of another order of additions
# After a step of at most 1e-3. AdamW divides by a gradient near zero, whose rounding is then seen in the weight.
WEIGHT_TOLERANCE = {"fp32": 5e-5, "bf16": 2e-4}


@dataclass
class Check:
    """One line of the table.

    `errors`: relative ones of the first step, the worst of the later steps, and the weights' absolute one after a step.
    Every step starts from the reference's weights, so one tolerance holds for all.
    A line that is no proof says what could not be proved, or what the architecture can do. `can_run` is False where
    even one plain process cannot run the tiny model: nothing is known of the sharded one then.
    """

    name: str
    is_passed: bool
    is_proof: bool = True
    errors: dict[str, float] = field(default_factory=dict)
    tolerance: float | None = None
    detail: str = ""
    can_run: bool = True


@dataclass(frozen=True)
class Case:
    """One sharded run: what it changes in the YAML and in the model."""

    name: str
    recompute: bool = False
    dropout: float = 0.0
    accumulation: int = 1
    is_policy: bool = False  # the YAML's dtypes; else fp32
    use_peft: bool = False
    balances: bool = False  # with the balancing loss of a mixture of experts

    @property
    def arithmetic(self) -> Arithmetic:
        """Optimizer and clipping. In bf16 no clipping: the last bit of its factor would decide which way each weight is
        rounded, and with it a router's near ties."""
        return Arithmetic(max_grad_norm=1e9) if self.is_policy else Arithmetic()


CASES = (
    Case("fp32"),
    Case("fp32, recompute", recompute=True),
    Case("dropout, no recompute", dropout=DROPOUT),
    Case("dropout, recompute", recompute=True, dropout=DROPOUT),
    Case("accumulation 3", recompute=True, accumulation=3),
    Case("the YAML's dtypes", recompute=True, is_policy=True),
    Case("dtypes, accumulation 3", recompute=True, is_policy=True, accumulation=3),
)
BALANCING_CASE = Case("balancing loss", recompute=True, accumulation=3, balances=True)
BALANCING_LORA_CASE = Case("LoRA, balancing loss", recompute=True, accumulation=3, use_peft=True, balances=True)
LORA_CASES = (
    Case("LoRA with dropout", recompute=True, accumulation=3, use_peft=True),
    Case("LoRA, the YAML's dtypes", recompute=True, is_policy=True, use_peft=True, accumulation=3),
)


def exact_config(config: HookConfig) -> HookConfig:
    """The YAML in fp32, on any number of processes: what the checks run in unless they say otherwise."""
    return dataclasses.replace(config, mixed_precision="no", hook_param_dtype="fp32", num_processes=None)


def reference_key(case: Case, config: HookConfig) -> tuple:
    """What an unsharded run depends on: neither wrapping nor recompute.

    Also whether it is a policy's, whose weights and clipping are its own under a YAML that computes in fp32 too.
    """
    dtypes = (config.hook_param_dtype, config.hook_reduce_dtype, config.hook_norm_dtype, config.hook_buffer_dtype)
    defers = case.accumulation > 1 and not config.hook_reduce_every_micro_batch
    return case.is_policy, case.dropout, case.accumulation, case.use_peft, case.balances, dtypes, defers


def config_of(case: Case, config: HookConfig, min_num_params: int) -> HookConfig:
    """The YAML with what this case changes. A CPU has no fp16 (so bf16), and a tiny model needs a tiny threshold."""
    recompute = case.recompute and (config.fsdp_activation_checkpointing or case.name == "fp32, recompute")
    changes: dict[str, Any] = {"fsdp_activation_checkpointing": recompute, "hook_offload_optimizer": False}
    if config.fsdp_auto_wrap_policy == "SIZE_BASED_WRAP":
        changes["fsdp_min_num_params"] = min_num_params
    if not case.is_policy:
        exact = {"hook_param_dtype": "fp32", "hook_reduce_dtype": "fp32", "hook_norm_dtype": None}
        return dataclasses.replace(config, **exact, hook_buffer_dtype=None, **changes)
    half = {"hook_param_dtype", "hook_reduce_dtype", "hook_buffer_dtype"}
    changes |= {key: "bf16" for key in half if getattr(config, key) == "fp16"}
    return dataclasses.replace(config, **changes)


def batches_of(rank: int, accumulation: int, tokens: torch.Tensor) -> list[list[Batch]]:
    """A rank's micro-batches of each step, drawn from these ids, uneven: padded rows, few labels here, many there."""
    steps = []
    for step in range(STEPS):
        micro_batches = []
        for micro in range(max(1, accumulation - step)):  # a window may end early, as the last one of an epoch does
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
            ids = tokens[torch.randint(len(tokens), (ROWS, LENGTH), generator=generator)]
            labels, mask = ids.clone(), torch.ones_like(ids)
            labels[0, : 9 if rank == 0 else 3] = -100
            mask[1, 11:] = 0
            labels[1, 11:] = -100
            if rank == 1 and micro == 1:
                labels[:] = -100  # a micro-batch without labels: in the middle of a window, or its last
            micro_batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
        steps.append(micro_batches)
    return steps


def held_out_of(rank: int, tokens: torch.Tensor) -> list[Batch]:
    """A rank's rows to evaluate on; ranks have different counts of labels."""
    return batches_of(rank, 1, tokens)[0]


class RecordingLog:
    """Stands where the recipe's MetricsLog stands, and keeps what is written."""

    def __init__(self) -> None:
        self.total_steps, self.written = STEPS, []
        self.bar = types.SimpleNamespace(update=lambda: None)

    def say(self, text: str) -> None:
        """Nothing: the table is all that is printed."""

    def write_step(self, step: int, values: dict) -> None:
        """Keep one step's values."""
        self.written.append(values)

    def write(self, step: int, values: dict) -> None:
        """Keep other values."""
        self.written.append(values)


def compare(case: Case, found: Run, expected: Run, dtype: str, tolerance: float) -> Check:
    """Hold a sharded run against the reference; the detail names where it differs first. Every rank must call it."""
    gradients, weights = gradient_errors(found, expected), weight_errors(found, expected)
    losses, norms, evaluations = scalars = scalar_errors(found, expected)
    worst = [largest(step.values()) for step in gradients]
    later = largest([*losses[1:], *worst[1:], *norms[1:], *evaluations])
    errors = {"loss": losses[0], "gradient": worst[0], "norm": norms[0], "later": later}
    errors["weights"] = largest(weights.values())
    weight_limit = WEIGHT_TOLERANCE[dtype]
    has_no_order = tolerance == REDUCED_BF16_TOLERANCE  # and AdamW's first steps have the sign of a gradient
    is_exact = largest([losses[0], worst[0], norms[0], later]) <= tolerance
    is_passed = on_every_rank(is_exact and (has_no_order or errors["weights"] <= weight_limit))
    modules = [None] * dist.get_world_size()
    dist.all_gather_object(modules, None if is_passed else first_different_module(found, expected, tolerance))
    details = []
    if not is_passed:
        different = [f"{name} (rank {rank})" for rank, name in enumerate(modules) if name]
        wrong = [name for name, error in gradients[0].items() if not error <= tolerance]
        far = [name for name, error in weights.items() if not error <= weight_limit and not has_no_order]
        last = f", last in the model: {wrong[-1]}" if wrong else ""
        details += [f"first module whose output differs: {', '.join(different) or 'none'}"]
        details += [f"{len(wrong)} gradients differ{last}"]
        details += later_differences(scalars, gradients, tolerance)
        details += [f"{len(far)} weights differ, such as {far[0]}"] if far else []
    elif not case.is_policy and expected.norms[0] <= case.arithmetic.max_grad_norm:
        details += [f"clipping is not proved: the norm is {expected.norms[0]:.1e}"]
    if has_no_order:
        details += ["weights are not proved: bf16 sums over more than two ranks have no fixed order"]
    return Check(case.name, is_passed, errors=errors, tolerance=tolerance, detail="; ".join(details))


def scalar_errors(found: Run, expected: Run) -> list[list[float]]:
    """The relative errors of losses, norms and evaluations, the largest over all ranks. Every rank must call it."""
    errors = []
    for name in ("losses", "norms", "evaluations"):
        pairs = zip(getattr(found, name), getattr(expected, name), strict=True)
        values = torch.tensor([relative_error(f, e) for f, e in pairs], dtype=torch.float64)
        errors.append(largest_over_ranks(values))
    return errors


def later_differences(scalars: list[list[float]], gradients: list[dict[str, float]], limit: float) -> list[str]:
    """What is beyond the limit after the first step: the first such step, the tensor that is worst there."""
    losses, norms, evaluations = scalars
    found = []
    for step in range(1, len(losses)):
        worst = max(gradients[step], key=lambda name: torch.inf if math.isnan(e := gradients[step][name]) else e)
        values = {"loss": losses[step], "norm": norms[step], f"gradient of {worst}": gradients[step][worst]}
        wrong = [f"{name} by {error:.0e}" for name, error in values.items() if not error <= limit]
        if wrong:
            found.append(f"step {step + 1} differs: {', '.join(wrong)}")
            break
    wrong = [f"{error:.0e}" for error in evaluations if not error <= limit]
    return found + ([f"eval_loss differs by {wrong[0]}"] if wrong else [])


def largest(values: Iterable[float]) -> float:
    """The largest value; one that is not a number counts as infinite (Python's max would drop it)."""
    return torch.tensor(list(values), dtype=torch.float64).nan_to_num(torch.inf, torch.inf).max().item()


def same_bits_check(runs: dict[Case, Run]) -> Iterator[Check]:
    """Recompute with dropout must draw the same masks: equal to the last bit to no recompute, on every rank."""
    pair = [runs[case] for case in runs if case.dropout and not case.use_peft]
    if len(pair) < 2:
        return
    is_same = on_every_rank(same_bits(*pair))
    yield Check("dropout masks of recompute", is_same, detail="" if is_same else "recompute draws another mask")


def same_bits(found: Run, expected: Run) -> bool:
    """Whether two runs took the same steps to the last bit, on this rank."""
    return found.losses == expected.losses and all(
        (f[name] is None) == (e[name] is None) and (e[name] is None or torch.equal(f[name], e[name]))
        for f, e in zip(found.gradients + found.weights, expected.gradients + expected.weights, strict=True)
        for name in e
    )


def acting_checks(runs: dict[Case, Run], balancing_term: float) -> Iterator[Check]:
    """What should change a run and does not: of a loss term that this model has, a fault; of a dropout that it lacks,
    something that was not proved."""
    by_name = {case.name: run for case, run in runs.items()}
    for name, plain, term in (
        ("dropout, recompute", "fp32, recompute", 0.0),
        (BALANCING_CASE.name, "accumulation 3", balancing_term),
    ):
        if name in by_name and plain in by_name and by_name[name].norms == by_name[plain].norms:
            text = f"the model adds {term:.1e} to the loss, and no gradient changes" if term else ""
            text = text or "not proved: it changes nothing in this architecture"
            yield Check(f"{name} acts", not term, bool(term), detail=text)


def on_every_rank(value: bool) -> bool:
    """Whether it holds on all ranks."""
    count = torch.tensor(int(value))
    dist.all_reduce(count, dist.ReduceOp.MIN)
    return bool(count)


def gradient_check(reference: Run, name: str = "gradient in every tensor") -> Iterator[Check]:
    """Every trainable tensor has a gradient in the reference; one without cannot be proved."""
    without = [name for name, gradient in reference.gradients[0].items() if not gradient.any()]
    detail = f"{len(without)} tensors get no gradient from text, such as {without[0]}" if without else ""
    yield Check(name, not without, False, detail=detail)
