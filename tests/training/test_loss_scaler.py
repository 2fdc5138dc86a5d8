"""fp16's loss scaler in real runs without a GPU: scaling, overflow, the limit, resume (tests/scaler_on_cpu.py).

The runs compute in fp32, where gradients overflow too under a scale near 2**127; tests/scripts/test_exactness.py runs
the loop in fp16. Equal means equal to the last bit: a scale that is a power of two changes exponents alone.
"""

import json
import shutil
from functools import partial

import pytest
import torch
from in_process import finetune_in_process
from launching import RECIPES, small_model
from safetensors.torch import load_file
from saving.folder import read_manifest
from scaler_on_cpu import use_plain_optimizer, use_scaler

MODEL = small_model()
STEPS, RATE, SCALE, INTERVAL = 8, 1e-3, 2.0**123, 2
NAN_AT = 7
NUM_TENSORS = 3 * 9 + 3  # three blocks, embeddings, last norm, head


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """40 rows of the sample: five steps of 8 rows."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    lines = (RECIPES / "sample" / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:40]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run(rows, folder, before, *more, steps=STEPS, scale=SCALE):
    arguments = ["--model_name_or_path", MODEL, "--dataset_name", rows, "--max_steps", steps, "--save_steps", 1]
    arguments += ["--logging_steps", 1, "--report_to", "none", "--learning_rate", RATE, "--max_length", 128]
    arguments += ["--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2, "--output_dir", folder]
    arguments += ["--fp16_initial_scale", scale, *more]
    return finetune_in_process(arguments, folder.parent / f"{folder.name}.log", before=before)


def steps_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tensors_of(folder, step):
    """{(rank's file, name): tensor} of the weights, and of the optimizer's state, in a checkpoint."""
    parts = []
    for part in ("model", "optimizer"):
        files = sorted((folder / f"checkpoint-{step}" / part).iterdir())
        parts.append({(path.name, name): value for path in files for name, value in load_file(path).items()})
        assert len(files) == 2 and len(parts[-1]) >= 2 * NUM_TENSORS
    return parts


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def scaled(rows, tmp_path_factory):
    """A run that overflows at first, whose scale grows after two good steps, and whose loss is nan in a later step."""
    folder = tmp_path_factory.mktemp("scaled") / "run"
    before = partial(use_scaler, growth_interval=INTERVAL, nan=(NAN_AT,))
    done = run(rows, folder, before, "--on_non_finite", "skip")
    assert not any(done.codes), done.output[-3000:]
    return folder, done.output


def test_scaled_steps_are_the_unscaled_ones(rows, tmp_path):
    """Loss, norm before clipping, and after three steps every weight and both moments, which hold the gradients."""
    for name, before in (("plain", use_plain_optimizer), ("scaled", use_scaler)):
        done = run(rows, tmp_path / name, before, steps=3, scale=2.0**16)
        assert not any(done.codes), done.output[-3000:]
    plain, scaled = steps_of(tmp_path / "plain"), steps_of(tmp_path / "scaled")
    assert len(plain) == 3 and "loss_scale" not in plain[0]
    assert [(row["loss_scale"], row["skipped_steps"]) for row in scaled] == [(2.0**16, 0)] * 3
    for name in ("loss", "grad_norm", "learning_rate"):
        assert [row[name] for row in scaled] == [row[name] for row in plain], name
    assert all(map(same, tensors_of(tmp_path / "scaled", 3), tensors_of(tmp_path / "plain", 3)))


def test_steps_that_overflow_change_nothing_but_the_scale_and_good_ones_raise_it_again(scaled):
    """Held against the rule written out: half after a skip, double after two good steps in a row."""
    folder, _ = scaled
    scale, good_in_a_row, good, skipped = SCALE, 0, 0, []
    for row in steps_of(folder):
        step = row["step"]
        assert row["learning_rate"] == pytest.approx(RATE * (1 - good / STEPS), rel=1e-9)  # of good steps alone
        if row["grad_norm"] is None or row["loss"] is None:  # null: not finite
            skipped.append(step)
            scale, good_in_a_row = scale / 2, 0
        else:
            good, good_in_a_row = good + 1, good_in_a_row + 1
            if good_in_a_row == INTERVAL:
                scale, good_in_a_row = scale * 2, 0
        assert (row["loss_scale"], row["skipped_steps"]) == (scale, len(skipped)), row
        manifest = read_manifest(folder / f"checkpoint-{step}")
        assert manifest["schedule_steps"] == good
        assert (manifest["scaler"]["scale"], manifest["scaler"]["_growth_tracker"]) == (scale, good_in_a_row)
        if step > 1:
            is_as_before = [*map(same, tensors_of(folder, step), tensors_of(folder, step - 1))]
            assert is_as_before == [step in skipped] * 2, step
    assert step == STEPS and skipped[0] == 1 and NAN_AT in skipped and 1 < len(skipped) < STEPS - 2
    slices = {}
    for (_, name), value in tensors_of(folder, 1)[0].items():
        slices.setdefault(name, []).append(value)
    loaded = {name: value.float() for name, value in load_file(MODEL / "model.safetensors").items()}
    assert same({name: torch.cat(values) for name, values in slices.items()}, loaded)


def test_step_whose_loss_is_nan_is_skipped_under_the_scaler_too_and_the_next_one_goes_on(scaled):
    folder, output = scaled
    row, after = steps_of(folder)[NAN_AT - 1 :]
    assert row["loss"] is None and row["label_tokens"] == 0 and after["loss"] is not None
    assert output.count(f"step {NAN_AT}: loss is nan; skipped on every rank ({row['skipped_steps']} so far)") == 1


def test_resumed_run_goes_on_with_the_scaler_that_was_saved(scaled, rows, tmp_path):
    """From a checkpoint between two good steps: the scale grows when it would have."""
    whole, _ = scaled
    scalers = {step: read_manifest(whole / f"checkpoint-{step}")["scaler"] for step in range(1, STEPS + 1)}
    step = next(step for step, scaler in scalers.items() if scaler["_growth_tracker"] == 1)
    assert scalers[step]["scale"] < scalers[step + 1]["scale"] and step + 1 < NAN_AT
    folder = tmp_path / "run"
    shutil.copytree(whole / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    before = partial(use_scaler, growth_interval=INTERVAL, nan=(NAN_AT - step,))
    done = run(rows, folder, before, "--on_non_finite", "skip", "--resume_from_checkpoint", "latest", scale=2.0**10)
    assert not any(done.codes), done.output[-3000:]
    expected, found = steps_of(whole)[step:], steps_of(folder)
    assert len(found) == STEPS - step
    for name in ("step", "loss", "grad_norm", "learning_rate", "loss_scale"):
        assert [row[name] for row in found] == [row[name] for row in expected], name
    assert read_manifest(folder / f"checkpoint-{STEPS}")["scaler"] == scalers[STEPS]
    assert all(map(same, tensors_of(folder, STEPS), tensors_of(whole, STEPS)))


def test_overflow_of_one_ranks_slice_is_skipped_on_all_until_the_limit_ends_the_run(rows, tmp_path):
    folder = tmp_path / "run"
    done = run(rows, folder, partial(use_scaler, infinite=(2, 3, 4), limit=2), scale=2.0**16)
    assert done.codes == [1, 1], done.output[-3000:]
    stopped = "step 4: grad_norm is inf after 2 skipped in a row; stopped before the weights changed"
    assert done.output.count(f"Error: {stopped}") == 1
    assert [(row["skipped_steps"], row["loss_scale"]) for row in steps_of(folder)] == [
        (0, 2.0**16),
        (1, 2.0**15),
        (2, 2.0**14),
    ]
    first, *skipped = (tensors_of(folder, step) for step in (1, 2, 3))
    assert all(same(one, other) for tensors in skipped for one, other in zip(tensors, first))
    assert not (folder / "checkpoint-4").exists()
