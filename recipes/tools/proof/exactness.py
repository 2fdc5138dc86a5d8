"""What sharded training must equal: one process, whole weights, no FSDP2, no recompute; and the comparison.

The reference runs the micro-batches of all ranks one after another, each with its rank's own random state, sums their
gradients in the order in which ranks and micro-batches are reduced, clips and steps. Letters: B rows, T tokens.

Every step is compared at the same weights: after each one the sharded run takes the reference's. Left to itself it
would go on from weights that differ in their last bit, which a deep model amplifies: in Gemma 3n 6e-8 in a weight after
step 2 is 1e-3 in the gradients of step 3 (it grows layer by layer; no threshold flips), on one CPU and not on another.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hooks.wrap import placement_of
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

SEED = 7
Batch = dict[str, torch.Tensor]  # input_ids, attention_mask, labels: (B, T)


@dataclass
class Run:
    """What a run of a few optimizer steps did; tensors are whole in a reference, this rank's slices in a sharded run.

    `outputs` of each module in the first forward: a reference has those of every rank, a sharded run its own.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # before clipping
    evaluations: list[float] = field(default_factory=list)  # mean loss per label token of the held-out rows
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)  # after clipping
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)  # after each step, and at the end of the run
    outputs: list[dict[str, torch.Tensor]] = field(default_factory=list)
    logged: list[dict[str, float]] = field(default_factory=list)  # what a sharded run wrote of each step


@dataclass(frozen=True)
class Arithmetic:
    """How a run computes: the compute and reduction dtypes, and the parameters that compute in fp32 all the same."""

    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    fp32_norms: frozenset[str] = frozenset()  # take fp32 in and hand the compute dtype out
    fp32_modules: frozenset[str] = frozenset()  # hand on what their own code returns
    learning_rate: float = 1e-3
    last_rate: float = 0.4  # of the learning rate, at the end of the run
    adam_epsilon: float = 1e-6  # with 1e-8, elements whose gradient is rounding noise would step by its sign
    weight_decay: float = 0.1
    max_grad_norm: float = 0.05  # below the norm of every tiny model: clipping acts
    defers_reduction: bool = False  # a rank adds its micro-batches before they are reduced


def reference_run(
    model: nn.Module,
    steps: list[list[list[Batch]]],
    arithmetic: Arithmetic,
    auxiliary_weight: float = 0.0,
    held_out: list[Batch] | None = None,
    eval_steps: int = 0,
) -> Run:
    """Train a plain model; `steps` holds, per optimizer step, the micro-batches of each rank.

    The held-out rows of all ranks are evaluated every `eval_steps` and at the end.
    """
    run = Run(outputs=[{} for _ in steps[0]])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = [p for p in trained.values() if p.ndim > 1]
    others = [p for p in trained.values() if p.ndim < 2]
    groups = [(decayed, arithmetic.weight_decay), (others, 0.0)]
    groups = [{"params": held, "weight_decay": decay} for held, decay in groups if held]
    optimizer = torch.optim.AdamW(groups, lr=arithmetic.learning_rate, eps=arithmetic.adam_epsilon, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, arithmetic.last_rate, len(steps))
    kept = arithmetic.fp32_norms | arithmetic.fp32_modules
    dtypes = {name: torch.float32 if is_inside(name, kept) else arithmetic.reduce_dtype for name in trained}
    random_states = [rank_state(r) for r in range(len(steps[0]))]
    for step, per_rank in enumerate(steps, 1):
        count = sum((batch["labels"][:, 1:] != -100).sum() for micro_batches in per_rank for batch in micro_batches)
        share = len(per_rank) / count.item()  # rounded once, as in the scripts: bf16 makes 1e-3 of a last bit
        summed: list[torch.Tensor | None] = [None] * len(trained)
        own: list[list[torch.Tensor | None]] = [[None] * len(trained) for _ in per_rank]  # not reduced yet
        loss_sum, last = torch.zeros(()), len(per_rank[0]) - 1
        for i in range(len(per_rank[0])):
            for r, micro_batches in enumerate(per_rank):
                torch.set_rng_state(random_states[r])
                is_recorded = bool(run.outputs[r])
                with contextlib.nullcontext() if is_recorded else recorded_outputs(model, run.outputs[r]):
                    loss, token_loss = reference_loss(model, micro_batches[i], arithmetic, auxiliary_weight)
                gradients = torch.autograd.grad(loss * share, trained.values(), allow_unused=True)
                random_states[r] = torch.get_rng_state()
                loss_sum += token_loss
                gradients = [None if g is None else g.to(dtypes[name]) for name, g in zip(trained, gradients)]
                own[r] = [add(a, b) for a, b in zip(own[r], gradients)]
            if i < last and arithmetic.defers_reduction:
                continue
            reduced = functools.reduce(lambda left, right: [add(a, b) for a, b in zip(left, right)], own)
            means = [None if g is None else (g / len(per_rank)).float() for g in reduced]
            summed = [add(a, b) for a, b in zip(summed, means)]
            own = [[None] * len(trained) for _ in per_rank]
        for parameter, gradient in zip(trained.values(), summed):
            # None for a tensor that the forward does not use: it must not decay either. Contiguous, because torch's
            # fused CPU kernel reads a transposed gradient in the wrong order.
            parameter.grad = None if gradient is None else gradient.contiguous()
        run.norms.append(nn.utils.clip_grad_norm_(trained.values(), arithmetic.max_grad_norm).item())
        run.losses.append((loss_sum / count).item())
        run.gradients.append({n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained.items()})
        optimizer.step()
        schedule.step()
        run.weights.append({name: p.detach().clone() for name, p in trained.items()})
        if held_out and (step == len(steps) or (eval_steps and step % eval_steps == 0)):
            run.evaluations.append(reference_evaluation(model, held_out, arithmetic))
    run.weights.append(run.weights[-1])
    return run


@torch.no_grad()
def reference_evaluation(model: nn.Module, batches: list[Batch], arithmetic: Arithmetic) -> float:
    """Mean loss per label token over these rows, without dropout."""
    model.eval()
    loss_sum = sum(reference_loss(model, batch, arithmetic, 0.0)[1] for batch in batches)
    model.train()
    return (loss_sum / sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)).item()


def rank_state(rank: int) -> torch.Tensor:
    """The random state that a rank starts a run with."""
    return torch.Generator().manual_seed(SEED + rank).get_state()


def add(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """The sum, in which a missing gradient is zero."""
    return b if a is None else a if b is None else a + b


def reference_loss(
    model: nn.Module, batch: Batch, arithmetic: Arithmetic, auxiliary_weight: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward with weights cast to the compute dtype: (summed loss with balancing term, summed token loss)."""
    dtype, kept = arithmetic.param_dtype, arithmetic.fp32_norms | arithmetic.fp32_modules
    # As a gathered parameter does, a cast one requires a gradient also where none is made, in an evaluation: torch
    # chooses by it how it multiplies an input that is not contiguous, and so the last bit.
    weights = {
        name: p if is_inside(name, kept) or not p.is_floating_point() else p.to(dtype).requires_grad_(p.requires_grad)
        for name, p in model.named_parameters()
    }
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with norms_in_fp32(model, arithmetic.fp32_norms, dtype):
        outputs = functional_call(model, weights, (), inputs)
    token_loss = F.cross_entropy(
        outputs.logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
    )
    auxiliary = getattr(outputs, "aux_loss", None)
    loss = token_loss
    if auxiliary is not None and auxiliary_weight:
        loss = token_loss + auxiliary_weight * auxiliary * (batch["labels"][:, 1:] != -100).sum()
    return loss, token_loss.detach()


def is_inside(name: str, modules: frozenset[str]) -> bool:
    """Whether a parameter lies in one of these modules."""
    return any(name.startswith(f"{module}.") for module in modules)


@contextlib.contextmanager
def norms_in_fp32(model: nn.Module, names: frozenset[str], dtype: torch.dtype) -> Iterator[None]:
    """Make these norms take fp32 in and hand the compute dtype out, as the norm unit does."""
    handles = []
    for name, module in model.named_modules():
        if name in names:
            handles.append(module.register_forward_pre_hook(lambda m, args: tuple(a.float() for a in args)))
            handles.append(module.register_forward_hook(lambda m, args, output: output.to(dtype)))
    yield
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def recorded_outputs(model: nn.Module, outputs: dict[str, torch.Tensor]) -> Iterator[None]:
    """Keep what each module returns first, by its name."""

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(first, torch.Tensor) and name not in outputs:
                outputs[name] = first.detach().clone()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]
    yield
    for handle in handles:
        handle.remove()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of this rank's slice of a tensor, sharded or whole (which is cut as a parameter of its shape is)."""
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach().clone()
    if tensor.ndim == 0:
        return tensor.detach().clone()
    placement = placement_of(tensor.shape, dist.get_world_size())
    chunks = torch.chunk(tensor.detach(), dist.get_world_size(), placement.dim if placement else 0)
    return chunks[dist.get_rank()].clone() if dist.get_rank() < len(chunks) else tensor.detach()[:0]


def follow(model: nn.Module, optimizer: torch.optim.Optimizer, run: Run, expected: Run | None) -> None:
    """Record a sharded run's gradients before each optimizer step and its weights after it; then give it the weights
    that the reference has there, if there is one."""

    def record_gradients(*_: object) -> None:
        named = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        run.gradients.append({n: None if g is None else local(g) for n, g in named.items()})

    @torch.no_grad()
    def take_weights(*_: object) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        run.weights.append({name: local(p) for name, p in trained.items()})
        for name, value in expected.weights[len(run.weights) - 1].items() if expected is not None else ():
            parameter = trained[name]
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            own.copy_(local(value) if isinstance(parameter, DTensor) else value)

    optimizer.register_step_pre_hook(record_gradients)
    optimizer.register_step_post_hook(take_weights)


def gradient_errors(found: Run, expected: Run) -> list[dict[str, float]]:
    """Per step and tensor: |f - e| / max(|e|, 1e-4 x global norm), over all ranks.

    The floor keeps a tensor that is zero in exact arithmetic (key biases) from counting as wrong for its rounding. A
    gradient that one side lacks counts as zero there. Every rank must call it.
    """
    squares = []
    for f, e in zip(found.gradients, expected.gradients, strict=True):
        for name, value in e.items():
            value = local(value).double()
            other = torch.zeros_like(value) if f.get(name) is None else f[name].double()
            squares.append(torch.stack([(other - value).square().sum(), value.square().sum()]))
    squares = torch.stack(squares)
    dist.all_reduce(squares)
    errors, norms = squares.view(len(expected.gradients), -1, 2).sqrt().unbind(-1)
    floors = 1e-4 * norms.norm(dim=1, keepdim=True)
    relative = (errors / torch.maximum(norms, floors)).tolist()
    return [dict(zip(expected.gradients[0], step)) for step in relative]


def weight_errors(found: Run, expected: Run) -> dict[str, float]:
    """Per tensor: the largest absolute difference after any step, over all ranks. Every rank must call it."""
    worst = {name: torch.zeros(()) for name in expected.weights[0]}
    for f, e in zip(found.weights, expected.weights, strict=True):
        for name, value in e.items():
            if local(value).numel():  # maximum keeps a nan
                worst[name] = torch.maximum(worst[name], (f[name] - local(value)).abs().max().float())
    return dict(zip(worst, largest_over_ranks(torch.stack(list(worst.values())))))


def largest_over_ranks(errors: torch.Tensor) -> list[float]:
    """Each error's largest value over all ranks; one that is not a number counts as infinite, because gloo's maximum
    would drop it. Every rank must call it."""
    errors = torch.nan_to_num(errors, nan=torch.inf, posinf=torch.inf)
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    return errors.tolist()


def relative_error(found: float, expected: float) -> float:
    """|f - e| / |e|."""
    return abs(found - expected) / max(abs(expected), 1e-30)


def first_different_module(found: Run, expected: Run, tolerance: float) -> str | None:
    """Name of the first module in order of execution whose output differs in the first forward, None if none does."""
    (outputs,) = found.outputs
    for name, value in expected.outputs[dist.get_rank()].items() if expected.outputs else ():
        other = outputs.get(name)
        if other is None or other.shape != value.shape or not value.is_floating_point():
            continue
        if not (other.double() - value.double()).norm() <= tolerance * max(value.double().norm().item(), 1e-30):
            return name
    return None
