"""Verify some of a dozen varied architectures, or Llama with each classic fault planted, in one process pair.

python tests/verify_worker.py OUT NAME [NAME ...]       JSON to OUT; the name `faults` means the latter
"""

import dataclasses
import json
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import finetune
import torch
import torch.nn.functional as F
import utils
from hooks import apply
from hooks import wrap as hook_wrap
from hooks.config import HookConfig, read_hook_config
from tools.proof import proof as command
from tools.proof import runs
from tools.proof.cpu_ranks import run_on_cpu_ranks
from torch import nn
from training import evaluation, losses, optimizer
from training.launch import end, make_accelerator
from transformers import CONFIG_MAPPING, LlamaForCausalLM, PreTrainedModel

CONFIGS = Path(__file__).parents[1] / "accelerate_configs"
DOZEN = {  # what is special about each
    "gpt2": "mem_limit",  # tied, learned positions, biases
    "opt": "performance",  # key biases whose gradient is zero
    "bloom": "default",  # alibi
    "mixtral": "default",  # experts with a balancing loss
    "gemma2": "mem_limit",  # soft caps, sliding and full layers
    "cohere": "performance",  # logit scaling, parallel blocks
    "deepseek_v3": "default",  # latent attention, dense and expert layers
    "gpt_oss": "mem_limit",  # experts, attention sinks
    "qwen3_next": "performance",  # linear and full attention
    "mamba2": "default",  # no attention
    "zamba2": "mem_limit",  # parameters shared between blocks
    "bert": "mem_limit",  # head bias held twice
}
WITH_ALL_CASES = ("gpt2", "mixtral", "bert")
CASES_OF_MOST = ("fp32, recompute", "dropout, no recompute", "dropout, recompute", "dtypes, accumulation 3")
enable = PreTrainedModel.activation_checkpointing_enable


def main() -> None:
    sys.exit(run_on_cpu_ranks(work, sys.argv[1:], 2))


def enable_without_random_state(model: nn.Module, activation_checkpointing_kwargs: dict, **kwargs: object) -> None:
    """Recompute that draws another dropout mask."""
    forgetful = {**activation_checkpointing_kwargs, "preserve_rng_state": False}
    enable(model, activation_checkpointing_kwargs=forgetful, **kwargs)


def mean_of_means(model: nn.Module, batch: dict, step_label_tokens: int, world_size: int) -> tuple:
    """A loss that is divided by each rank's own tokens."""
    local_tokens = max(losses.num_label_tokens(batch["labels"]), 1)
    return losses.micro_batch_loss(model, batch, local_tokens * world_size, world_size)


def loss_in_bf16(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss whose logits are rounded."""
    logits, labels = logits[:, :-1].bfloat16().flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def optimizer_of_copies(model: nn.Module, *arguments: object) -> torch.optim.Optimizer:
    """An optimizer bound to unsharded tensors."""
    copies = nn.ParameterList(p.full_tensor().detach().clone() for p in model.parameters())
    return optimizer.make_optimizer(copies, *arguments)


def forgetful_optimizer(*arguments: object) -> torch.optim.Optimizer:
    """An optimizer that begins every step anew."""
    made = optimizer.make_optimizer(*arguments)
    made.register_step_pre_hook(lambda *_: made.state.clear())
    return made


def optimizer_that_keeps_gradients(*arguments: object) -> torch.optim.Optimizer:
    """An optimizer whose zero_grad does nothing."""
    made = optimizer.make_optimizer(*arguments)
    made.zero_grad = lambda *_, **__: None
    return made


def leaking_forward(self: nn.Module, *, position_ids: torch.Tensor | None = None, **inputs: torch.Tensor) -> object:
    """Documents packed with positions that go on: every document sees those before it."""
    return forward(self, **inputs)


def policies_that_cast_inputs(config: HookConfig) -> hook_wrap.Policies:
    """FSDP2's default: what a block is handed in fp32 is rounded."""
    policies = utils.precision_policies(config)
    return dataclasses.replace(policies, units=dataclasses.replace(policies.units, cast_forward_inputs=True))


forward = LlamaForCausalLM.forward


def later_micro_batches_dropped(model: nn.Module, batch: dict, step_label_tokens: int, world_size: int) -> tuple:
    """One rank's gradient is lost but for the first micro-batch of each step."""
    loss, loss_sum = losses.micro_batch_loss(model, batch, step_label_tokens, world_size)
    calls[0] += model.training  # not in an evaluation
    is_lost = torch.distributed.get_rank() == 1 and calls[0] % 6 not in (1, 4, 0)  # windows of 3, 2 and 1
    return loss * (0.0 if is_lost else 1.0), loss_sum


def norm_without_clipping(accelerator: object, model: nn.Module, max_norm: float) -> float:
    """The right norm, and nothing is clipped."""
    return utils.clip_grad_norm(accelerator, model, 1e9)


def nan_on_one_rank(model: nn.Module) -> None:
    """After the last step one rank's norm weights are not a number."""
    hook_wrap.reshard_all(model)
    calls[0] += 1
    if calls[0] % 2 == 0 and torch.distributed.get_rank() == 1:  # the second evaluation of a run is at its end
        model.get_parameter("model.norm.weight").to_local().data.fill_(torch.nan)


class WrongLogOfOneRank(runs.RecordingLog):
    """A log that one rank writes wrong."""

    def write_step(self, step: int, values: dict) -> None:
        """Keep twice the loss."""
        factor = 2 if torch.distributed.get_rank() == 1 else 1
        super().write_step(step, {k: v * factor if k == "loss" else v for k, v in values.items()})


def evaluation_of_own_rows(accelerator: object, *arguments: object) -> float:
    """An eval_loss that is not summed over ranks."""
    alone = SimpleNamespace(device=accelerator.device, reduce=lambda totals: totals)
    return evaluate(alone, *arguments)


def loss_that_is_not_a_number(*arguments: object) -> tuple:
    """A loss that stops training."""
    loss, loss_sum = losses.micro_batch_loss(*arguments)
    return loss, loss_sum * torch.nan


def run_without_balancing(configs: dict, accelerator: object) -> dict:
    """A balancing loss that the model returns and the loop leaves out."""
    cases = [case for case in command.CASES if case.name == "accumulation 3"]
    with (
        mock.patch.object(losses, "auxiliary_weight", lambda model: 0.0),
        mock.patch.object(command, "CASES", cases),
        mock.patch.object(runs, "balancing_weight", lambda config: 0.0),  # as if both had the same error
    ):
        return {c.name: vars(c) for c in command.verify(CONFIG_MAPPING["mixtral"](), configs["default"], accelerator)}


def no_forward(self: nn.Module, **inputs: torch.Tensor) -> object:
    """A tiny model that does not run."""
    raise RuntimeError("needs pictures")


evaluate = finetune.evaluate
calls = [0]
FAULTS = {  # and the cases that could show it; none named: all
    "none": (nullcontext(), ()),
    "later micro-batches of a rank dropped": (
        mock.patch.object(finetune, "micro_batch_loss", later_micro_batches_dropped),
        ("accumulation 3", "dtypes, accumulation 3"),
    ),
    "no fp32 masters": (
        mock.patch.object(apply, "cast_stored_parameters", lambda *_: None),
        ("the YAML's dtypes", "dtypes, accumulation 3"),
    ),
    "dropout state dropped": (
        mock.patch.object(PreTrainedModel, "activation_checkpointing_enable", enable_without_random_state),
        ("fp32", "fp32, recompute", "dropout, no recompute", "dropout, recompute"),
    ),
}
FAULTS_OF_ONE_CASE = {  # found by the plain case as well as by any
    "not clipped": mock.patch.object(finetune, "clip_grad_norm", norm_without_clipping),
    "leaking pack": mock.patch.object(LlamaForCausalLM, "forward", leaking_forward),
    "optimizer on unsharded tensors": mock.patch.object(runs, "make_optimizer", optimizer_of_copies),
    "state not kept": mock.patch.object(runs, "make_optimizer", forgetful_optimizer),
    "gradients not zeroed": mock.patch.object(runs, "make_optimizer", optimizer_that_keeps_gradients),
    "loss in bf16": mock.patch.object(losses, "token_loss_sum", loss_in_bf16),
    "mean of means": mock.patch.object(finetune, "micro_batch_loss", mean_of_means),
    "NaN on one rank": mock.patch.object(evaluation, "reshard_all", nan_on_one_rank),
    "wrong loss on one rank": mock.patch.object(runs, "RecordingLog", WrongLogOfOneRank),
    "NaN loss": mock.patch.object(finetune, "micro_batch_loss", loss_that_is_not_a_number),
    "evaluation not reduced": mock.patch.object(finetune, "evaluate", evaluation_of_own_rows),
}


def work(words: list[str]) -> None:
    """One rank."""
    out, *names = words
    warnings.filterwarnings("ignore")
    finetune.memory = lambda device: {"live_tensors_gib": 0.0}  # counting live tensors is a tenth of such a run
    configs = {
        name: read_hook_config(str(CONFIGS / f"{name}.yaml")) for name in ("default", "performance", "mem_limit")
    }
    accelerator = make_accelerator(command.exact_config(configs["default"]))
    results = {name: architecture(name, configs, accelerator) for name in names if name != "faults"}
    if "faults" in names:
        results["faults"] = faults(configs, accelerator)
    if accelerator.is_main_process:
        Path(out).write_text(json.dumps(results))
    end(accelerator)


def checks(name: str, config: HookConfig, accelerator: object, references: dict | None = None) -> dict:
    """The checks of an architecture, by their names."""
    found = command.verify(CONFIG_MAPPING[name](), config, accelerator, references=references)
    return {check.name: vars(check) for check in found}


def architecture(name: str, configs: dict[str, HookConfig], accelerator: object) -> dict:
    """The checks of one of the dozen under its YAML."""
    cases = [case for case in command.CASES if name in WITH_ALL_CASES or case.name in CASES_OF_MOST]
    with mock.patch.object(command, "CASES", cases):
        return checks(name, configs[DOZEN[name]], accelerator)


def faults(configs: dict[str, HookConfig], accelerator: object) -> dict:
    """The checks under each fault, by its name."""
    found: dict = {}
    unsharded: dict = {}  # made without a fault, which is the first entry
    of_llama = partial(checks, "llama", configs["default"], accelerator)
    for fault, (patch, names) in FAULTS.items():
        with patch, mock.patch.object(command, "CASES", [c for c in command.CASES if not names or c.name in names]):
            found[fault] = of_llama(unsharded)
    for fault, patch in FAULTS_OF_ONE_CASE.items():
        calls[0] = 0
        with patch, mock.patch.object(command, "CASES", command.CASES[:1]):
            found[fault] = of_llama(unsharded)
    with mock.patch.object(LlamaForCausalLM, "forward", no_forward):
        found["does not run"] = of_llama()
    found["no balancing"] = run_without_balancing(configs, accelerator)
    found["deferred in bf16"] = deferred_in_bf16(configs["performance"], accelerator)
    of_dtypes = mock.patch.object(command, "CASES", [case for case in command.CASES if case.is_policy])
    with of_dtypes, mock.patch.object(runs, "precision_policies", policies_that_cast_inputs):
        found["inputs cast"] = checks("beam", configs["default"], accelerator)
    with of_dtypes, mock.patch.object(hook_wrap, "kept_in_fp32", lambda model: ([], [])):
        found["routers rounded"] = checks("deepseek_v3", configs["default"], accelerator)
    return found


def deferred_in_bf16(config: HookConfig, accelerator: object) -> dict:
    """The checks of a window that is summed and reduced in bf16 at its end."""
    config = dataclasses.replace(config, hook_reduce_dtype="bf16", hook_reduce_every_micro_batch=False)
    cases = [case for case in command.CASES if case.is_policy]
    with mock.patch.object(command, "CASES", cases):
        return {c.name: vars(c) for c in command.verify(CONFIG_MAPPING["llama"](), config, accelerator)}


if __name__ == "__main__":
    main()
