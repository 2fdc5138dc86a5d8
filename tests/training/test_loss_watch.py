"""A loss that jumps about is said once, and one that is only noisy never; weights that do not move are named."""

import json
import math
import platform
import random
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from in_process import finetune_in_process
from launching import CONFIGS, PLAIN_ARITHMETIC, RECIPES, run, small_model
from tools.diagnosis.weight_checks import FirstStepCheck, low_precision_line
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from training.loss_watch import SPIKES, WINDOW, LossWatch
from training.start_lines import emulation_line, start_lines
from transformers import get_scheduler

SAMPLE = RECIPES / "sample"
BF16 = SimpleNamespace(hook_norm_dtype=None, hook_param_dtype="bf16", hook_reduce_dtype="bf16")


def said(losses):
    """(step, line) of all that is said about these losses."""
    watch = LossWatch(BF16)
    lines = [(step, watch.add(loss * 7, 7)) for step, loss in enumerate(losses, 1)]
    return [(step, line) for step, line in lines if line]


def falling(steps, start, end, decay, noise, seed, kind="normal"):
    """An exponential decay with multiplicative noise, as the mean over a batch of rows has it."""
    draw = random.Random(seed)
    factor = {
        "normal": lambda: max(0.05, 1 + noise * draw.gauss(0, 1)),
        "lognormal": lambda: math.exp(noise * draw.gauss(0, 1)),
    }[kind]
    return [(end + (start - end) * math.exp(-step / decay)) * factor() for step in range(steps)]


@pytest.mark.parametrize("kind", ["normal", "lognormal"])
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05, 0.15, 0.3])
def test_falling_noisy_loss_is_no_alarm(noise, kind):
    for seed in range(8):
        for start, end, decay in ((11.0, 2.0, 15), (3.0, 1.8, 150), (8.0, 0.02, 25), (2.0, 1.99, 10)):
            assert said(falling(600, start, end, decay, noise, seed, kind)) == [], (seed, start)


def test_warm_up_that_first_lifts_the_loss_is_no_alarm():
    """Flat, a tenth higher while the rate rises, then down."""
    for seed in range(20):
        draw = random.Random(seed)
        lift = [2.5 + 0.25 * math.sin(math.pi * min(step / 100, 1)) for step in range(100)]
        losses = [*lift, *falling(300, 2.5, 1.5, 60, 0, seed)]
        assert said([loss * (1 + 0.05 * draw.gauss(0, 1)) for loss in losses]) == []


def test_one_hard_batch_in_a_while_is_no_alarm():
    losses = falling(600, 3.0, 2.0, 100, 0.03, 0)
    for step in range(60, 600, WINDOW):
        losses[step] = 9.0
    assert said(losses) == []


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_loss_that_jumps_about_is_said_once_at_the_third_jump_with_what_to_try(noise):
    for seed in range(8):
        losses = falling(400, 3.0, 2.0, 80, noise, seed)
        for step in (200, 212, 231, 240, 300, 301, 302):
            losses[step] *= 2.5
        ((step, line),) = said(losses)
        assert step == 232 and f"{SPIKES} of the last {WINDOW} steps" in line
        order = [line.index(word) for word in ("hook_norm_dtype: fp32", "--learning_rate", "hook_reduce_dtype: fp32")]
        assert order == sorted(order)


def test_run_whose_rows_make_its_loss_jump_says_so_once(tmp_path):
    """A row learnt by heart, and after twenty steps three of noise, on one rank."""
    line = (SAMPLE / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()[0]
    noise = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=40))
    rows = [line] * 42 + [json.dumps({"prompt": "a", "completion": noise[i:] + noise[:i]}) for i in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    arguments = ["--model_name_or_path", small_model(), "--dataset_name", tmp_path / "train.jsonl"]
    arguments += ["--per_device_train_batch_size", 1, "--gradient_accumulation_steps", 1, "--learning_rate", 1e-3]
    arguments += ["--max_steps", 35, "--report_to", "none", "--output_dir", tmp_path / "out"]
    done = finetune_in_process(arguments, tmp_path / "log", world_size=1, config=CONFIGS / "performance.yaml")
    assert not any(done.codes), done.output[-3000:]
    assert done.output.count("note: the loss jumps about: 3 of the last 30 steps") == 1
    assert done.output.count("hook_norm_dtype: fp32, then a lower --learning_rate") == 1
    assert "did not change" not in done.output


def test_what_is_in_fp32_already_is_not_advised():
    fp32 = SimpleNamespace(hook_norm_dtype="fp32", hook_param_dtype="bf16", hook_reduce_dtype="fp32")
    assert LossWatch(fp32).advice == "a lower --learning_rate or --max_grad_norm"


def test_skipped_steps_are_no_part_of_the_window():
    watch = LossWatch(BF16)
    assert watch.add(0, 0) == "" and not watch.losses


@pytest.fixture(scope="module")
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def norms_and_matrix(mesh, dtype=torch.float32):
    """A model of sharded parameters: a norm of ones, and a matrix of small values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(8, dtype=dtype), nn.Linear(8, 8, bias=False, dtype=dtype))
    for module in model:
        shard = DTensor.from_local(module.weight.detach(), mesh, [Shard(0)])
        module.weight = nn.Parameter(shard)
    return model


def steps_taken(model, optimizer, capsys, count=1, scheduler=None):
    """What is printed while so many steps are taken with gradients of one; a hook behind the check sees them all."""
    FirstStepCheck(model, optimizer)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    for _ in range(count):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    assert len(seen) == count
    return capsys.readouterr().out


def test_weights_that_move_are_not_mentioned_and_the_check_is_done_after_one_step(one_rank, capsys):
    model = norms_and_matrix(one_rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    assert steps_taken(model, optimizer, capsys) == ""
    assert is_done(optimizer)


def is_done(optimizer):
    """Whether the check looks at no more steps."""
    return next(iter(optimizer._optimizer_step_pre_hooks.values())).__self__.is_done


def test_weights_that_the_optimizer_does_not_reach_are_named(one_rank, capsys):
    model = norms_and_matrix(one_rank)
    copies = [nn.Parameter(model[0].weight.detach().clone()), model[1].weight]
    for parameter in copies:
        parameter.grad = torch.ones_like(parameter)
    said = steps_taken(model, torch.optim.AdamW(copies, lr=1e-3), capsys, count=2)
    assert said.count("did not change in the optimizer's step") == 1
    assert "0.weight" in said and "1.weight" not in said and "the optimizer does not reach them" in said


def test_weights_whose_step_is_rounded_away_are_named_at_the_top_of_the_warm_up(one_rank, capsys):
    """In bf16 the distance below 1.0 is 2**-8; the matrix holds values small enough to move."""
    model = norms_and_matrix(one_rank, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = get_scheduler("constant_with_warmup", optimizer, 3)
    assert steps_taken(model, optimizer, capsys, 3, scheduler) == ""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    said = capsys.readouterr().out
    assert "a step of 1.0e-04 is rounded away" in said and "0.weight (bfloat16, values from 1.0e+00)" in said
    assert "1.weight" not in said
    line = low_precision_line(model, optimizer)
    assert (
        "2 of 2 trained tensors are kept in bfloat16, such as 0.weight" in line and "above 5.1e-02 are rounded" in line
    )


def test_warm_up_whose_first_steps_are_rounded_away_is_not_mentioned(one_rank, capsys):
    model = norms_and_matrix(one_rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = get_scheduler("constant_with_warmup", optimizer, 20_000)  # 5e-9 a step, and 1.0 moves by 6e-8
    assert steps_taken(model, optimizer, capsys, 20, scheduler) == ""
    assert is_done(optimizer)  # it moved in the end
    assert low_precision_line(model, optimizer) == ""


@pytest.mark.parametrize(("done", "total", "warmup", "is_noted"), [(5, 5, 0, True), (0, 1, 1, True), (0, 9, 3, False)])
def test_schedule_that_is_at_its_end_is_noted_and_the_start_of_a_warm_up_is_not(
    one_rank, done, total, warmup, is_noted
):
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=1e-3)
    scheduler = get_scheduler("linear", optimizer, warmup, total)
    for _ in range(done):
        optimizer.step()
        scheduler.step()
    config = SimpleNamespace(path="a.yaml", found_by="me", hook_buffer_dtype=None, **vars(BF16))
    arguments = SimpleNamespace(per_device_train_batch_size=1, gradient_accumulation_steps=1, max_length=8)
    accelerator = SimpleNamespace(num_processes=1, device=torch.device("cpu"), is_main_process=False)
    lines = start_lines(config, arguments, accelerator, scheduler, total)
    assert any("the learning rate is 0" in line for line in lines) == is_noted


@pytest.mark.parametrize(
    ("cost", "origin", "said"),
    [
        (0.4, "default", None),
        (12.3, "default", "accelerate launch --mixed_precision no"),
        (12.3, "YAML", "hook_param_dtype: fp32 in the YAML"),
    ],
)
def test_dtype_that_is_emulated_is_said_with_its_cost_and_the_way_out(monkeypatch, cost, origin, said):
    monkeypatch.setattr(
        "training.start_lines.cost_beside_fp32", lambda dtype, device: cost if dtype == torch.bfloat16 else None
    )
    config = SimpleNamespace(hook_param_dtype="bf16", origins={"hook_param_dtype": origin})
    lines = emulation_line(config, torch.device("cpu"))
    assert len(lines) == bool(said)
    for line in lines:
        assert line.startswith("note: bf16 is emulated on this cpu") and "12.3 times" in line and said in line


@pytest.mark.skipif(platform.machine() != "x86_64", reason="another processor's loops may be fast")
def test_sample_trains_in_fp32_where_bf16_is_emulated():
    plain = {"PYTHONPATH": PLAIN_ARITHMETIC, "ATEN_CPU_CAPABILITY": "avx2"}
    done = run([sys.executable, str(SAMPLE / "launch_flags.py")], **plain)
    reason, flags = done.stdout.splitlines()
    assert flags.endswith("--mixed_precision no") and reason.startswith(
        "this CPU emulates bf16: a matrix product takes "
    )
