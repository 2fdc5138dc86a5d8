"""Parameter groups, and moving the optimizer's state, on one rank over gloo."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from hook_activation_checkpointing import apply_activation_checkpointing
from optimizer import make_optimizer, move_state, parameter_groups
from test_hook_wrap import CONFIG
from tiny_models import tiny_llama
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_norms_and_biases_are_not_decayed_and_everything_else_is():
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=16, n_positions=8))
    decayed, others = parameter_groups(model, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0.0
    without = {names[id(parameter)] for parameter in others["params"]}
    assert without == {name for name in names.values() if name.endswith(".bias") or ".ln_" in name}
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def test_model_with_nothing_to_train_is_refused():
    model = tiny_llama().requires_grad_(False)
    with pytest.raises(ValueError, match="No parameter is trainable"):
        make_optimizer(model, 1e-3, 0.0, (0.9, 0.999), 1e-8)


def test_moved_state_of_a_sharded_parameter_keeps_its_values(one_rank):
    model = torch.nn.Linear(4, 4)
    fully_shard(model)
    optimizer = make_optimizer(model, 1e-3, 0.0, (0.9, 0.999), 1e-8)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    before, old_shard = state["exp_avg"].to_local().clone(), state["exp_avg"].to_local()
    move_state(optimizer, torch.device("cpu"))
    assert isinstance(state["exp_avg"], DTensor)
    assert torch.equal(state["exp_avg"].to_local(), before)
    assert state["exp_avg"].to_local().data_ptr() != old_shard.data_ptr()
    optimizer.step()


def test_enabling_recompute_twice_is_refused_and_once_runs_each_block_once_more():
    config = dataclasses.replace(CONFIG, fsdp_activation_checkpointing=True)
    model = tiny_llama().train()
    calls = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    names = [f"model.layers.{i}" for i in range(4)]
    apply_activation_checkpointing(model, names, config, is_cpu=True)
    with pytest.raises(ValueError, match="recomputes already"):
        apply_activation_checkpointing(model, names, config, is_cpu=True)
    model(torch.ones(1, 4, dtype=torch.long), use_cache=False).logits.sum().backward()
    assert len(calls) == 8
