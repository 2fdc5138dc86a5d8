"""--profile and compare.py: where the time of a step goes, counted on hand-made events and in real runs."""

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hooks.activation_checkpointing import apply_activation_checkpointing, plan_activation_checkpointing
from in_process import finetune_in_process
from launching import RECIPES, Patience, clean_environment, in_fp32, wait_for_end
from rows.batches import collate
from rows.packing import collate_packed
from tiny_models import tiny_llama
from tools.profiling.model_flops import count_flops, peak_flops, row_flops
from tools.profiling.settings import changed_yaml, first_cause, last_words, settings, table
from tools.profiling.step_profile import (
    CLIP,
    DATA,
    OPTIMIZER,
    SHARES,
    STEP,
    Span,
    advice,
    combine,
    measure,
    padding_tokens,
    profile_lines,
    profile_markdown,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from training.arguments import FinetuneArguments, parse_arguments
from training.chunked_loss import compute_loss_in_chunks
from training.chunked_loss import micro_batch_loss as chunked_micro_batch_loss
from training.losses import micro_batch_loss
from training.model import add_adapters
from training.profiling import StepProfiler
from transformers import AttentionInterface

SAMPLE = RECIPES / "sample"
CPU = torch.device("cpu")
RECOMPUTE = {"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": False}
RECOMPUTE |= {"hook_checkpoint_every_n_blocks": 1, "hook_checkpoint_function": None}
RECOMPUTE |= {"fsdp_transformer_layer_cls_to_wrap": ()}


def host(name, start, end, is_main=True):
    return Span(name, start, end, is_region="::" not in name, is_main=is_main)


def kernel(name, start, end):
    return Span(name, start, end, is_device=True, is_main=False)


def device_region(name, start, end):
    return Span(name, start, end, is_device=True, is_region=True, is_main=False)


def test_every_moment_of_a_cpu_step_counts_once():
    spans = [
        host(f"{STEP}*", 0, 100),
        host(DATA, 0, 10),
        host("aten::stack", 2, 8),  # of the rows: no computation
        host("aten::linear", 10, 30),
        host("aten::addmm", 12, 20),  # nested
        Span("gloo:all_gather", 25, 50, is_main=False),  # hidden until 30
        host("c10d::allgather_", 31, 33),
        host("_c10d_functional::wait_tensor", 33, 49),
        host("autograd::engine::evaluate_function: MulBackward0", 50, 70),
        host("aten::mul", 55, 60),
        host(f"{OPTIMIZER}AdamW.step", 70, 90),
        host("aten::_fused_adamw_", 72, 88),
        host("aten::mm", 90, 95, is_main=False),  # another thread's
        host("aten::mm", 98, 120),  # ends after the step
        host("aten::mm", 200, 300),  # outside
    ]
    found = measure(spans)
    assert found == {
        "computation": 20 + 5 + 2,
        "exposed communication": 20,
        "data wait": 10,
        "optimizer": 16,
        "copies": 0,
        "host": 27,
        "step": 100,
        "communication": 25,
    }


def test_every_moment_of_a_gpu_step_counts_once():
    spans = [
        host(f"{STEP}*", 0, 60),
        host(f"{STEP}*", 60, 100),
        device_region(f"{STEP}*", 0, 100),
        kernel("gemm", 0, 40),
        kernel("flash_fwd", 30, 60),  # on another stream
        device_region(f"{OPTIMIZER}AdamW.step", 20, 25),
        device_region(CLIP, 25, 30),
        host(CLIP, 30, 50),  # launched then, and no work
        device_region("nccl:_all_gather_base", 40, 85),
        kernel("ncclDevKernel_AllGather_RING_LL", 50, 80),  # hidden until 60
        kernel("Memcpy HtoD (Pinned -> Device)", 75, 90),
        host(DATA, 85, 95),
        host("aten::mm", 96, 99),
    ]
    found = measure(spans)
    assert found == {
        "computation": 50,
        "exposed communication": 20,
        "data wait": 5,
        "optimizer": 10,
        "copies": 10,
        "host": 5,
        "step": 100,
        "communication": 30,
    }


def test_evaluation_and_checkpoints_belong_to_no_step():
    spans = [host(f"{STEP}*", 0, 100), host("aten::mm", 0, 80)]
    spans += [host("recipe: evaluation", 10, 30), host("recipe: saving", 50, 60), host("recipe: memory", 95, 100)]
    found = measure(spans)
    assert (found["step"], found["computation"], found["host"]) == (65, 50, 15)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_shares_are_those_of_counting_each_microsecond(on_gpu):
    """The reference knows no intervals: it asks of every microsecond what runs in it."""
    draw = random.Random(0)
    for _ in range(50):
        spans = [host(f"{STEP}*", 0, 90), host(f"{STEP}*", 90, 200)]
        names = ["data", "work", "collective", "update", "evaluate", *(["copy"] if on_gpu else [])]
        covered = {name: set() for name in (*names, "copy")}
        for _ in range(draw.randrange(1, 30)):
            kind, start = draw.choice(names), draw.randrange(0, 200)
            end = start + draw.randrange(0, 40)
            covered[kind] |= set(range(start, end))
            of_device = kernel if on_gpu else host
            spans.append(
                {
                    "data": host(DATA, start, end),
                    "work": of_device("aten::mm", start, end),
                    "collective": kernel("ncclKernel", start, end) if on_gpu else host("gloo:all_reduce", start, end),
                    "update": (device_region if on_gpu else host)(CLIP, start, end),
                    "evaluate": host("recipe: evaluation", start, end),
                    "copy": kernel("Memcpy DtoH", start, end),
                }[kind]
            )
        if on_gpu:
            spans.append(kernel("gemm", 500, 501))  # what makes it one
        expected = dict.fromkeys(SHARES, 0)
        for moment in set(range(200)) - covered["evaluate"]:
            inside = {name for name in covered if moment in covered[name]}
            works = "work" in inside and (on_gpu or "data" not in inside)
            order = {"optimizer": works and "update" in inside, "computation": works}
            order |= {"exposed communication": "collective" in inside, "copies": "copy" in inside}
            order |= {"data wait": "data" in inside, "host": True}
            expected[next(name for name in order if order[name])] += 1
        found = measure(spans)
        assert {name: found[name] for name in SHARES} == expected
        assert sum(expected.values()) == found["step"] == 200 - len(covered["evaluate"] & set(range(200)))


def test_profile_of_ranks_adds_up_tokens_and_averages_shares():
    def rank(computation, waiting, tokens):
        measured = dict.fromkeys(SHARES, 0.0) | {"computation": computation, "exposed communication": waiting}
        measured |= {"step": 2e6, "communication": waiting + 1e5}
        return {"measured": measured, "steps": 4, "tokens": tokens, "padding": tokens // 4, "flops": 3e12}

    found = combine([rank(2e6, 0.0, 800), rank(1e6, 1e6, 1200)])
    assert found["shares"]["computation"] == 0.75 and found["shares"]["exposed communication"] == 0.25
    assert found["tokens"] == 2000 and found["padding_share"] == 0.25
    assert found["step_time_s"] == 0.5 and found["tokens_per_second"] == 1000
    assert found["model_flops_per_second_per_rank"] == 1.5e12 and found["communication"] == pytest.approx(0.3)
    found |= {"model_flop_utilisation": None, "convention": "so", "advice": ["less"]}
    lines = profile_lines(found)
    assert "exposed communication 25.0% (of 30.0%)" in lines[1] and "1,000 tokens/s, 25.0% of them padding" in lines[2]
    assert "peak" not in lines[2] and lines[-1] == "try: less"
    assert "41.0% of the device's peak" in profile_lines({**found, "model_flop_utilisation": 0.41})[2]
    assert "| computation | 75.0% | 50.0% | 100.0% |" in profile_markdown(found)


def shares(**values):
    values = {name.replace("_", " "): share for name, share in values.items()}
    return dict.fromkeys(SHARES, 0.0) | values | {"computation": 1.0 - sum(values.values())}


def advised(found, padding=0.0, is_gpu=True, recomputed=0, keys=(), **arguments):
    """The advice on a run that needs none, but for what is named."""
    wrap = {"recomputed_blocks": ["block"] * recomputed, "num_blocks": 6, "num_units": 9}
    yaml = {"hook_wrap_function": None, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_min_num_params": 0}
    yaml |= {"hook_wrap_blocks_per_unit": 1, "hook_reduce_every_micro_batch": False}
    plain = {"gradient_accumulation_steps": 2, "packing": False, "group_by_length": False}
    profile = {"shares": found, "padding_share": padding}
    return advice(profile, wrap, {**yaml, **dict(keys)}, {**plain, **arguments}, is_gpu)


SENDS = shares(exposed_communication=0.3)
FOUR_BLOCKS = {"hook_wrap_blocks_per_unit": 4}
BY_SIZE = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 5000}


def test_healthy_profile_gets_no_advice():
    limits = shares(exposed_communication=0.25, data_wait=0.05, host=0.20)
    assert advised(limits, padding=0.20) == []


@pytest.mark.parametrize(
    "found, run, said",
    [
        (shares(), {"recomputed": 3}, ["3 of 6 blocks recompute", "compare.py --steps 5"]),
        (SENDS, {}, ["30%", "9 units", "hook_wrap_blocks_per_unit 2-4"]),
        (SENDS, {"keys": {"hook_wrap_blocks_per_unit": 2}}, ["hook_wrap_blocks_per_unit 4"]),
        (SENDS, {"keys": FOUR_BLOCKS}, ["--per_device_train_batch_size"]),
        (SENDS, {"keys": {"hook_wrap_function": "a.py:b"}}, ["--per_device_train_batch_size"]),
        (
            SENDS,
            {"keys": {**FOUR_BLOCKS, "hook_reduce_every_micro_batch": True}},
            ["hook_reduce_every_micro_batch: false"],
        ),
        (SENDS, {"keys": BY_SIZE}, ["raise fsdp_min_num_params (now 5,000)"]),
        (shares(data_wait=0.06), {}, ["6% of the step waits", "--dataloader_num_workers", "--dataset_num_proc"]),
        (shares(), {"padding": 0.21}, ["21% of the tokens are padding: --packing, or --group_by_length"]),
        (shares(), {"padding": 0.3, "group_by_length": True}, ["30% of the tokens are padding: --packing"]),
        (shares(), {"padding": 0.3, "packing": True}, ["--max_length"]),
        (shares(host=0.3), {}, ["30%", "--torch_compile (finetune_performance.py)"]),
        (shares(host=0.3), {"torch_compile": False}, ["or --torch_compile"]),
    ],
)
def test_advice_names_the_dial(found, run, said):
    (line,) = advised(found, **run)
    assert all(text in line for text in said), line


def test_advice_on_the_host_asks_for_what_is_left():
    for run in ({"torch_compile": True}, {"is_gpu": False}):
        (line,) = advised(shares(host=0.3), **run)
        assert line.endswith("a larger --per_device_train_batch_size")


def test_advice_comes_in_the_guides_order():
    bad = shares(exposed_communication=0.3, data_wait=0.1, host=0.3)
    lines = advised(bad, padding=0.5, recomputed=1)
    starts = ("recompute", "communication", "waits for rows", "padding", "Python")
    assert len(lines) == 5 and all(start in line for start, line in zip(starts, lines))


def test_padding_is_counted_with_a_mask_and_in_packed_rows():
    rows = [{"input_ids": [5, 6, 7, 0], "labels": [-100, 6, 7, 0]}, {"input_ids": [5, 0], "labels": [-100, 0]}]
    assert padding_tokens(collate(rows, pad_token_id=0)) == 2
    packed = [
        {"input_ids": [5, 6, 7, 5, 0, 0], "labels": [-100, 6, 7, -100, 0, 0], "position_ids": [0, 1, 2, 0, 1, 2]},
        {"input_ids": [5, 6, 0], "labels": [-100, 6, 0], "position_ids": [0, 1, 2]},
        {"input_ids": [5, 6, 0, 8, 9], "labels": [-100, 6, 0, -100, -100], "position_ids": [0, 1, 2, 0, 1]},
    ]
    assert padding_tokens(collate_packed(packed, pad_token_id=0)) == 3 + 1


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", None),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peak_is_that_of_the_very_device(name, peak):
    assert peak_flops(name) == peak


def llama_flops(length, lora_rank=0):
    """Counted by hand for tiny_llama: 4 layers, hidden 32, MLP 64, 4 heads of 8, 2 of them for keys, vocabulary 96.

    A matmul of n parameters costs 2 n T forward, as much for the gradient of its input and of its weights.
    """
    layers, query, key, output, mlp, head = 4, 32 * 32, 32 * 16, 32 * 32, 3 * 32 * 64, 32 * 96
    matmuls = layers * (query + 2 * key + output + mlp) + head
    scores = 2 * 2 * 4 * 8 * length**2  # q k^T and p v of one layer
    if not lora_rank:
        return 3 * (2 * length * matmuls + layers * scores)
    down, up = {}, {}
    for name, (inputs, outputs) in {"q_proj": (32, 32), "v_proj": (32, 16), "down_proj": (64, 32)}.items():
        down[name], up[name] = lora_rank * inputs, lora_rank * outputs
    adapters = layers * (sum(down.values()) + sum(up.values()))
    # No gradient reaches what stands before the first adapters: the input of layer 0's q, k, v, and its keys.
    first_inputs = query + 2 * key + down["q_proj"] + down["v_proj"]
    flops = 2 * length * (2 * matmuls + 3 * adapters - first_inputs)
    return flops + 3 * layers * scores - scores / 2


@pytest.mark.parametrize("recompute", [None, "full", "selective"])
@pytest.mark.parametrize("training", ["full", "lora"])
def test_model_flops_are_those_counted_by_hand(training, recompute):
    torch.manual_seed(0)
    model = tiny_llama().train()
    model.config.use_cache = False
    arguments = FinetuneArguments(model_name_or_path="", use_peft=training == "lora", lora_r=4, lora_dropout=0.1)
    arguments.lora_target_modules = ["q_proj", "v_proj", "down_proj"]
    model = add_adapters(model, arguments)
    if recompute:
        config = SimpleNamespace(**RECOMPUTE, hook_checkpoint_mode=recompute)
        apply_activation_checkpointing(model, plan_activation_checkpointing(model, config), config, is_cpu=True)
    ids = torch.randint(1, 96, (3, 24))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    before = torch.get_rng_state()
    per_token, squared = count_flops(model, micro_batch_loss, batch, CPU)
    for length in (24, 40):
        expected = llama_flops(length, 4 if training == "lora" else 0)
        assert per_token * length + squared * length**2 == pytest.approx(expected, rel=1e-9)
    assert torch.equal(before, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())
    embedding = model.get_input_embeddings()
    assert embedding(ids).requires_grad == (training == "full" or recompute is not None)  # as it was


def test_model_flops_of_eager_attention_and_of_a_loss_in_chunks_are_the_same():
    """The chunked head skips the last token of a row, which predicts nothing: 3 x 2 x 32 x 96 FLOPs less."""
    torch.manual_seed(0)
    model = tiny_llama().train()
    model.config.use_cache = False
    ids = torch.randint(1, 96, (1, 24))
    batch = {"input_ids": ids, "labels": ids}
    model.set_attn_implementation("eager")
    assert row_flops(model, micro_batch_loss, batch, CPU) == llama_flops(24)
    compute_loss_in_chunks(model, 7)
    assert row_flops(model, chunked_micro_batch_loss, batch, CPU) == llama_flops(24) - 3 * 2 * 32 * 96


@pytest.mark.parametrize("has_sdpa", [True, False])  # Gemma 2 has flash attention and no sdpa
def test_attention_that_no_formula_is_known_for_is_counted_as_torchs_own(monkeypatch, has_sdpa):
    def flash(*_, **__):
        raise AssertionError("its kernels hide what they compute")

    AttentionInterface.register("uncounted", flash)
    monkeypatch.setattr("transformers.LlamaForCausalLM._supports_sdpa", has_sdpa)
    monkeypatch.setattr("transformers.LlamaModel._supports_sdpa", has_sdpa)
    model = tiny_llama().train()
    model.config.use_cache = False
    model.set_attn_implementation("uncounted")
    ids = torch.randint(1, 96, (1, 24))
    per_token, squared = count_flops(model, micro_batch_loss, {"input_ids": ids, "labels": ids}, CPU)
    assert per_token * 24 + squared * 24**2 == pytest.approx(llama_flops(24))
    assert model.config._attn_implementation == "uncounted"


def test_counting_leaves_no_gathered_parameters_behind():
    """The root is not resharded after forward: a clip or a step would see plain copies."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = tiny_llama().train()
        model.config.use_cache = False
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        ids = torch.randint(1, 96, (1, 24))
        per_token, squared = count_flops(model, micro_batch_loss, {"input_ids": ids, "labels": ids}, CPU)
        assert per_token * 24 + squared * 24**2 == pytest.approx(llama_flops(24))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    finally:
        dist.destroy_process_group()


def arguments_for(folder, *more):
    named = ["--model_name_or_path", SAMPLE / "model", "--dataset_name", SAMPLE / "data" / "train.jsonl"]
    named += ["--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2, "--logging_steps", 1]
    return [*named, "--report_to", "none", "--output_dir", folder, *more]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_profiled_run_trains_the_same_and_its_shares_add_up(tmp_path):
    options = ["--max_steps", 5, "--use_peft", "--lora_target_modules", "q_proj", "down_proj", "--learning_rate", 1e-3]
    options += ["--gradient_accumulation_steps", 1]
    runs = {}
    for name, profile in (("plain", 0), ("profiled", 2)):
        folder = tmp_path / name
        run = finetune_in_process(
            arguments_for(folder, *options, "--profile", profile), tmp_path / "log", script="finetune_mem_limit"
        )
        assert not any(run.codes), run.output[-3000:]
        runs[name] = metrics(folder)
    assert [row["loss"] for row in runs["plain"]] == [row["loss"] for row in runs["profiled"]]  # dropout included
    folder = tmp_path / "profiled" / "profile"
    found = json.loads((folder / "profile.json").read_text())
    assert found["steps"] == found["ranks"] == 2
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert [sum(shares.values()) for shares in found["shares_per_rank"]] == pytest.approx([1, 1])
    assert all(found["shares"][name] > 0 for name in SHARES if name != "copies")
    assert found["communication"] >= found["shares"]["exposed communication"]
    recorded = runs["profiled"][2:4]  # after two steps to warm up
    tokens = sum(row["tokens_per_second_per_gpu"] * row["step_time_s"] * 2 for row in recorded)
    assert found["tokens"] == pytest.approx(tokens)
    assert found["tokens_per_second"] == pytest.approx(tokens / (2 * found["step_time_s"]))
    assert found["step_time_s"] == pytest.approx(sum(row["step_time_s"] for row in recorded) / 2, rel=0.3)
    assert 0 < found["padding_share"] < 0.5 and found["model_flop_utilisation"] is None
    assert run.output.count("profile: 2 step(s) of") == 1 and run.output.count("model FLOPs: ") == 1
    assert "try: 6 of 6 blocks recompute" in run.output
    assert "| exposed communication | " in (folder / "profile.md").read_text()
    with gzip.open(folder / "trace.json.gz") as file:
        trace = json.load(file)
    assert any(event["name"].startswith("gloo:") for event in trace["traceEvents"])
    assert "aten::mm" in (folder / "operators.txt").read_text()


def test_run_that_ends_early_reports_what_there_was(tmp_path):
    run = finetune_in_process(
        arguments_for(tmp_path, "--max_steps", 3, "--profile", 5, "--packing", "--max_length", 256),
        tmp_path / "log",
        script="finetune_performance",
        config="performance",
    )
    assert not any(run.codes), run.output[-3000:]
    assert run.output.count("--profile 5: the run ended after 3 steps, 2 of them to warm up; 1 recorded") == 1
    found = json.loads((tmp_path / "profile" / "profile.json").read_text())
    row = metrics(tmp_path)[-1]
    assert found["steps"] == 1
    assert found["tokens"] == pytest.approx(row["tokens_per_second_per_gpu"] * row["step_time_s"] * 2)
    assert found["padding_share"] < 0.1


@pytest.mark.parametrize("steps", [1, 2])
def test_run_of_the_warm_up_alone_says_that_nothing_was_recorded(steps):
    said = []

    def say(text):
        time.sleep(0.05)
        said.append(text)

    log, meter = SimpleNamespace(say=say), SimpleNamespace(started=0.0)
    accelerator, arguments = SimpleNamespace(device=CPU, is_main_process=True), FinetuneArguments(profile=4)
    profiler = StepProfiler(accelerator, None, None, arguments, log=log, meter=meter)
    for step in range(1, steps + 1):
        profiler.step([], step == steps)
    assert said == [f"--profile 4: the run ended after {steps} steps, 2 of them to warm up; 0 recorded"]
    assert meter.started >= 0.05  # the log line's step time does not hold what this took


def test_settings_change_one_thing_each_where_there_is_something_to_change():
    keys = {
        "fsdp_activation_checkpointing": True,
        "hook_wrap_blocks_per_unit": 2,
        "fsdp_min_num_params": 1000,
        "hook_wrap_function": None,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }
    without, coarser = settings(keys)
    assert not without.left_out and coarser.changes == {"hook_wrap_blocks_per_unit": 4}
    without, coarser = settings(
        {**keys, "fsdp_activation_checkpointing": False, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}
    )
    assert without.left_out and coarser.changes == {"fsdp_min_num_params": 2000}
    assert "one unit already" in settings({**keys, "fsdp_auto_wrap_policy": "NO_WRAP"})[1].left_out
    assert "hook_wrap_function" in settings({**keys, "hook_wrap_function": "mine.py:wrap"})[1].left_out


def test_changed_yaml_replaces_a_key_however_it_is_spelt():
    raw = {"num_processes": 2, "fsdp_config": {"fsdp_version": 2, "activation_checkpointing": True, "hook_a": "x"}}
    changed = changed_yaml(raw, {"fsdp_activation_checkpointing": False, "hook_a": None})
    assert changed == {"num_processes": 2, "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": False}}
    assert raw["fsdp_config"]["hook_a"] == "x"


def test_cause_of_a_failure_is_found_among_the_echoes(tmp_path):
    echo = "RuntimeError: Connection closed by peer"
    assert first_cause([echo, "torch.OutOfMemoryError: CUDA out of memory."]).startswith("does not fit (rank 1: torch")
    assert first_cause([echo, "", "KeyError: 'x'"]) == "rank 2: KeyError: 'x'"
    assert first_cause([echo, ""]) == f"rank 0: {echo}"
    log = tmp_path / "log"
    log.write_text("one\n\nError: --max_length: found 1\n\nlast\n\n")
    assert last_words(log, 1) == "--max_length: found 1" and "on the host" in last_words(log, -9)
    log.write_text("Traceback\n  line\nKeyError: 'x'\n")
    assert last_words(log, 1) == "KeyError: 'x'"


def test_table_gives_ratios_to_the_run_as_asked_row_by_row():
    asked = {"name": "as asked", "tokens_per_second_per_rank": [1000.0, 100.0, 1000.0], "memory_gib": 2.0}
    off = {"name": "recompute off", "tokens_per_second_per_rank": [1300.0, 140.0, 200.0], "memory_gib": 3.0}
    full = {"name": "4 blocks per unit", "failure": "does not fit (rank 1: no)", "is_left_out": False}
    kept = {"name": "coarser units", "failure": "hook_wrap_function decides", "is_left_out": True}
    lines = table([asked, off, full, kept], 3)
    assert lines[2].split()[2:] == ["1,000", "1.00", "(1.00", "to", "1.00)", "2.000", "1.00"]
    assert lines[3].split()[2:] == ["200", "1.30", "(0.20", "to", "1.40)", "3.000", "1.50"]
    assert lines[4].endswith("  does not fit (rank 1: no)") and "not measured: hook_wrap_function" in lines[5]
    assert table([{**asked, "memory_gib": None}], 3)[2].split()[-2:] == ["?", "?"]


@pytest.mark.slow
def test_compare_runs_each_setting_and_takes_no_memory_left_for_an_answer(tmp_path):
    folder = tmp_path / "out"
    run = finetune_in_process(
        ["--steps", 2, "finetune.py", *arguments_for(folder)], tmp_path / "log", script="compare_worker"
    )
    assert run.codes == [0, 0], run.output[-3000:]
    assert run.output.count("as asked ") == 1, run.output
    asked, off, coarser = json.loads((folder / "profile" / "compare.json").read_text())
    assert len(asked["tokens_per_second_per_rank"]) == len(coarser["tokens_per_second_per_rank"]) == 2
    assert off["failure"].startswith("does not fit (rank 1: ") and "can't allocate memory" in off["failure"]
    assert coarser["name"] == "2 blocks per unit" and coarser["changes"] == {"hook_wrap_blocks_per_unit": 2}
    assert min(asked["tokens_per_second_per_rank"] + coarser["tokens_per_second_per_rank"]) > 0
    assert 0.5 < coarser["memory_gib"] / asked["memory_gib"] < 2
    assert {path.name for path in folder.iterdir()} == {"profile"}  # nothing was trained that is kept
    assert not (folder / "profile" / "compare" / "run").exists()


def test_interrupted_comparison_saves_nothing_and_leaves_nothing(tmp_path):
    """Ctrl-C reaches the whole group of processes; the run that is measured would save a checkpoint."""
    words = ["--steps", 500, "finetune.py", *arguments_for(tmp_path), "--accelerate_config", in_fp32()]
    inner = tmp_path / "profile" / "compare" / "run"
    command = [sys.executable, RECIPES / "compare.py", *map(str, words)]
    options = {"env": clean_environment(), "start_new_session": True, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **options) as process:
        patience = Patience(process.pid)
        while not (inner / "metrics.jsonl").is_file() and process.poll() is None:
            assert not patience.is_over()
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        wait_for_end(process)
        assert process.returncode != 0
    assert not inner.exists() and not list(tmp_path.rglob("checkpoint-*"))


def test_profile_arguments_are_checked():
    named = ["--model_name_or_path", "m", "--dataset_name", "d"]
    assert parse_arguments([*named, "--profile", "3"]).profile == 3
    with pytest.raises(ValueError, match=r"--profile: found -1, allowed: 0 or more"):
        parse_arguments([*named, "--profile", "-1"])
