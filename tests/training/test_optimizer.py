"""Parameter groups, and moving the optimizer's state, on one rank over gloo."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hook_cases import CONFIG, adamw
from hooks.activation_checkpointing import apply_activation_checkpointing
from saving.state import in_full, take_quantized, training_tensors
from tiny_models import tiny_llama
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from training import optimizer as optimizer_module
from training.arguments import FinetuneArguments
from training.optimizer import OffloadedAdamW, make_optimizer, parameter_groups, place
from transformers import GPT2Config, GPT2LMHeadModel

WITH_TORCHAO = "needs torchao (pip install torchao==0.18.0); no part of `make test`, since peft would import it always"


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


@pytest.mark.parametrize("offloads", [False, True])
def test_each_argument_arrives_where_it_belongs(offloads):
    """The proof's weights are compared to 5e-5, which swapped betas or no decay stay below in one step."""
    arguments = FinetuneArguments(
        learning_rate=3e-4, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-7, weight_decay=0.2
    )
    config = dataclasses.replace(CONFIG, hook_offload_optimizer=offloads)
    optimizer = make_optimizer(tiny_llama(), arguments, config)
    assert type(optimizer) is (OffloadedAdamW if offloads else torch.optim.AdamW)
    decayed, others = optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.2, 0.0)
    for group in (decayed, others):
        assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.8, 0.95), 1e-7)
        assert group["fused"] and not group["amsgrad"] and not group["maximize"]


def test_model_with_nothing_to_train_is_refused():
    model = tiny_llama().requires_grad_(False)
    with pytest.raises(ValueError, match="No parameter is trainable"):
        make_optimizer(model, adamw(1e-3), CONFIG)


def trained(optimizer_of, after_first_step=lambda optimizer: None):
    """(the weights after some steps, the optimizer, the model) of the same tiny model."""
    torch.manual_seed(0)
    model = tiny_llama()
    model.model.layers[1].requires_grad_(False)
    optimizer = optimizer_of(model)
    for step in range(3):
        ids = torch.arange(12).view(2, 6) + step
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:  # the state is made
            after_first_step(optimizer)
    return [parameter.detach().clone() for parameter in model.parameters()], optimizer, model


def make(model, is_offloaded):
    config = dataclasses.replace(CONFIG, hook_offload_optimizer=is_offloaded)
    return make_optimizer(model, adamw(1e-3, 0.1), config)


def addresses(optimizer):
    """Where each moment lies in memory."""
    states = (optimizer.state[p] for group in optimizer.param_groups for p in group["params"])
    return [state[name].data_ptr() for state in states for name in ("exp_avg", "exp_avg_sq")]


def test_step_in_slices_is_bit_equal_holds_two_slices_at_most_and_leaves_the_state_where_it_lay(monkeypatch):
    """Bytes are counted where state is put beside its place at home: what would be on the device."""
    monkeypatch.setattr(OffloadedAdamW, "slice_bytes", 20_000)
    visiting, largest, own_put, home = {}, [0], optimizer_module.put, []

    def counted(state, name, value):
        is_home = (id(state), name) in visiting
        if is_home:
            del visiting[id(state), name]
        else:
            visiting[id(state), name] = value.nbytes
        largest.append(sum(visiting.values()))
        own_put(state, name, value)

    expected, plain, _ = trained(lambda model: make(model, False))

    def watch(optimizer):
        home.extend(addresses(optimizer))
        monkeypatch.setattr(optimizer_module, "put", counted)

    found, optimizer, model = trained(lambda model: make(model, True), watch)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    slices = list(optimizer.slices())
    assert len(slices) >= 5
    held = [parameter for part in slices for group in part for parameter in group["params"]]
    assert len(held) == len(set(held)) == sum(parameter.requires_grad for parameter in model.parameters())
    state_bytes = sum(2 * parameter.nbytes for parameter in held)
    assert 0 < max(largest) < 0.5 * state_bytes  # all of it at once would be 1.0
    assert not visiting and addresses(optimizer) == home and len(home) == 2 * len(held)
    assert len(plain.state) == len(optimizer.state) == len(held)
    for parameter, state in plain.state.items():
        (other,) = [s for p, s in optimizer.state.items() if torch.equal(p, parameter)][:1]
        assert torch.equal(other["exp_avg"], state["exp_avg"]) and other["step"] == state["step"] == 3


@pytest.fixture
def fake_gpu(monkeypatch):
    """Tensors of a GPU that is not there: they have a device and no values, so nothing is copied, and no streams."""
    monkeypatch.setattr(torch, "Stream", mock.MagicMock())
    for name in ("current_stream", "synchronize"):
        monkeypatch.setattr(torch.accelerator, name, mock.MagicMock())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *_, **__: self)
    with FakeTensorMode():
        yield torch.device("cuda", 0)


@pytest.mark.parametrize("is_offloaded", [True, False])
def test_state_of_an_offloaded_optimizer_is_in_host_memory_between_steps(monkeypatch, fake_gpu, is_offloaded):
    """16 matrices of 2 x 64 KiB of state, two to a slice; at the end of a slice's step the next one is there too."""
    monkeypatch.setattr(OffloadedAdamW, "slice_bytes", 2 * 2 * 2**16)
    model = torch.nn.ParameterList(torch.empty(128, 128, device=fake_gpu) for _ in range(16))
    optimizer, take_back, in_steps = make(model, is_offloaded), OffloadedAdamW.take_back, []

    def on_device(*_):
        moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
        return len(moments), sum(value.device == fake_gpu for value in moments) // 2

    def counted(*args):
        in_steps.append(on_device()[1])
        take_back(*args)

    monkeypatch.setattr(OffloadedAdamW, "take_back", counted)
    for _ in range(3):
        for parameter in model:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        assert on_device() == (2 * 16, 0 if is_offloaded else 16)
    assert in_steps == ([2] * 8 + ([4] * 7 + [2]) * 2 if is_offloaded else [])  # in the first step they are made


def test_groups_keep_their_own_decay_and_rate_across_slices(monkeypatch):
    monkeypatch.setattr(OffloadedAdamW, "slice_bytes", 1)
    model = tiny_llama()
    optimizer = make(model, True)
    optimizer.param_groups[1]["lr"] = 0.5
    for group in optimizer.param_groups:
        parts = [part[0] for part in optimizer.slices() if part[0]["params"][0] in set(group["params"])]
        assert len(parts) == len(group["params"])
        assert {(part["lr"], part["weight_decay"]) for part in parts} == {(group["lr"], group["weight_decay"])}


def test_placed_state_of_a_sharded_parameter_keeps_its_values(one_rank):
    model = torch.nn.Linear(4, 4)
    fully_shard(model)
    optimizer = make(model, False)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    before, old_shard = state["exp_avg"].to_local().clone(), state["exp_avg"].to_local()
    home = place(state, "exp_avg", torch.device("cpu"))
    assert home is old_shard or home.data_ptr() == old_shard.data_ptr()
    assert isinstance(state["exp_avg"], DTensor)
    assert torch.equal(state["exp_avg"].to_local(), before)
    assert state["exp_avg"].to_local().data_ptr() != old_shard.data_ptr()
    optimizer.step()


def train_sharded(optim, steps=4):
    """(weights, optimizer, model) of a sharded model whose larger matrices are kept in 8 bits where asked."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 2)
    )
    fully_shard(model)
    optimizer = make_optimizer(model, adamw(1e-2, 0.1), CONFIG, optim)
    losses = [step_of(model, optimizer, seed) for seed in range(steps)]
    return losses, optimizer, model


def step_of(model, optimizer, seed):
    rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
    loss = (model(rows) - rows[:, :2]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def state_bytes(optimizer):
    shards = [value.to_local() for state in optimizer.state.values() for value in state.values() if value.ndim]
    return sum(shard.codes.nbytes + shard.scale.nbytes if hasattr(shard, "codes") else shard.nbytes for shard in shards)


def test_8_bit_adamw_is_near_adamw_a_quarter_its_size_and_resumes_to_the_same_bits(one_rank, monkeypatch):
    """8 bits round the moments to a few percent: losses to 2%, where no step at all would be 10% and more off.

    Its update runs uncompiled here: what inductor makes of it is torchao's own to test.
    """
    pytest.importorskip("torchao", reason=WITH_TORCHAO)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    expected, plain, _ = train_sharded("adamw_torch_fused")
    found, optimizer, model = train_sharded("adamw_torch_8bit")
    assert found == pytest.approx(expected, rel=2e-2) and found != expected
    assert abs(expected[3] - train_sharded("adamw_torch_fused", 1)[0][0]) > 0.1 * expected[3]
    assert state_bytes(optimizer) < 0.3 * state_bytes(plain)
    files = {
        kind: {name: value.to_local().clone() for name, value in held.items() if isinstance(value, DTensor)}
        for kind, held in training_tensors(model, optimizer).items()
    }
    assert not any(hasattr(value, "codes") for held in files.values() for value in held.values())  # plain tensors
    expected_next = step_of(model, optimizer, 9)
    after = step_of(model, optimizer, 10)
    _, other_optimizer, other = train_sharded("adamw_torch_8bit", steps=0)
    tensors = training_tensors(other, other_optimizer)
    for kind, held in files.items():
        for name, value in held.items():
            tensors[kind][name].to_local().copy_(value)
    for state in other_optimizer.state.values():
        state["step"].fill_(4)
    take_quantized(other, other_optimizer, tensors["optimizer"])
    assert step_of(other, other_optimizer, 9) == expected_next
    assert step_of(other, other_optimizer, 10) == after


@pytest.mark.parametrize("signed", [True, False])
def test_copy_in_full_gives_the_same_8_bits_again(one_rank, signed):
    """Blocks whose largest value is negative, tied with a positive one, or zero throughout."""
    OptimState8bit = pytest.importorskip("torchao.optim.subclass_8bit", reason=WITH_TORCHAO).OptimState8bit
    values = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 2, 256)[:, None]
    values[1], values[2, :2], values[2, 2:] = 0, torch.tensor([-1.0, 0.993]), 0.1
    values = values if signed else values.square()
    state = OptimState8bit.zeros(values.shape, signed=signed)
    state.copy_(values)
    mesh = init_device_mesh("cpu", (1,))
    full = in_full(DTensor.from_local(state, mesh, run_check=False)).to_local()
    again = OptimState8bit.zeros(values.shape, signed=signed)
    again.copy_(full)
    assert torch.equal(again.codes, state.codes) and torch.equal(again.scale, state.scale)
    again.copy_(state.dequantize())
    assert torch.equal(again.scale, state.scale) is not signed  # what the plain way loses


def test_8_bit_adamw_that_cannot_be_is_refused(monkeypatch):
    monkeypatch.setattr(optimizer_module, "is_torchao_available", lambda: True)
    with pytest.raises(ValueError, match="hook_offload_optimizer: false"):
        offloaded = dataclasses.replace(CONFIG, hook_offload_optimizer=True)
        make_optimizer(tiny_llama(), adamw(1e-3), offloaded, "adamw_torch_8bit")
    with pytest.raises(ValueError, match="--optim: found sgd, allowed: adamw_torch_fused, adamw_torch_8bit"):
        make_optimizer(tiny_llama(), adamw(1e-3), CONFIG, "sgd")
    monkeypatch.setattr(optimizer_module, "is_torchao_available", lambda: False)
    with pytest.raises(ValueError, match="pip install torchao"):
        make_optimizer(tiny_llama(), adamw(1e-3), CONFIG, "adamw_torch_8bit")


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
