"""AdamW over the sharded parameters: parameter groups, the proof that it holds them, state offload."""

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.distributed.tensor import DTensor


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups: decay for matrices, none for norms and biases (all parameters of one dimension)."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trainable if parameter.ndim >= 2]
    others = [parameter for parameter in trainable if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    uses_scaler: bool = False,
) -> torch.optim.AdamW:
    """AdamW on the shards. Make it after wrapping and before any forward.

    Fused, except under fp16's loss scaler: a fused step handles an overflow inside the kernel, and Accelerate would not
    see that it was skipped.

    Raises:
        ValueError: nothing is trainable.
    """
    groups = parameter_groups(model, weight_decay)
    if not groups:
        raise ValueError("No parameter is trainable (all are frozen); nothing to optimize.")
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps, fused=not uses_scaler)


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, AcceleratedOptimizer]:
    """`accelerator.prepare`, between two proofs that the optimizer holds every parameter.

    Accelerate matches parameters before and after by their memory address; empty shards (a LoRA matrix of fewer rows
    than ranks) all have address 0 and would be taken for one another, so the parameters are put back.
    """
    check_optimizer(model, optimizer)
    held = [list(group["params"]) for group in optimizer.param_groups]
    model, prepared = accelerator.prepare(model, optimizer)
    for group, parameters in zip(optimizer.param_groups, held):
        group["params"] = parameters
    check_optimizer(model, optimizer)
    return model, prepared


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless each trainable parameter is sharded and in the optimizer exactly once.

    An optimizer made before wrapping, or after a forward that left units gathered, updates tensors that nothing reads:
    the loss still falls for a while, silently wrong.
    """
    counts: dict[int, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    problems = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        count = counts.pop(id(parameter), 0)
        if count != 1:
            problems.append(f"{name} is in the optimizer {count} times")
        if not isinstance(parameter, DTensor):
            problems.append(f"{name} is not sharded")
    if counts:
        problems.append(f"{len(counts)} tensor(s) of the optimizer are not parameters of this model")
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        fix = "make the optimizer after wrapping and before any forward"
        raise ValueError(f"The optimizer would not train this model ({'; '.join(problems[:3])}{more}): {fix}.")


def offload_state_between_steps(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Keep Adam's state in pinned host memory between steps (bit-equal; two copies of it per step).

    During the step itself the state is on the device. Call before `accelerator.prepare`. On a CPU device it would save
    nothing and does nothing.
    """
    if device.type == "cpu":
        return
    optimizer.register_step_pre_hook(lambda *_: move_state(optimizer, device))
    optimizer.register_step_post_hook(lambda *_: move_state(optimizer, torch.device("cpu")))


def move_state(optimizer: torch.optim.Optimizer, target: torch.device) -> None:
    """Move every state tensor but the step counts.

    A DTensor's shard is replaced inside it, since the public constructor would move it back to the mesh's device;
    tests/test_optimizer.py fails where an upgrade moves `_local_tensor`.
    """
    pin_memory = target.type == "cpu" and torch.accelerator.is_available()
    for state in optimizer.state.values():
        for name, value in state.items():
            if not torch.is_tensor(value) or value.numel() <= 1:
                continue
            local = value.to_local() if isinstance(value, DTensor) else value
            moved = torch.empty_like(local, device=target, pin_memory=pin_memory)
            moved.copy_(local, non_blocking=True)
            if isinstance(value, DTensor):
                value._local_tensor = moved
            else:
                state[name] = moved
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
