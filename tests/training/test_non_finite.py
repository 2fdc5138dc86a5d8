"""A step that is not finite: named to module, rank and row, saved, replayed; stopped, or skipped as if it never was.

The faults lie in the model's files or in its own code, and the runs are those of the real scripts in forked ranks.
"""

import dataclasses
import json
import re
import shutil
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from in_process import finetune_in_process
from launching import CONFIGS, RECIPES, small_model
from rows.batches import RankSteps, Share, shuffled_order
from safetensors.torch import load_file, save_file
from saving.folder import START, read_manifest
from tools.diagnosis.finite_hooks import find_non_finite
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import non_finite
from training.arguments import KINDS
from training.evaluation import say_non_finite
from training.non_finite import MAX_SKIPPED_STEPS, NonFiniteSteps
from transformers import AutoTokenizer

SAMPLE, MODEL = RECIPES / "sample", small_model()
ROWS, MICRO, ACCUMULATION, SEED = 40, 2, 2, 42


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """40 rows of the sample: five steps of 8 rows."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    lines = (SAMPLE / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:ROWS]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run(rows, model, folder, *more, steps=4, **kwargs):
    arguments = ["--model_name_or_path", model, "--dataset_name", rows, "--max_steps", steps, "--logging_steps", 1]
    arguments += ["--report_to", "none", "--learning_rate", 1e-3, "--max_length", 128, "--output_dir", folder]
    arguments += ["--per_device_train_batch_size", MICRO, "--gradient_accumulation_steps", ACCUMULATION, *more]
    return finetune_in_process(arguments, folder.parent / f"{folder.name}.log", **kwargs)


def changed_model(folder, change):
    """The model with other values in its file."""
    shutil.copytree(MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def metrics(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in found if "loss" in row}


@pytest.fixture(scope="module")
def overflowing(rows, tmp_path_factory):
    """A run of a model whose third block overflows in every step; (model, folder, how it ended)."""
    folder = tmp_path_factory.mktemp("overflowing")

    def change(weights):
        weights["model.layers.2.mlp.down_proj.weight"].fill_(3e38)

    model = changed_model(folder / "model", change)
    bf16 = CONFIGS / "default.yaml"
    return model, folder / "run", run(rows, model, folder / "run", "--on_non_finite", "skip", steps=2, config=bf16)


# Which kind of value an overflow gives, inf or nan, is the processor's choice.
DOWN = re.compile(
    r"forward of model\.layers\.2\.mlp\.down_proj: ([\d,]+) nan and ([\d,]+) inf among its ([\d,]+) values"
)


def test_module_that_overflows_is_named_exactly_once_with_the_rows_of_each_rank(overflowing):
    _, folder, done = overflowing
    assert not any(done.codes), done.output[-3000:]
    lines = [line for line in done.output.splitlines() if "forward of" in line]
    assert len(lines) == 2  # of the first skipped step alone
    for rank, line in enumerate(lines):
        first, second = rows_of(rank, 1)[0]
        counts = [int(count.replace(",", "")) for count in DOWN.search(line).groups()]
        assert line.startswith(f"- rank {rank}: forward of") and 0 < counts[0] + counts[1] <= counts[2]
        assert f"| rows {first}, {second} of the data" in line
        assert "its inputs are finite" in line and "its own" not in line
    for step in (1, 2):
        assert done.output.count(f"step {step}: loss is nan; skipped on every rank ({step} so far)") == 1
        row = metrics(folder)[step]
        assert row["loss"] is None and row["skipped_steps"] == step and row["label_tokens"] == 0
        assert row["learning_rate"] == 1e-3
    assert "no step before it was finite" in done.output and "bf16: lower --learning_rate" in done.output
    facts = json.loads((folder / "non_finite" / "batch.json").read_text())
    assert facts["step"] == 1 and facts["rows"] == [rows_of(0, 1), rows_of(1, 1)]


def rows_of(rank, step):
    """The row numbers of a rank's micro-batches in a step, from 1, of the first epoch."""
    return RankSteps(shuffled_order(ROWS, SEED, 0), Share(MICRO, ACCUMULATION, rank, 2))[step - 1]


def replayed(path, tmp_path, *more, world_size=2):
    """recipes/replay.py on a saved step."""
    options = {"script": "replay", "world_size": world_size, "config": CONFIGS / "default.yaml"}
    return finetune_in_process([path, *more], tmp_path / "replay.log", **options)


@pytest.mark.parametrize(
    ("script", "saved", "world_size", "ranks"),
    [
        ("finetune", "", 2, {"0": 0, "1": 1}),
        ("finetune_performance", "", 1, {"0": 0}),
        ("finetune_mem_limit", "rank-1.safetensors", 2, {"0, 1": 1}),
    ],
)
def test_replay_finds_the_same_and_trains_nothing(overflowing, rows, tmp_path, script, saved, world_size, ranks):
    """`ranks`: of the replay, and which saved rank's finding they repeat."""
    folder = tmp_path / "run"
    shutil.copytree(overflowing[1], folder)
    facts = json.loads((folder / "run.json").read_text())
    facts["command"][0] = f"{script}.py"
    kind = KINDS[f"{script}.py"]
    own = {field.name: getattr(kind(), field.name) for field in dataclasses.fields(kind)}
    facts["arguments"] = {**own, **facts["arguments"]}
    (folder / "run.json").write_text(json.dumps(facts))
    metrics_before = (folder / "metrics.jsonl").read_text()
    done = replayed(folder / "non_finite" / saved, tmp_path, world_size=world_size)
    assert not any(done.codes) and done.output.count("replay of step 1") == 1, done.output[-3000:]
    was_found = json.loads((folder / "non_finite" / "batch.json").read_text())["found"][1:]
    found = [line for line in done.output.splitlines() if DOWN.search(line)]
    expected = [was_found[rank].replace(f"rank {rank}:", f"- rank {now}:") for now, rank in ranks.items()]
    assert found == expected
    assert not (folder / "non_finite" / "model").exists() and (folder / "metrics.jsonl").read_text() == metrics_before


def test_replay_with_weights_that_are_well_says_so(overflowing, rows, tmp_path):
    done = replayed(overflowing[1] / "non_finite", tmp_path, "--model_name_or_path", MODEL)
    assert not any(done.codes) and done.output.count("all finite") == 1 and "forward of" not in done.output


def test_replay_of_a_damaged_file_ends_every_rank_with_one_message(overflowing, rows, tmp_path):
    shutil.copytree(overflowing[1], tmp_path / "run")
    (tmp_path / "run" / "non_finite" / "rank-1.safetensors").write_bytes(b"torn")
    done = replayed(tmp_path / "run" / "non_finite", tmp_path)
    assert done.codes == [1, 1] and done.output.count("Error: rank 1: ") == 1
    assert "replay.py takes the folder non_finite of a run" in done.output


def test_held_out_row_that_alone_is_not_finite_is_named(rows, tmp_path):
    """Its token's embedding is infinite, and no training row holds it."""
    tokenizer, data = AutoTokenizer.from_pretrained(MODEL), tmp_path / "data"
    data.mkdir()
    shutil.copy(rows, data / "train.jsonl")
    lines = (SAMPLE / "data" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    lines[2] = lines[2].replace("I w", "^ I w")
    (data / "test.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (token,) = tokenizer("^")["input_ids"]
    assert token in tokenizer(lines[2])["input_ids"]
    assert not any(token in tokenizer(line)["input_ids"] for line in rows.read_text(encoding="utf-8").splitlines())

    def change(weights):
        weights["model.embed_tokens.weight"][token] = torch.inf

    model = changed_model(tmp_path / "model", change)
    done = run(data, model, tmp_path / "out", "--per_device_eval_batch_size", 1, "--max_new_tokens", 1, steps=2)
    assert not any(done.codes), done.output[-3000:]
    said = "note: the evaluation's loss is not finite in 1 of 4 batches (rank 0, test rows 2)"
    assert done.output.count(said) == done.output.count("the evaluation's loss") == 2
    losses = {step: row["loss"] for step, row in metrics(tmp_path / "out").items()}
    assert set(losses) == {1, 2} and None not in losses.values()


@pytest.mark.parametrize(
    ("rows", "said"), [([[0, 1], [4]], "look at the weights"), ([[0, 1], [2]], "rank 0, test rows 0, 1")]
)
def test_rows_are_not_blamed_for_weights_though_a_filler_has_no_loss(capsys, monkeypatch, rows, said):
    """4 test rows; the number after them is a filler's."""
    monkeypatch.setattr("training.evaluation.dist.get_world_size", lambda: 1)
    monkeypatch.setattr("training.evaluation.dist.all_gather_object", lambda ranks, mine: ranks.__setitem__(0, mine))
    losses = [torch.tensor([torch.nan, 7.0]), torch.tensor([0.0, 0.0 if rows[1] == [4] else 3.0])]
    say_non_finite(losses, SimpleNamespace(batch_sampler=rows), SimpleNamespace(is_main_process=True))
    assert said in capsys.readouterr().out


def token_of_one_row(rows, rank, step):
    """(a token, its row): it is in that row alone, which this rank takes in this step."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    chats = [json.loads(line)["messages"] for line in rows.read_text().splitlines()]
    ids = [set(tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]) for chat in chats]
    counts = Counter(token for row in ids for token in row)
    mine = [row for micro_batch in rows_of(rank, step) for row in micro_batch]
    return next((token, row) for row in mine for token in sorted(ids[row]) if counts[token] == 1)


@pytest.fixture(scope="module")
def one_bad_row(rows, tmp_path_factory):
    """A model whose embedding is nan for a token that only one row holds, which rank 1 takes in step 2."""
    token, row = token_of_one_row(rows, rank=1, step=2)

    def change(weights):
        weights["model.embed_tokens.weight"][token] = torch.nan

    return changed_model(tmp_path_factory.mktemp("one_bad_row") / "model", change), row


def test_skipped_step_is_one_that_never_was(rows, one_bad_row, tmp_path):
    """The reference is put together by hand: the checkpoint before the step, moved to the rows behind it. Equal to the
    last bit, weights, optimizer state and schedule, though the step ran twice for its diagnosis."""
    model, row = one_bad_row
    skipping, by_hand = tmp_path / "skipping", tmp_path / "by_hand"
    done = run(rows, model, skipping, "--on_non_finite", "skip", "--save_steps", 1, steps=3)
    assert not any(done.codes), done.output[-3000:]
    (line,) = [line for line in done.output.splitlines() if "forward of" in line]
    assert "rank 1: forward of model.embed_tokens" in line and "its own weight is not finite" in line
    assert line.endswith(f"| row {row} of the data, counted from 0")
    assert "the last finite one was step 1: loss " in done.output
    found = metrics(skipping)
    assert found[2]["loss"] is None and [found[step]["skipped_steps"] for step in (1, 2, 3)] == [0, 1, 1]
    assert found[1]["learning_rate"] > found[2]["learning_rate"] == found[3]["learning_rate"]
    assert "did not change" not in done.output

    shutil.copytree(skipping / "checkpoint-1", by_hand / "checkpoint-2")
    manifest = json.loads((by_hand / "checkpoint-2" / "manifest.json").read_text())
    assert manifest["schedule_steps"] == 1 and manifest["rows_seen"] == 8
    manifest |= {"step": 2, "rows_seen": 16}
    del manifest["skipped_steps"], manifest["skipped_in_a_row"]  # a checkpoint from before they were kept
    (by_hand / "checkpoint-2" / "manifest.json").write_text(json.dumps(manifest))
    done = run(rows, model, by_hand, "--save_steps", 1, "--resume_from_checkpoint", "latest", steps=3)
    assert not any(done.codes), done.output[-3000:]
    expected = metrics(by_hand)
    assert all(found[3][name] == expected[3][name] for name in ("loss", "grad_norm", "learning_rate"))
    checked = 0
    for path in (by_hand / "checkpoint-3").glob("*/*.safetensors"):
        other = load_file(skipping / path.relative_to(by_hand))
        for name, tensor in load_file(path).items():
            assert torch.equal(tensor.flatten().view(torch.uint8), other[name].flatten().view(torch.uint8)), name
            checked += 1
    assert checked > 100
    assert read_manifest(by_hand / "checkpoint-3")["skipped_steps"] == 0


def test_resumed_run_goes_on_counting_what_was_skipped(rows, one_bad_row, tmp_path):
    model, _ = one_bad_row
    words = ["--on_non_finite", "skip", "--save_steps", 1]
    done = run(rows, model, tmp_path / "run", *words, steps=2)
    assert not any(done.codes), done.output[-3000:]
    done = run(rows, model, tmp_path / "run", *words, "--resume_from_checkpoint", "latest", steps=3)
    assert not any(done.codes), done.output[-3000:]
    manifests = [read_manifest(tmp_path / "run" / f"checkpoint-{step}") for step in (1, 2, 3)]
    counts = [(manifest["skipped_steps"], manifest["skipped_in_a_row"]) for manifest in manifests]
    assert counts == [(0, 0), (1, 1), (1, 0)] and metrics(tmp_path / "run")[3]["skipped_steps"] == 1


def test_bad_row_among_packed_ones_stops_the_run_with_the_documents_named(rows, one_bad_row, tmp_path):
    """Two documents per packed row, one row per micro-batch."""
    model, row = one_bad_row
    options = {"script": "finetune_performance", "config": "performance"}
    done = run(rows, model, tmp_path / "run", "--per_device_train_batch_size", 1, steps=9, **options)
    assert done.codes == [1, 1], done.output[-3000:]
    assert len(re.findall(r"Error: step \d: loss is nan; stopped before the weights changed", done.output)) == 1
    (line,) = [line for line in done.output.splitlines() if "forward of model.embed_tokens" in line]
    (documents,) = re.findall(r"\| row (\[.*\]) of the data", line)
    assert row in json.loads(documents) and len(json.loads(documents)) <= 3
    assert re.search(r"rank [01]: forward", line)


def test_skipping_ends_after_so_many_steps_in_a_row(monkeypatch):
    monkeypatch.setattr(non_finite, "stop_together", nullcontext)
    monkeypatch.setattr(NonFiniteSteps, "explain", lambda *_: ["found"])
    accelerator = SimpleNamespace(scaler=None, optimizer_step_was_skipped=False)
    arguments = SimpleNamespace(on_non_finite="skip", seed=0, output_dir="")
    said = []
    config = SimpleNamespace(hook_param_dtype="bf16")
    guard = NonFiniteSteps(accelerator, None, arguments, config, state=START, say=said.append)
    for step in range(1, MAX_SKIPPED_STEPS + 1):
        assert not guard.allows(step, [], 3.0, 7, float("nan"))
        assert guard.count(False) == {"skipped_steps": step, "skipped_in_a_row": step}
    assert guard.allows(51, [], 3.0, 7, 1.0)
    assert guard.count(True) == {"skipped_steps": MAX_SKIPPED_STEPS, "skipped_in_a_row": 0}
    for step in range(52, 52 + MAX_SKIPPED_STEPS):
        assert not guard.allows(step, [], float("inf"), 7, 1.0)
        state = guard.count(False)
    assert said[0] == "step 1: grad_norm is nan; skipped on every rank (1 so far)\n- found"
    assert len(said) == 2 * MAX_SKIPPED_STEPS and not any("found" in line for line in said[1:])
    with pytest.raises(ValueError, match="step 102: loss is inf after 50 skipped in a row; stopped before"):
        guard.allows(102, [], float("inf"), 7, 1.0)
    guard = NonFiniteSteps(accelerator, None, arguments, config, state=state, say=said.append)  # resumed
    with pytest.raises(ValueError, match="step 103: loss is inf after 50 skipped in a row; stopped before"):
        guard.allows(103, [], float("inf"), 7, 1.0)


THEIR_MODEL = """
from transformers import LlamaForCausalLM


def add_distance(module, args, output):
    return output + (args[0] - args[0].detach()).pow(2).sum(-1, keepdim=True).sqrt()


class TheirModel(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[1].mlp.register_forward_hook(add_distance)
"""


def test_backward_that_alone_is_not_finite_is_named_under_recompute_and_chunks(rows, tmp_path):
    """The root of a distance that is zero: finite, and its slope is not (a hook in the model's own code)."""
    model = tmp_path / "theirs"
    shutil.copytree(MODEL, model)
    (model / "modeling_theirs.py").write_text(THEIR_MODEL)
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["TheirModel"], "auto_map": {"AutoModelForCausalLM": "modeling_theirs.TheirModel"}}
    (model / "config.json").write_text(json.dumps(config))
    options = {"script": "finetune_mem_limit", "config": "mem_limit"}
    done = run(rows, model, tmp_path / "run", "--trust_remote_code", **options)
    assert done.codes == [1, 1], done.output[-3000:]
    assert done.output.count("Error: step 1: grad_norm is nan; stopped before the weights changed") == 1
    lines = [line for line in done.output.splitlines() if "backward of" in line]
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert line.startswith(f"- rank {rank}: backward of model.layers.1.mlp: ")
        assert "first parameter whose gradient is not finite: model.layers.1.post_attention_layernorm.weight" in line


class Block(nn.Module):
    """Two layers, and between them code of its own."""

    def __init__(self, between):
        super().__init__()
        self.first, self.second, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between

    def forward(self, x, mask=None):
        return self.second(self.between(self.first(x)))


class Model(nn.Module):
    """Blocks that recompute; the rows of `input` are the batch."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, input):
        mask = torch.full((4, 4), -torch.inf)
        for block in self.blocks:
            input = checkpoint(block, input, mask, use_reentrant=False)
        return input


def found_in(monkeypatch, *between, steps=1, bad_row=None, scale=1.0):
    """The finding in a model of blocks with this code; `steps` micro-batches of three rows, of which one may be bad."""
    monkeypatch.setattr("tools.diagnosis.finite_hooks.dist.get_world_size", lambda: 1)
    torch.manual_seed(0)
    model = Model(*map(Block, between))

    def step():
        total = torch.zeros(())
        for micro in range(steps):
            rows = torch.randn(3, 4)
            if bad_row is not None and micro == steps - 1:
                rows[bad_row] = 1e30
            loss = model(rows).sum() * scale
            loss.backward()
            total += loss.detach()
        return total

    finding, batch_rows = find_non_finite(model, step)
    assert batch_rows == [3] * steps
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return finding


def test_healthy_step_has_no_finding_though_its_mask_holds_minus_infinity(monkeypatch):
    assert found_in(monkeypatch, torch.relu, torch.tanh, steps=3) is None


def test_code_between_two_modules_is_named_with_the_row_of_the_micro_batch(monkeypatch):
    """exp overflows for the row whose values are large, of either sign."""
    finding = found_in(monkeypatch, torch.tanh, lambda x: x.abs().exp(), torch.tanh, steps=1)
    assert finding is None
    finding = found_in(monkeypatch, torch.relu, lambda x: x.abs().exp(), torch.tanh, steps=3, bad_row=1)
    assert finding.what.startswith("forward of blocks.1, its own code before blocks.1.second: 0 nan and 4 inf")
    assert (finding.call, finding.rows) == (2, [1])


class Slope(torch.autograd.Function):
    """The identity; its gradient is not."""

    @staticmethod
    def forward(context, x, factor):
        context.factor = factor
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * context.factor, None


def test_backward_is_named_by_its_innermost_module_and_first_parameter(monkeypatch):
    nan_slope = lambda x: Slope.apply(x, torch.tensor([1.0, torch.nan, 1.0, 1.0]))  # noqa: E731
    finding = found_in(monkeypatch, torch.tanh, nan_slope, torch.tanh)
    assert finding.what.startswith(
        "backward of blocks.1: the gradient of its output is finite, that of its input is not"
    )
    assert "first parameter whose gradient is not finite: blocks.1.first." in finding.what


def test_gradient_of_a_parameter_alone_is_named(monkeypatch):
    """A layer whose input is large and whose weight is small: only the product of input and gradient overflows."""
    monkeypatch.setattr("tools.diagnosis.finite_hooks.dist.get_world_size", lambda: 1)
    layer = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(nn.Linear(4, 4), layer)
    layer.weight.data.fill_(1e-30)
    rows = torch.randn(3, 4)

    def step():
        hidden = model[0](rows) * 0
        loss = (model(rows) * 1e38).sum()
        loss.backward()
        return loss.detach() + hidden.sum().detach()

    model[0].weight.data.fill_(1e3)
    finding, _ = find_non_finite(model, step)
    assert finding.what.startswith("backward of 1: the gradient of its output is finite")
    assert finding.what.endswith("first parameter whose gradient is not finite: 1.weight")


def test_norm_that_alone_overflows_is_named_by_the_largest_gradient(monkeypatch):
    finding = found_in(monkeypatch, torch.tanh, scale=1e21)
    assert finding.what.startswith("every gradient is finite, but the norm of all overflows: blocks.0.")
    assert not finding.is_local


def test_loss_that_alone_is_not_finite_is_told_from_the_model(monkeypatch):
    finding = found_in(monkeypatch, torch.tanh, scale=float("inf"))
    assert finding.what.startswith("the loss is ") and finding.call == 0
