"""The planner against the truth: torch's allocator, seen by its profiler, on the same step with real tensors.

Live bytes of the planner's fake run must be those of real tensors in a fake process group to 0.5% (measured: equal but
for tensors of a few bytes), and those of two real gloo processes to 1% with gloo's own buffers apart.
"""

import dataclasses
import json
import os
import shutil
import sys
from functools import partial
from itertools import product

import pytest
import torch
from hooks.config import read_hook_config
from launching import CONFIGS, RECIPES, ROOT, run
from tools.planner import command as plan
from tools.planner.advice import advise, changes, largest
from tools.planner.as_on_gpu import STAND_IN, settle_attention, settle_length
from tools.planner.memory_trace import OTHER, PINNED, MemoryTrace
from tools.planner.planned_step import GIB, Plan, PlannedStep, Request, capacity_gib, make_plan, plan_step
from tools.planner.roofline import COMPUTE_SHARE, GPUS, LINK_SHARE, step_seconds
from training.arguments import KINDS, PerformanceArguments
from training.optimizer import OffloadedAdamW
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig, MixtralConfig

WORKER, SAMPLE = ROOT / "tests" / "planner_worker.py", RECIPES / "sample"
WRAPS = {
    "one unit": {"fsdp_auto_wrap_policy": "NO_WRAP"},
    "1 block": {},
    "2 blocks": {"hook_wrap_blocks_per_unit": 2},
    "by size": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 300_000},
}
RECOMPUTES = {
    "none": {"fsdp_activation_checkpointing": False},
    "every 2nd": {"hook_checkpoint_every_n_blocks": 2},
    "all": {},
}
DTYPES = {
    "bf16": {},
    "fp32": {"mixed_precision": "no", "hook_param_dtype": "fp32", "hook_reduce_dtype": "fp32"},
}
TOLERANCE, GLOO_TOLERANCE = 5e-3, 1e-2
LENGTH, VOCABULARY = 64, 4096
ROWS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("planned")
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512}
    LlamaConfig(**sizes, **heads, dtype="bfloat16", architectures=["LlamaForCausalLM"]).save_pretrained(path)
    sizes |= {"intermediate_size": 512, "num_hidden_layers": 1}  # 8 experts: 16 ranks cut them along another dim
    mixtral = MixtralConfig(**sizes, **heads, dtype="bfloat16", architectures=["MixtralForCausalLM"])
    mixtral.save_pretrained(path / "mixtral")
    return path


def request_of(folder, script="finetune.py", config="default.yaml", ranks=2, keys=(), padded=False, **arguments):
    """A request as plan.py makes it."""
    values = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_length": LENGTH,
        "packing": False,
    }
    values["dataset_name"] = "none"
    kind = KINDS[script](model_name_or_path=str(folder), **{**values, **arguments})
    yaml = dataclasses.asdict(read_hook_config(str(CONFIGS / config)))
    return Request(script, script, dataclasses.asdict(kind), {**yaml, **dict(keys)}, ranks, not padded)


def layouts(folder, rows_in_bf16=1):
    """wrap x recompute, with the eight of dtype x training x loss spread over them; then one dial each.

    ROWS rows where the dtype is fp32 or a dial acts on each row; a CPU that emulates bf16 takes minutes for the others.
    """
    found, planned = {}, partial(request_of, folder, per_device_train_batch_size=rows_in_bf16)
    others = list(product(DTYPES, ("full", "LoRA"), ("plain", "chunks")))
    for number, (wrap, recompute) in enumerate(product(WRAPS, RECOMPUTES)):
        dtype, training, loss = others[(number * 3 + 5) % 8]
        script = "finetune_mem_limit.py" if loss == "chunks" else "finetune.py"
        keys = {**WRAPS[wrap], **RECOMPUTES[recompute], **DTYPES[dtype]}
        name = f"{wrap}, recompute {recompute}, {dtype}, {training}, {loss}"
        lora = {"use_peft": training == "LoRA", "lora_r": 8}
        rows = {"per_device_train_batch_size": ROWS if dtype == "fp32" else rows_in_bf16}
        found[name] = planned(script, keys=keys, **rows, **lora)
    selective, offloaded = {"hook_checkpoint_mode": "selective"}, {"fsdp_activation_checkpointing_offload": True}
    all_rows = {"per_device_train_batch_size": ROWS}
    norms = {"hook_norm_dtype": "fp32", "fsdp_reshard_after_forward": False}
    found["norms in fp32, not resharded"] = planned(keys=norms)
    found["reduced once a step"] = planned(config="performance.yaml", gradient_accumulation_steps=2, ranks=4)
    found["reduced each time"] = planned(config="mem_limit.yaml", gradient_accumulation_steps=2, ranks=3)
    found["selective, padded"] = planned(keys=selective, padded=True, **all_rows)
    found["packed"] = planned(packing=True)
    found["inputs on the host"] = planned(keys=offloaded, **all_rows)
    found["uneven shards"] = planned(ranks=7)
    found["8 experts"] = request_of(folder / "mixtral", ranks=16, per_device_train_batch_size=1, max_length=16)
    return found


def worker(folder, mode, requests, *launcher):
    """What planner_worker.py prints."""
    path = folder / f"{mode}.json"
    path.write_text(json.dumps([dataclasses.asdict(request) for request in requests.values()], default=str))
    command = [sys.executable, *launcher, str(WORKER), mode, str(path)]
    done = run(command, PYTHONPATH=f"{RECIPES}{os.pathsep}{WORKER.parent}")
    assert done.returncode == 0, done.stdout[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    return dict(zip(requests, json.loads(line)))


@pytest.fixture(scope="module")
def truths(folder):
    return worker(folder, "truth", layouts(folder))


@pytest.mark.slow
def test_live_bytes_are_those_of_real_tensors(truths):
    errors = {name: one["peak_with_host"] / one["true"] - 1 for name, one in truths.items()}
    assert len(errors) == 12 + 8
    assert {name: error for name, error in errors.items() if abs(error) > TOLERANCE} == {}
    assert all(one["events"] > 500 for one in truths.values())
    assert len({one["true"] for one in truths.values()}) > 15  # the layouts differ, so a count that ignores one fails


@pytest.mark.slow
def test_live_bytes_are_those_of_two_real_processes(folder):
    of_two = {name: one for name, one in layouts(folder, rows_in_bf16=ROWS).items() if one.num_processes == 2}
    found = worker(folder, "gloo", dict(list(of_two.items())[::3]))
    errors = {name: one["peak_with_host"] / one["true"] - 1 for name, one in found.items()}
    assert len(errors) >= 5
    assert {name: (error, found[name]) for name, error in errors.items() if abs(error) > GLOO_TOLERANCE} == {}


def test_parts_add_up_to_the_peak_and_state_is_what_arithmetic_says(truths):
    parameters = 2 * (256 * (256 + 128 * 2 + 256) + 3 * 256 * 704 + 2 * 256) + 2 * VOCABULARY * 256 + 256
    for name, one in truths.items():
        assert sum(one["parts"].values()) == one["peak"], name
    one = truths["1 block, recompute all, fp32, full, plain"]
    assert one["parameters"] == one["trainable"] == parameters
    held = (parameters * 4 // 2) * 4  # weight, gradient, two moments, fp32, of two ranks
    assert one["state"] == held
    assert one["parts"]["parameter shards"] * 2 == one["parts"]["optimizer state"] - 4 * 21 == parameters * 4
    experts = truths["8 experts"]  # where a rank would hold an eighth of them, and gather twice their bytes
    assert experts["state"] == pytest.approx(4 * 4 * experts["parameters"] / 16, rel=1e-3)
    assert experts["counts"]["reduce-scatter bytes"] == pytest.approx(4 * experts["parameters"], rel=1e-2)
    lora = truths["1 block, recompute none, fp32, LoRA, plain"]
    adapted = 2 * 8 * (4 * 256 + 256 + 128 * 2 + 256 + 3 * (256 + 704))  # r x (in + out) of seven matrices
    assert lora["parameters"] == parameters and lora["trainable"] == adapted


def test_collectives_and_operations_are_those_of_the_layout(truths):
    """2 blocks: 2 gathers in forward, 2 in backward, one of the root; 3 scatters. Recompute gathers none."""
    one, none = (truths[f"1 block, recompute {r}, fp32, {t}, plain"] for r, t in (("all", "full"), ("none", "LoRA")))
    assert one["counts"]["all-gather calls"] == none["counts"]["all-gather calls"] == 5
    assert one["counts"]["reduce-scatter calls"] == 3
    assert one["counts"]["reduce-scatter bytes"] == 4 * one["parameters"]
    assert truths["2 blocks, recompute all, fp32, full, chunks"]["counts"]["all-gather calls"] == 3
    tokens, blocks, head = ROWS * LENGTH, 2 * (256 * 768 + 3 * 256 * 704) * 2, 2 * 256 * VOCABULARY
    attention = ROWS * 2 * (2 * 8 * LENGTH * LENGTH * 32 * 2) // 2  # rows x layers x (two products, causal) of 8 heads
    assert one["counts"]["forward flops"] == tokens * (blocks + head) + attention
    assert one["counts"]["backward flops"] == 2 * tokens * (blocks + head) + int(2.5 * attention)
    last = 2 * 704 * 256 * 2  # torch stops a recompute before a block's last product, of which nothing was saved
    assert one["counts"]["recompute flops"] == tokens * (blocks - last) + attention
    assert "recompute flops" not in none["counts"]
    once, each = truths["reduced once a step"], truths["reduced each time"]
    assert once["counts"]["reduce-scatter calls"] == 2 and each["counts"]["reduce-scatter calls"] == 2 * 4


def test_offloaded_state_is_on_the_host_and_the_rest_is_not(truths):
    one = truths["reduced each time"]  # mem_limit.yaml, three ranks
    moments = 8 * one["parameters"] / 3
    assert one["host"] == pytest.approx(moments, rel=0.01)
    assert one["parts"].get("optimizer state", 0) < 0.01 * moments
    assert one["peak"] < one["peak_with_host"] <= one["peak"] + one["host"]


def test_inputs_of_recomputed_blocks_are_on_the_host(truths):
    """2 blocks of ROWS x LENGTH tokens x 256 values in bf16, and what came before them."""
    plain, one = truths["1 block, recompute all, fp32, full, plain"], truths["inputs on the host"]
    inputs = 2 * ROWS * LENGTH * 256 * 2
    assert inputs <= one["host"] < 1.1 * inputs and plain["host"] == 0
    assert one["counts"]["host copied"] == one["host"]


def test_pinned_memory_is_counted_in_powers_of_two_and_what_comes_back_is_not():
    model = torch.nn.Linear(2, 2)
    trace = MemoryTrace(model, OffloadedAdamW(model.parameters()))
    held = [torch.empty(n, dtype=torch.uint8) for n in (1025, 4096, 3)]
    for value in held:
        trace.tag(value, PINNED)
    assert trace.on_host == trace.host_peak == 2048 + 4096 + 4 and trace.total == 0
    trace.tag(held[0], OTHER)
    assert trace.on_host == 4096 + 4 and trace.total == 1536  # three of CUDA's 512
    exact = MemoryTrace(model, OffloadedAdamW(model.parameters()), round_to=1)
    exact.tag(held[0], PINNED)
    assert exact.on_host == 1025


def test_copy_of_a_script_is_planned_under_its_own_name(folder, truths, tmp_path, monkeypatch):
    shutil.copy(RECIPES / "finetune_mem_limit.py", tmp_path / "train_ours.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    name, ours = next((name, one) for name, one in layouts(folder).items() if name.endswith("chunks"))
    copied = plan_step(dataclasses.replace(ours, script="train_ours.py", round_to=1))
    assert copied.peak == truths[name]["peak"] and copied.parts == truths[name]["parts"]
    named = [name for name, _ in changes(dataclasses.replace(ours, script="a.py"))]
    assert len(named) >= 3 and not any("finetune_mem_limit.py" in name for name in named)


@pytest.fixture
def small(tmp_path):
    """A function that saves a small config of a family."""

    def save(family, **sizes):
        common = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
        CONFIG_MAPPING[family](**common, **sizes, dtype="bfloat16").save_pretrained(tmp_path / family)
        return tmp_path / family

    return save


def model_of(folder):
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def test_packing_that_a_run_would_refuse_is_refused(small):
    arguments = PerformanceArguments(attn_implementation="flash_attention_2")
    with pytest.raises(ValueError, match="packed documents see each other"):
        settle_attention(arguments, "bf16", model_of(small("gpt_bigcode")))


def test_rows_end_with_learned_positions_but_packed_rows_do_not(small):
    """Positions restart with each document; a plan has the length that its rows are cut to."""
    folder = small("gpt2", max_position_embeddings=32)
    arguments = KINDS["finetune.py"](max_length=LENGTH, packing=True)
    assert settle_length(arguments, model_of(folder)) == [] and arguments.max_length == LENGTH
    cut = plan_step(request_of(folder))
    assert cut.length == 32 and "rows counted with 32 tokens: the model has no more positions" in cut.notes


def test_packed_rows_take_flash_attention_where_the_script_would_choose_it(small):
    def settled(arguments, dtype="bf16", family="llama"):
        model = model_of(small(family))
        settle_attention(arguments, dtype, model)
        assert model.config._attn_implementation == (STAND_IN if family == "gemma2" else "sdpa")
        return arguments.attn_implementation

    def arguments(**values):
        return PerformanceArguments(per_device_train_batch_size=1, **values)

    assert settled(arguments()) == "flash_attention_2"
    assert settled(arguments(), "fp32") is None and settled(arguments(packing=False)) is None
    assert settled(arguments(), family="gpt_bigcode") is None  # documents would see each other
    assert settled(arguments(), family="gemma2") == "flash_attention_2"  # which has no sdpa to stand in for it
    assert settled(arguments(), family="gemma3_text") == "flash_attention_2"
    assert settled(arguments(attn_implementation="sdpa")) == "sdpa"
    assert settled(KINDS["finetune.py"](packing=True)) is None


def test_family_without_flash_attention_is_not_counted_with_it(small, monkeypatch):
    model = model_of(small("llama"))
    monkeypatch.setattr(type(model), "_supports_flash_attn", False)
    arguments = PerformanceArguments(per_device_train_batch_size=1)
    settle_attention(arguments, "bf16", model)
    assert arguments.attn_implementation is None and model.config._attn_implementation == "sdpa"


def test_host_memory_is_what_loading_offload_and_a_saved_copy_need(folder, truths, monkeypatch):
    one = truths["1 block, recompute all, fp32, full, plain"]
    assert one["loaded"] == one["parameters"] * 2  # the config says bfloat16
    fields = {field.name for field in dataclasses.fields(PlannedStep)}
    step = PlannedStep(**{name: value for name, value in one.items() if name in fields})
    monkeypatch.setattr("tools.planner.planned_step.plan_step", lambda request: step)
    found = make_plan(request_of(folder, "finetune_performance.py", async_save=True), "copied").host
    assert found["weights mapped while loading (page cache)"] == one["loaded"] / GIB
    assert found["copy of the state while it is saved"] == one["parameters"] * 12 / GIB  # of both ranks together
    assert len(make_plan(request_of(folder, "finetune_performance.py", async_save=False), "not copied").host) == 2
    # While it is exported, in bf16: all of a model that is smaller than a file, and its largest block twice.
    block = max(256 * (256 + 128 * 2 + 256) + 3 * 256 * 704 + 2 * 256, 2 * VOCABULARY * 256 + 256)
    assert one["exported"] == one["loaded"] + 2 * 2 * block
    assert found["a file and blocks of the model while it is exported"] == one["exported"] / GIB
    adapter = request_of(folder, "finetune_performance.py", async_save=False, use_peft=True)
    assert len(make_plan(adapter, "adapter").host) == 1


def test_a_plan_is_printed_and_written(folder, tmp_path, capsys):
    plan.command([*words_of(folder, tmp_path), "--num_processes", "4", "--gpu_memory", "8GiB"], SAMPLE)
    shown = capsys.readouterr().out
    assert "8.00 GiB given: fits, 5." in shown and "4 ranks | 1 x 512 tokens x 1" in shown
    first = json.loads((tmp_path / "plan.json").read_text())
    assert first["step"]["peak"] == sum(first["step"]["parts"].values())
    assert first["needs_gib"] == pytest.approx(2.0 + first["step"]["peak"] / GIB)
    assert first["step"]["peak"] <= first["step"]["reserved"] and first["verdict"] == "fits"
    page = (tmp_path / "plan.md").read_text()
    assert "| logits and loss |" in page and (tmp_path / "plan.png").stat().st_size > 10_000


def words_of(folder, plan_dir):
    words = ["--model_name_or_path", folder, "--accelerate_config", CONFIGS / "default.yaml", "--plan_dir", plan_dir]
    return [*map(str, words), "--max_length", "512", "--gradient_accumulation_steps", "1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "h900"], "--gpu: found h900, allowed: b200"),
        (["--gpu_memory", "much"], "--gpu_memory: found much, allowed: as in 80GiB or 80GB"),
        (["--max", "max_length"], "--max needs --gpu_memory or --gpu"),
        (["--max", "lora_r", "--gpu", "l4"], "--max: found lora_r, allowed: per_device_train_batch_size, max_length"),
        (["--script", "train.py"], "--script: found train.py, allowed: finetune.py"),
        (["--num_processes", "0"], "--num_processes: found 0, allowed: 1 or more"),
        (["--max_lenght", "5"], "unknown argument --max_lenght (did you mean --max_length?)"),
        (["--script", "finetune_mem_limit.py", "--optim", "adamw_torch_8bit"], ""),
    ],
)
def test_what_cannot_be_planned_says_why(folder, tmp_path, words, message, capsys):
    with pytest.raises((ValueError, SystemExit)) as stopped:
        plan.command([*words_of(folder, tmp_path), *words], SAMPLE)
    assert message in str(stopped.value)
    assert message or "--optim adamw_torch_8bit: its compiled update" in capsys.readouterr().err


def test_capacity():
    assert capacity_gib("80GiB") == 80 and capacity_gib("80") == 80
    assert capacity_gib("80GB") == pytest.approx(74.5, abs=0.01)
    assert capacity_gib(None, "h100") == 79.1


def pretend(gib_of, speed_of=lambda request: 1.0, capacity=10.0):
    """A planner whose plans need what a function of the request says."""

    def planner(request, name):
        size = gib_of(request)
        if size is None:
            return None
        step = PlannedStep(peak=int(size * GIB), reserved=int(size * GIB), length=request.arguments["max_length"])
        return Plan(name, step, 0.0, capacity, {"step": 1 / speed_of(request)}, 1)

    return planner


def layout_gib(request):
    """12 GiB: half of it goes with the chunked loss, a third with the optimizer's offload, less with other changes."""
    size = 12.0 - 6.0 * (request.script == "finetune_mem_limit.py")
    size -= 4.0 * request.hook_config["hook_offload_optimizer"]
    return size - 0.5 * request.hook_config["hook_wrap_embeddings"]


def layout_speed(request):
    """Offload is the dearest."""
    return 1.0 - 0.1 * (request.script == "finetune_mem_limit.py") - 0.4 * request.hook_config["hook_offload_optimizer"]


def test_advice_names_the_fastest_change_that_fits(folder):
    request = request_of(folder, per_device_train_batch_size=1)
    planner = pretend(layout_gib, layout_speed)
    plans, advice = advise(request, planner(request, "as planned"), planner)
    assert advice == "cheapest single change that fits: finetune_mem_limit.py (loss in chunks) (saves 6.00 GiB)"
    assert {plan.name for plan in plans if plan.verdict == "fits"} == {
        "finetune_mem_limit.py (loss in chunks)",
        "hook_offload_optimizer: true",
    }


def test_advice_puts_changes_together_where_none_is_enough(folder):
    request = request_of(folder, per_device_train_batch_size=1)
    planner = pretend(layout_gib, layout_speed, capacity=3.0)
    _, advice = advise(request, planner(request, "as planned"), planner)
    chunks, offload = "finetune_mem_limit.py (loss in chunks)", "hook_offload_optimizer: true"
    assert advice == f"no single change fits; together these do: {chunks} + {offload} (2.00 GiB)"
    planner = pretend(layout_gib, layout_speed, capacity=1.0)
    assert advise(request, planner(request, "as planned"), planner)[1].startswith("no change here makes it fit")


def test_changes_are_those_not_made_yet(folder):
    made = dict(changes(request_of(folder, config="performance.yaml", gradient_accumulation_steps=4)))
    assert made["--per_device_train_batch_size 1"].arguments["gradient_accumulation_steps"] == 8
    names = list(made)
    assert names[:2] == ["recompute every block", "hook_wrap_blocks_per_unit: 1"]
    assert "hook_reduce_every_micro_batch: true" in names and "--per_device_train_batch_size 1" in names
    tight = request_of(folder, "finetune_mem_limit.py", "mem_limit.yaml", per_device_train_batch_size=1)
    assert [name for name, _ in changes(tight)] == [
        "fsdp_activation_checkpointing_offload: true",
        "fsdp_offload_params: true",
        "--num_processes 4",
    ]


@pytest.mark.parametrize(
    ("keys", "is_named", "is_not"),
    [
        ({"fsdp_auto_wrap_policy": "NO_WRAP"}, "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", "hook_wrap_embeddings"),
        ({"hook_checkpoint_mode": "selective"}, "recompute every block", "fsdp_activation_checkpointing_offload"),
        ({"hook_checkpoint_function": "a.py:b"}, "recompute every block", "hook_wrap_blocks_per_unit"),
        ({"mixed_precision": "fp16", "hook_param_dtype": "fp16"}, "hook_offload_optimizer", "fsdp_offload_params"),
    ],
)
def test_only_changes_that_the_yaml_allows_are_named(folder, keys, is_named, is_not):
    names = [name for name, _ in changes(request_of(folder, keys=keys))]
    assert any(name.startswith(is_named) for name in names) and not any(name.startswith(is_not) for name in names)


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 13, 60])
def test_search_finds_the_largest_batch_that_fits(folder, limit):
    planner = pretend(lambda request: request.arguments["per_device_train_batch_size"] / limit * 10.0)
    value, plan_of_it = largest(request_of(folder), "per_device_train_batch_size", planner)
    assert limit - limit // 16 <= value <= limit and plan_of_it.verdict == "fits"


def test_search_ends_where_the_model_or_the_script_does(folder):
    """Learned positions; flash attention of packed rows, in micro-batches of one row."""

    def planner(request, name):
        step = PlannedStep(peak=1, reserved=1, length=min(request.arguments["max_length"], 1024))
        return Plan(name, step, 0.0, 10.0, {"step": 1.0}, 1)

    assert largest(request_of(folder), "max_length", planner)[0] == 1024
    packed = request_of(folder, packing=True, attn_implementation="flash_attention_2")
    assert largest(packed, "per_device_train_batch_size", planner)[0] == 1


def test_search_says_that_nothing_fits(folder):
    assert largest(request_of(folder), "max_length", pretend(lambda request: 11.0)) == (0, None)


def test_step_time_is_what_arithmetic_says():
    """1 s of products at the full share, half a second of sending behind it, a copy of 25 GB on top."""
    gpu = GPUS["h100"]
    counts = {"forward flops": int(COMPUTE_SHARE * gpu.bf16), "evaluation flops": 10**18}
    counts |= {"all-gather calls": 0, "all-gather bytes": int(LINK_SHARE * gpu.link)}
    found = step_seconds(counts, gpu, 2, is_fp32=False, state=0, copied=25 * 10**9)
    assert found["computation"] == pytest.approx(1.0) and found["communication"] == pytest.approx(0.5)
    assert found["step"] == pytest.approx(2.0)
    assert step_seconds(counts, gpu, 1, is_fp32=False, state=0, copied=0)["communication"] == 0
