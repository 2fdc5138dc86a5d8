"""A checkpoint is whole or absent, and a run that goes on from one is the run that was never stopped.

Runs of the real script in forked ranks (in_process.py). "Equal" without a tolerance means equal to the last bit. At
another world size rows meet in other micro-batches: fp32 without dropout, 1e-6 for the first step's loss and 1e-5 for
five steps (DESIGN section 5), since AdamW's first steps amplify rounding.
"""

import builtins
import contextlib
import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import saving.folder
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from in_process import Faults, Run, finetune_in_process
from launching import (
    CONFIGS,
    RECIPES,
    ROOT,
    Patience,
    clean_environment,
    in_fp32,
    part_of_sample,
    small_model,
    wait_for_end,
)
from rows import streaming
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from saving import checkpoint as checkpoint_module
from saving.checkpoint import CheckpointWriter, Written, check_whole
from saving.folder import best_checkpoint, check_files, complete_checkpoints, open_run, read_manifest, sha256
from saving.resume import agreed, compare_runs, load_tensors
from saving.state import LiveState, training_tensors
from tiny_models import tiny_llama
from tools.proof.cpu_ranks import run_on_cpu_ranks
from torch.distributed.fsdp import fully_shard

SAMPLE, MODEL = RECIPES / "sample", small_model()
STEPS = 8


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """40 rows of the sample: an epoch border inside of eight steps."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    lines = (SAMPLE / "data" / "train.jsonl").read_text(encoding="utf-8").splitlines()[:40]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def common(rows, *more, save_steps=2, steps=STEPS, model=MODEL):
    arguments = ["--model_name_or_path", model, "--dataset_name", rows, "--max_steps", steps, "--logging_steps", 1]
    arguments += ["--save_steps", save_steps, "--report_to", "none", "--learning_rate", 1e-3, "--max_length", 128]
    return [*arguments, "--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2, *more]


def steps_of(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["loss"], row["grad_norm"], row["learning_rate"]) for row in found if "loss" in row}


def weights_of(folder):
    (path,) = (folder / "model").glob("*.safetensors")
    return load_file(path)


def same_weights(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def succeeded(done):
    assert not any(done.codes), done.output[-3000:]
    return done.output


@pytest.fixture(scope="module")
def whole(rows, tmp_path_factory):
    """Full fine-tuning that is never stopped: checkpoints at 2, 4, 6, 8."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    succeeded(finetune_in_process([*common(rows), "--output_dir", folder], folder.parent / "log"))
    return folder


def resumed(whole, step, tmp_path, arguments, **kwargs):
    """A copy of one checkpoint of a run, in a folder of its own, run to the end."""
    folder = tmp_path / f"from-{step}"
    folder.mkdir()
    shutil.copytree(whole / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    more = ["--output_dir", folder, "--resume_from_checkpoint", "latest"]
    return folder, finetune_in_process([*arguments, *more], tmp_path / "log", **kwargs)


def assert_same_run(folder, whole, first_step):
    expected, found = steps_of(whole), steps_of(folder)
    assert set(found) == set(range(first_step + 1, max(expected) + 1))
    assert {step: expected[step] for step in found} == found
    assert same_weights(weights_of(folder), weights_of(whole))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "more"),
    [
        ("default", ["--use_peft", "--lora_dropout", 0.1, "--packing", "--per_device_train_batch_size", 1]),
        ("mem_limit", ["--group_by_length", "--lr_scheduler_type", "cosine", "--dataloader_num_workers", 1]),
        (CONFIGS / "performance.yaml", ["--use_peft", "--lora_dropout", 0.1, "--streaming"]),  # in bf16
    ],
    ids=["lora-dropout-packed", "full-grouped", "lora-dropout-streamed"],
)
def test_run_that_was_stopped_again_and_again_equals_one_that_never_was(rows, tmp_path, config, more):
    arguments = common(rows, *more)
    one, other = tmp_path / "one", tmp_path / "other"
    succeeded(finetune_in_process([*arguments, "--output_dir", one], tmp_path / "log", config=config))
    epochs = [json.loads(line).get("epoch") for line in (one / "metrics.jsonl").read_text().splitlines()]
    assert 0 in epochs and max(e for e in epochs if e is not None) >= 1  # it crosses an epoch border
    shutil.copytree(one / "checkpoint-2", other / "checkpoint-2")
    arguments += ["--output_dir", other, "--resume_from_checkpoint", "latest"]
    for stop_after in (4, 6, None) if "--streaming" in more else (4, None):
        run = Run(arguments, tmp_path / "log2", config=config)
        if stop_after:
            run.wait_for(f"checkpoint-{stop_after} (")
            for process in run.ranks:
                process.kill()
        done = run.wait()
    succeeded(done)
    assert steps_of(other) == {step: row for step, row in steps_of(one).items() if step > 2}
    assert same_weights(weights_of(other), weights_of(one))


def small_windows():
    """Streams of windows that a few steps use up."""
    streaming.WINDOW = 7


@pytest.mark.parametrize(
    ("before", "after", "scenario", "more"),
    [(2, 1, "default", []), (1, 3, "performance", []), (2, 3, "default", ["--streaming"])],
)
def test_other_world_size_and_wrapping_continue_the_same_rows(rows, tmp_path, before, after, scenario, more):
    """12 rows a step on 1, 2 or 3 ranks."""
    arguments = [*common(rows, steps=7), "--per_device_train_batch_size", 1, *more]
    one = tmp_path / "one"
    share, windows = ["--gradient_accumulation_steps", 12 // before, "--output_dir", one], {"before": small_windows}
    succeeded(finetune_in_process([*arguments, *share], tmp_path / "log", world_size=before, **windows))
    options = {"world_size": after, "config": scenario, **windows}
    arguments += ["--gradient_accumulation_steps", 12 // after]
    folder, done = resumed(one, 2, tmp_path, arguments, **options)
    assert f"saved by {before} ranks, resumed by {after}" in succeeded(done)
    if more:  # step 2 ends 24 rows on, in the fourth window
        stream = read_manifest(one / "checkpoint-2")["stream"]
        assert (stream["window"], stream["place"]["rows"], stream["taken"]) == (3, 21, 3)
    expected, found = steps_of(one), steps_of(folder)
    assert set(found) == {3, 4, 5, 6, 7}
    for step, (loss, norm, rate) in found.items():
        tolerance = 1e-6 if step == 3 else 1e-5
        assert loss == pytest.approx(expected[step][0], rel=tolerance), step
        assert norm == pytest.approx(expected[step][1], rel=tolerance * 10), step  # clipping divides by it
        assert rate == expected[step][2]


def test_only_a_checkpoint_of_an_evaluated_step_holds_its_loss_and_a_refused_resume_changes_nothing(tmp_path):
    data, folder = part_of_sample(tmp_path / "data", 4), tmp_path / "run"
    arguments = [*common(data, save_steps=1, steps=4), "--eval_steps", 2, "--output_dir", folder]
    succeeded(finetune_in_process(arguments, tmp_path / "log"))
    has_loss = {path.name: "eval_loss" in read_manifest(path) for path in complete_checkpoints(folder)}
    assert has_loss == {"checkpoint-1": False, "checkpoint-2": True, "checkpoint-3": False, "checkpoint-4": True}
    before = (folder / "metrics.jsonl").read_bytes()
    for step in (3, 4):
        shutil.rmtree(folder / f"checkpoint-{step}")
    refused = Run([*arguments, "--resume_from_checkpoint", "latest", "--seed", 7], tmp_path / "log").wait()
    assert refused.codes == [1, 1] and "--seed was 42, now 7" in refused.output
    assert (folder / "metrics.jsonl").read_bytes() == before


def kill_points(rows, tmp_path, folder):
    """Four steps that are never stopped: what each rank does on disk in its two saves."""
    faults = Faults((0, 1), str(folder / "checkpoint-"), counts=str(tmp_path / "events"))
    arguments = [*common(rows, steps=4), "--save_total_limit", 1, "--output_dir", folder]
    succeeded(finetune_in_process(arguments, tmp_path / "log", faults=faults))
    return [(tmp_path / f"events-{rank}").read_text().splitlines() for rank in (0, 1)]


def killed_and_resumed(rows, whole, tmp_path, rank, event, *more):
    """Kill one rank at its n-th thing on disk, then go on: the end is that of the run that was never stopped. Returns
    the steps of the checkpoints that the kill left."""
    folder = tmp_path / f"killed-{rank}-{event}"
    faults = Faults((rank,), str(folder / "checkpoint-"), kill_at=event)
    arguments = [*common(rows, steps=4), "--save_total_limit", 1, "--output_dir", folder, *more]
    done = Run(arguments, tmp_path / "log", faults=faults).wait()
    assert done.codes[rank] == -signal.SIGKILL, done.output[-2000:]
    assert all(done.codes)
    steps = [read_manifest(checkpoint)["step"] for checkpoint in complete_checkpoints(folder)]
    assert steps in ([], [2], [2, 4], [4])
    arguments += ["--resume_from_checkpoint", "latest", "--check_hashes"] if steps else []
    succeeded(finetune_in_process(arguments, tmp_path / "log"))
    assert steps_of(folder) == steps_of(whole)
    assert same_weights(weights_of(folder), weights_of(whole))
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-4"]  # no litter
    shutil.rmtree(folder)
    return steps


@pytest.fixture(scope="module")
def four_steps(rows, tmp_path_factory):
    """The folder of the run that is never stopped, and what each rank does on disk."""
    folder = tmp_path_factory.mktemp("four")
    return folder / "whole", kill_points(rows, folder, folder / "whole")


def test_every_file_is_synced_before_the_name_that_makes_it_a_checkpoint(four_steps):
    _, (first, second) = four_steps
    rename = first.index("replace 2.incomplete")
    written = {event.split()[1] for event in first[:rename] + second if event.startswith("write 2.")}
    synced = {event.split()[1] for event in first[:rename] + second if event.startswith("fsync 2.")}
    assert written <= synced and len(written) == 7
    assert first.index("fsync 2.incomplete/manifest.json") < rename
    assert first.index("replace 4.incomplete") < first.index("replace 2")  # the old one goes after the new one is there


@pytest.mark.parametrize(
    ("rank", "what"),
    [
        (0, "write 2.incomplete/manifest.json"),
        (1, "write 4.incomplete/optimizer/shard-00002-model-00001-of-00001.safetensors"),
        (0, "replace 4.incomplete"),
        (0, "rmtree 2.deleted"),
    ],
)
def test_kill_leaves_whole_checkpoints_and_the_resumed_run_is_equal(rows, four_steps, tmp_path, rank, what):
    """A handful; tests/kill_points.py (`make kill_points`) runs every one of both ranks."""
    whole, events = four_steps
    killed_and_resumed(rows, whole, tmp_path, rank, events[rank].index(what) + 1)


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_full_disk_loses_neither_training_nor_older_checkpoints(rows, whole, tmp_path, on_error):
    """From the second save on, one rank's disk takes no file over 64 KiB."""
    folder = tmp_path / "run"
    faults = Faults((1,), file_size_limit=2**16, limit_from_step=4)
    arguments = [*common(rows, steps=4), "--output_dir", folder, "--on_save_error", on_error]
    done = Run(arguments, tmp_path / "log", faults=faults).wait()
    assert done.output.count("checkpoint-4 could not be saved: rank 1") == 1
    assert "File too large" in done.output
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]
    check_files_alone(folder / "checkpoint-2")
    if on_error == "stop":
        assert done.codes == [1, 1] and not (folder / "model").exists()
    else:
        assert done.codes == [0, 0] and (folder / "model").is_dir()


def check_files_alone(checkpoint):
    check_files(checkpoint)


def test_vanished_folder_is_an_error_and_is_not_made_again(rows, tmp_path):
    folder = tmp_path / "run"
    run = Run([*common(rows, steps=40), "--output_dir", folder, "--logging_steps", 1000], tmp_path / "log")
    run.wait_for("checkpoint-2 (")
    os.rename(folder, tmp_path / "gone")
    done = run.wait()
    assert done.codes == [1, 1]
    assert done.output.count("No such file or directory") == 1 and "could not be saved" in done.output
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_signal_to_one_rank_saves_on_all_and_the_resumed_run_is_equal(rows, whole, tmp_path, number):
    folder = tmp_path / "run"
    arguments = [*common(rows, save_steps=0), "--output_dir", folder]
    run = Run(arguments, tmp_path / "log")
    run.wait_for("step 3/8")
    os.kill(run.ranks[1].pid, number)
    done = run.wait()
    assert done.codes == [143, 143], done.output[-2000:]
    assert len(complete_checkpoints(folder)) == 1
    assert done.output.count("stopped by a signal") == 1
    succeeded(finetune_in_process([*arguments, "--resume_from_checkpoint", "latest"], tmp_path / "log"))
    assert steps_of(folder) == steps_of(whole)
    assert same_weights(weights_of(folder), weights_of(whole))


def handles_signals(pid):
    """Whether a process has set its handler of SIGUSR1."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("SigCgt")]
    return bool(int(line.split()[1], 16) >> (signal.SIGUSR1 - 1) & 1)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_second_interrupt_stops_at_once(rows, tmp_path, second):
    """A launcher passes the second Ctrl-C on as SIGTERM."""
    folder = tmp_path / "run"
    arguments = [*common(rows, save_steps=0, steps=10_000), "--output_dir", folder]
    run = Run([*arguments, "--gradient_accumulation_steps", 2000], tmp_path / "log")
    run.wait_for("10000 steps")
    while not all(handles_signals(process.pid) for process in run.ranks):
        time.sleep(0.05)
    for number, pause_s in ((signal.SIGINT, 0.5), (second, 5), (second, 5)):
        for process in run.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
        for process in run.ranks:  # two signals that come at once may be taken for one: again, where it has no effect
            process.join(pause_s)
    done = run.wait()
    assert done.codes == [130, 130] and not complete_checkpoints(folder)


def test_signal_to_the_launcher_saves_too(rows, tmp_path):
    """accelerate launch hands SIGTERM on to its ranks and waits for them."""
    folder, log = tmp_path / "run", tmp_path / "log"
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
    script = [str(RECIPES / "finetune.py"), *map(str, common(rows, save_steps=0, steps=10_000))]
    command = [*launch, "--config_file", str(in_fp32()), *script, "--output_dir", str(folder)]
    with open(log, "w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=clean_environment(), stdout=file, stderr=subprocess.STDOUT)
        patience = Patience(process.pid)
        while "step 2/" not in log.read_text():
            assert process.poll() is None and not patience.is_over(), log.read_text()[-2000:]
            time.sleep(0.1)
        process.terminate()
        wait_for_end(process)
        assert process.returncode != 0
    assert "stopped by a signal" in log.read_text()
    (checkpoint,) = complete_checkpoints(folder)
    assert read_manifest(checkpoint)["step"] >= 2


def test_checkpoint_written_beside_training_is_the_one_written_in_it(rows, whole, tmp_path):
    folder = tmp_path / "run"
    done = finetune_in_process([*common(rows, "--async_save"), "--output_dir", folder], tmp_path / "log")
    assert "saving checkpoint-2" in succeeded(done) and "saved" in done.output
    assert_same_run(folder, whole, 0)
    files = [path.relative_to(whole) for path in whole.glob("checkpoint-*/*/*.safetensors")]
    assert len(files) == 4 * 6
    assert all(same_weights(load_file(whole / path), load_file(folder / path)) for path in files)


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_failure_of_a_checkpoint_written_beside_training_is_not_lost(rows, tmp_path, on_error):
    folder = tmp_path / "run"
    faults = Faults((1,), file_size_limit=2**16, limit_from_step=4)
    arguments = [*common(rows, steps=5), "--async_save", "--output_dir", folder, "--on_save_error", on_error]
    done = Run(arguments, tmp_path / "log", faults=faults).wait()
    assert done.output.count("could not be saved: rank 1") >= 1
    assert done.codes == ([1, 1] if on_error == "stop" else [0, 0])
    assert not list(folder.glob("*.incomplete"))


def test_adapter_checkpoint_holds_adapter_and_optimizer_alone(rows, tmp_path):
    folder = tmp_path / "run"
    done = finetune_in_process([*common(rows, "--use_peft", steps=2), "--output_dir", folder], tmp_path / "log")
    succeeded(done)
    checkpoint = folder / "checkpoint-2"
    trainable = sum(t.numel() for t in weights_of(folder).values())
    size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    assert size <= 3 * trainable * 4 + 400_000  # headers and random states
    names = [name for path in checkpoint.glob("model/*") for name in safe_open(path, "pt").keys()]  # noqa: SIM118
    assert names and all("lora_" in name for name in names)


def test_saved_names_are_the_models_own_and_a_tied_head_is_saved_once(rows, tmp_path):
    """Also under selective recompute, which puts wrappers into the module names."""
    model = tmp_path / "tied"
    model.mkdir()
    for path in MODEL.iterdir():
        if "token" in path.name or "chat" in path.name:
            shutil.copy(path, model)
    tied = tiny_llama(tied=True)
    tied.resize_token_embeddings(json.loads((MODEL / "config.json").read_text())["vocab_size"])
    tied.save_pretrained(model)
    values = yaml.safe_load(in_fp32("mem_limit").read_text())
    values["fsdp_config"]["hook_checkpoint_mode"] = "selective"
    (tmp_path / "selective.yaml").write_text(yaml.safe_dump(values))
    arguments = common(rows, model=model, steps=4)
    one, config = tmp_path / "one", tmp_path / "selective.yaml"
    succeeded(finetune_in_process([*arguments, "--output_dir", one], tmp_path / "log", config=config))
    names = {n for path in one.glob("checkpoint-2/model/*") for n in safe_open(path, "pt").keys()}  # noqa: SIM118
    expected = set(tied.state_dict())
    assert len(names & {"lm_head.weight", "model.embed_tokens.weight"}) == 1
    assert names | {"lm_head.weight", "model.embed_tokens.weight"} == expected
    folder, done = resumed(one, 2, tmp_path, arguments, config=config)
    succeeded(done)
    assert_same_run(folder, one, 2)


def test_lowest_eval_loss_is_kept_and_exported(rows, tmp_path):
    """A learning rate that grows and ruins the model more with each step."""
    folder, data = tmp_path / "run", tmp_path / "data"
    data.mkdir()
    for name in ("train", "test"):
        shutil.copy(rows, data / f"{name}.jsonl")
    arguments = [*common(data), "--output_dir", folder, "--eval_steps", 2, "--save_total_limit", 1]
    arguments += ["--load_best_model_at_end", "--learning_rate", 100, "--warmup_steps", 100, "--dtype", "float32"]
    output = succeeded(finetune_in_process(arguments, tmp_path / "log"))
    losses = {m["step"]: m["eval_loss"] for m in map(read_manifest, complete_checkpoints(folder))}
    best = min(losses, key=losses.get)
    assert set(losses) == {best, 8} and best < 8
    assert f"lowest eval_loss: {folder / f'checkpoint-{best}'}, loaded" in output
    exported, tensors = weights_of(folder), {}
    for path in sorted((folder / f"checkpoint-{best}" / "model").iterdir()):
        for name, value in load_file(path).items():
            tensors[name] = torch.cat([tensors[name], value]) if name in tensors else value
    assert all(torch.equal(exported[name], tensors[name]) for name in exported)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("cut", "bytes, written were"),
        ("missing", "missing, written were"),
        ("flipped", "its content is not what was written (sha256)"),
    ],
)
def test_damaged_file_is_named(rows, whole, tmp_path, damage, message):
    copy = tmp_path / "run" / "checkpoint-4"
    shutil.copytree(whole / "checkpoint-4", copy)
    path = copy / "optimizer" / "shard-00002-model-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        data[-5] ^= 1
        path.write_bytes(data[:-7] if damage == "cut" else data)
    arguments = [*common(rows), "--output_dir", copy.parent, "--resume_from_checkpoint", "latest", "--check_hashes"]
    done = Run(arguments, tmp_path / "log").wait()
    assert done.codes == [1, 1]
    assert done.output.count(str(path)) == 1 and message in done.output


def test_loading_runs_no_code_from_a_checkpoint(rows, whole, tmp_path):
    """Pickles under every name that torch or Accelerate would load."""
    trap = tmp_path / "sprung"

    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(trap),))

    copy = tmp_path / "run" / "checkpoint-4"
    shutil.copytree(whole / "checkpoint-4", copy)
    for folder in (copy, copy / "model", copy / "optimizer", copy / "random_state"):
        for name in (".metadata", "random_states_0.pkl", "optimizer.bin", "scheduler.bin", "scaler.pt", "__0_0.distcp"):
            (folder / name).write_bytes(pickle.dumps(Bomb()))
    arguments = [*common(rows), "--output_dir", copy.parent, "--resume_from_checkpoint", str(copy)]
    succeeded(finetune_in_process(arguments, tmp_path / "log"))
    assert_same_run(copy.parent, whole, 4)
    assert not trap.exists()
    with pytest.raises(Exception, match=r"header|deserializing"):
        path = copy / "random_state" / "rank-00000.safetensors"
        path.write_bytes(pickle.dumps(Bomb()))
        safe_open(path, "pt")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seed", 7], "--seed was 42, now 7"),
        (["--max_length", 56, "--truncation_mode", "keep_end"], "the training rows are others"),
        (["--mask_history", "--assistant_only_loss", "false"], "the training rows are others"),
        (["--use_peft"], "--use_peft was False, now True"),
        (["--group_by_length"], "--group_by_length was False, now True"),
    ],
)
def test_change_that_would_make_the_run_wrong_stops_it(rows, whole, tmp_path, more, message):
    _, done = resumed(whole, 4, tmp_path, common(rows, *more))
    assert done.codes == [1, 1] and done.output.count(message) == 1


def test_rows_that_an_older_version_grouped_by_length_are_said_to_come_in_another_order():
    arguments = {"seed": 0, "group_by_length": True, "streaming": False, "use_peft": False}
    facts = {"arguments": arguments, "yaml": {}, "data": "", "frozen": {}, "model": "", "rows_per_step": 8}
    states = ({"rows_seen": 8}, {"rows_seen": 8, "rows_per_group": 8}, {"rows_seen": 0})
    notes = [compare_runs(facts | state, facts) for state in states]
    assert [len(lines) for lines in notes] == [1, 0, 0] and "in another order" in notes[0][0]


def test_older_checkpoint_that_does_not_say_where_its_stream_stood_is_noted():
    arguments = {"seed": 0, "group_by_length": False, "streaming": True, "use_peft": False}
    facts = {"arguments": arguments, "yaml": {}, "data": "", "frozen": {}, "model": "", "rows_per_step": 8}
    states = ({"rows_seen": 8}, {"rows_seen": 8, "stream": {"window": 0}}, {"rows_seen": 0, "stream": {}})
    notes = [compare_runs(facts | state, facts) for state in states]
    assert [len(lines) for lines in notes] == [1, 0, 0] and "did not note where the stream stood" in notes[0][0]


def test_other_model_stops_the_run(rows, whole, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(MODEL, other)
    config = json.loads((other / "config.json").read_text())
    model = tiny_llama()
    model.resize_token_embeddings(config["vocab_size"])
    model.save_pretrained(other)
    _, done = resumed(whole, 4, tmp_path, common(rows, model=other))
    assert done.codes == [1, 1] and done.output.count("the config of") == 1


def test_other_tensors_are_named_and_none_is_loaded(whole):
    assert run_on_cpu_ranks(load_other_tensors, whole / "checkpoint-4" / "model", 2) == 0


def load_other_tensors(folder):
    """Each rank: tensors that the checkpoint does not hold."""
    tensors = {"other.weight": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"holds other tensors than this model: .* \(\d+ differ\)"):
        load_tensors(tensors, folder, dist.group.WORLD)
    assert not tensors["other.weight"].any()


def test_ranks_wait_for_one_anothers_reads_in_a_group_that_is_patient(whole):
    """Over NCCL the default group would give up in ten minutes."""
    assert run_on_cpu_ranks(load_in_a_group, whole / "checkpoint-4" / "model", 2) == 0


def load_in_a_group(folder):
    """Each rank: every collective of a load is in the group of LiveState."""
    group, seen = LiveState(None, None, None, None, {}).group, []
    for name in ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list", "all_reduce"):
        own = getattr(dist, name)

        def noting(*args, own=own, **kwargs):
            seen.append(kwargs.get("group") is group)
            return own(*args, **kwargs)

        setattr(dist, name, noting)
    shapes = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    tensors = {name: torch.zeros(facts.size) for name, facts in shapes.items()}
    load_tensors(tensors, folder, group)
    assert len(seen) >= 3 and all(seen), seen
    assert all(tensor.any() for name, tensor in tensors.items() if "norm" in name)


def test_rank_that_exits_while_ranks_agree_ends_all(tmp_path):
    assert run_on_cpu_ranks(exit_on_one_rank, tmp_path / "run", 2) == 0


def exit_on_one_rank(output_dir):
    """Each rank: one exits where it agrees with the others, who would wait for a day. All raise, and say why."""
    rank, live = dist.get_rank(), LiveState(None, None, None, None, {})

    def exits_on(wrong):
        sys.exit(3) if rank == wrong else None

    with pytest.raises(SystemExit if rank == 1 else ValueError, match="3"):
        agreed(partial(exits_on, 1), live.group)
    options = SimpleNamespace(output_dir=str(output_dir), save_total_limit=None, load_best_model_at_end=False)
    options.async_save, options.on_save_error = False, "stop"
    writer = CheckpointWriter(live, options, {})
    assert writer.agree(partial(exits_on, 1)) == ("rank 1: SystemExit: 3", [None, None])
    saving.folder.find_checkpoint = lambda *_: exits_on(0)
    with pytest.raises(ValueError, match="SystemExit: 3"):
        open_run(str(output_dir), None)


def test_ranks_wait_for_a_search_of_rank_0_in_a_group_that_is_patient(tmp_path):
    assert run_on_cpu_ranks(open_patiently, tmp_path / "run", 2) == 0


def open_patiently(output_dir):
    """Each rank: the only collective that waits for rank 0's disk is in a group of its own."""
    groups, own = [], dist.broadcast_object_list
    dist.broadcast_object_list = lambda *args, group=None: groups.append(group) or own(*args, group=group)
    run = open_run(str(output_dir), None)
    assert run.checkpoint is None and len(groups) == 1
    assert groups[0] not in (None, dist.group.WORLD) and dist.get_backend(groups[0]) == "gloo"


def test_manifest_is_whole_though_the_disk_lists_nothing_and_no_file_is_read(tmp_path):
    (tmp_path / "run").mkdir()
    assert run_on_cpu_ranks(save_on_a_stale_disk, tmp_path / "run", 3) == 0
    checkpoint = tmp_path / "run" / "checkpoint-1"
    files = {str(p.relative_to(checkpoint)): p for p in checkpoint.rglob("*") if p.is_file()}
    described = read_manifest(checkpoint)["files"]
    assert described.keys() == files.keys() - {"manifest.json"} and len(described) == 3 * (6 + 12 + 1)
    assert described == {
        name: {"size": files[name].stat().st_size, "sha256": sha256(files[name])} for name in described
    }
    check_files(checkpoint, "")
    for name in described:
        data = files[name].read_bytes()
        files[name].write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(ValueError, match=f"{name}: its content is not what was written"):
            check_files(checkpoint, "")
        files[name].write_bytes(data)


def save_on_a_stale_disk(output_dir):
    """Each rank: one checkpoint, in several files a rank, while no folder shows what is in it."""
    checkpoint_module.FILE_BYTES = 10_000
    model = fully_shard(tiny_llama())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    accelerator = SimpleNamespace(scaler=None, device=torch.device("cpu"))
    state = {**{name: kind() for name, kind in saving.folder.MANIFEST_TYPES.items()}, "step": 1}
    live = LiveState(accelerator, model, optimizer, SimpleNamespace(last_epoch=1), state)
    options = SimpleNamespace(output_dir=str(output_dir), save_total_limit=None, load_best_model_at_end=False)
    options.async_save, options.on_save_error = False, "stop"
    writer, reads, own = CheckpointWriter(live, options, {}), [], io.open

    def opened(file, mode="r", *args, **kwargs):
        if str(file).startswith(str(output_dir)) and not set(mode) & set("wxa"):
            reads.append(file)
        return own(file, mode, *args, **kwargs)

    builtins.open = io.open = opened
    Path.rglob = Path.glob = lambda *_: iter(())
    Path.iterdir = lambda _: iter(())
    os.listdir = lambda *_: []
    assert writer.save().startswith("saved ")
    assert reads == []


def test_file_that_the_disk_does_not_list_is_loaded(whole):
    assert run_on_cpu_ranks(load_from_a_stale_disk, whole / "checkpoint-4" / "model", 2) == 0


def load_from_a_stale_disk(folder):
    """Each rank: torch's reader would take the rows of the first file for all of them, or leave rows as they were."""
    shapes = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    loads, own = [], Path.iterdir
    for is_stale in (False, True):
        loads.append({name: torch.zeros(facts.size) for name, facts in shapes.items()})
        if is_stale:
            Path.iterdir = lambda path: sorted(own(path))[:1]
        load_tensors(loads[-1], folder, dist.group.WORLD)
    stale = dcp.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    assert {name: facts.size for name, facts in stale.items()} != {n: facts.size for n, facts in shapes.items()}
    assert same_weights(*loads) and all(tensor.any() for tensor in loads[0].values())


def test_files_that_do_not_add_up_are_no_checkpoint():
    """A rank's answer that was lost, or two ranks that wrote to one name."""
    one, other = Written({"model/a": {}}, 8), Written({"model/b": {}}, 4)
    check_whole([one, other], 12)
    with pytest.raises(OSError, match="hold 8 bytes of tensors, the model and its optimizer have 12"):
        check_whole([one], 12)
    with pytest.raises(OSError, match="2 ranks have written model/a"):
        check_whole([one, one], 16)


def test_other_frozen_weights_stop_the_run(rows, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    arguments = common(rows, "--use_peft", steps=2)
    succeeded(finetune_in_process([*arguments, "--output_dir", one], tmp_path / "log"))
    shutil.copytree(MODEL, other)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][3, 3] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    _, done = resumed(one, 2, tmp_path, common(rows, "--use_peft", model=other, steps=4))
    assert done.codes == [1, 1] and done.output.count("the frozen weights of") == 1


def test_change_that_only_matters_from_now_on_is_said(rows, whole, tmp_path):
    folder, done = resumed(whole, 4, tmp_path, common(rows, "--learning_rate", 5e-4))
    assert "changed since the checkpoint: --learning_rate was 0.001, now 0.0005" in succeeded(done)
    assert steps_of(folder)[5][2] == pytest.approx(steps_of(whole)[5][2] / 2)
    assert steps_of(folder)[5][0] == steps_of(whole)[5][0]  # the same weights, the same rows


def test_checkpoints_of_another_run_are_not_mixed_with(rows, whole, tmp_path):
    done = Run([*common(rows), "--output_dir", whole], tmp_path / "log").wait()
    assert done.codes == [1, 1] and done.output.count("of an earlier run") == 1
    arguments = [*common(rows), "--output_dir", whole, "--resume_from_checkpoint", whole / "checkpoint-2"]
    done = Run(arguments, tmp_path / "log").wait()
    assert done.codes == [1, 1] and "holds checkpoint-4, checkpoint-6, checkpoint-8" in done.output


def test_run_killed_after_its_last_save_is_finished_by_resuming(rows, whole, tmp_path):
    folder, done = resumed(whole, 8, tmp_path, common(rows))
    succeeded(done)
    assert same_weights(weights_of(folder), weights_of(whole))


def test_second_run_into_the_same_folder_is_refused_while_the_first_lives(rows, tmp_path):
    """Ranks outlive a launcher that is killed; a second run would take their unfinished files for litter."""
    folder = tmp_path / "run"
    first = Run([*common(rows, save_steps=0, steps=10_000), "--output_dir", folder], tmp_path / "log")
    first.wait_for("step 1/")
    second = Run([*common(rows, steps=2), "--output_dir", folder], tmp_path / "log2").wait()
    assert second.codes == [1, 1] and second.output.count("another run is still writing to it") == 1
    assert min(steps_of(folder)) == 1  # the refused run has not touched the living one's lines
    for process in first.ranks:
        process.kill()
    first.wait()
    succeeded(finetune_in_process([*common(rows, steps=2), "--output_dir", folder], tmp_path / "log3"))


def test_metrics_line_that_a_kill_tore_is_left_out_on_resume(rows, whole, tmp_path):
    folder = tmp_path / "from-4"
    folder.mkdir()
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:5]) + lines[5][:20])
    shutil.copytree(whole / "checkpoint-4", folder / "checkpoint-4")
    arguments = [*common(rows), "--output_dir", folder, "--resume_from_checkpoint", "latest"]
    succeeded(finetune_in_process(arguments, tmp_path / "log"))
    assert steps_of(folder) == steps_of(whole)


def test_folder_that_the_ranks_do_not_share_is_refused(rows, tmp_path):
    """As on two machines that each have an /outputs of their own."""
    done = Run([*common(rows), "--output_dir", tmp_path / "{own_rank}"], tmp_path / "log").wait()
    assert done.codes == [1, 1] and done.output.count("is not on a disk that all ranks share") == 1


def test_epochs_end_where_they_end_though_the_global_batch_changed(rows, tmp_path):
    """Two epochs of 40 rows: five steps of 8 rows, and the second epoch in ten steps of 4."""
    arguments = [*common(rows, save_steps=5, steps=-1), "--num_train_epochs", 2]
    one = tmp_path / "one"
    succeeded(finetune_in_process([*arguments, "--output_dir", one], tmp_path / "log"))
    assert max(steps_of(one)) == 10
    folder, done = resumed(one, 5, tmp_path, arguments, world_size=1)
    assert "global batch was 8 rows, now 4" in succeeded(done)
    assert sorted(steps_of(folder)) == list(range(6, 16))
    last = read_manifest(folder / "checkpoint-15")
    assert (last["epoch"], last["rows_seen"]) == (2, 0)


def test_rank_that_cannot_read_a_checkpoint_ends_all(rows, whole, tmp_path):
    _, done = resumed(whole, 4, tmp_path, common(rows), faults=Faults((1,), breaks_reading=True))
    assert done.codes == [1, 1] and "Traceback" not in done.output
    assert done.output.count("rank 1: OSError: [Errno 116] Stale file handle") == 1


def test_signal_to_every_process_of_a_job_leaves_the_loaders_to_save_with(rows, tmp_path):
    folder = tmp_path / "run"
    arguments = [*common(rows, save_steps=0, steps=10_000), "--output_dir", folder, "--dataloader_num_workers", 1]
    run = Run(arguments, tmp_path / "log")
    run.wait_for("step 2/")
    for process in run.ranks:
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        assert children
        for pid in (*map(int, children), process.pid):
            os.kill(pid, signal.SIGTERM)
    done = run.wait()
    assert done.codes == [143, 143], done.output[-2000:]
    assert len(complete_checkpoints(folder)) == 1


def test_stop_whose_save_fails_says_so(rows, tmp_path):
    folder = tmp_path / "run"
    arguments = [*common(rows, save_steps=0, steps=10_000), "--output_dir", folder, "--on_save_error", "continue"]
    run = Run(arguments, tmp_path / "log", faults=Faults((1,), file_size_limit=2**16))
    run.wait_for("step 2/")
    os.kill(run.ranks[0].pid, signal.SIGTERM)
    done = run.wait()
    assert done.codes == [1, 1] and "its state could NOT be saved" in done.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda manifest: "", "Expecting value"),
        (lambda manifest: json.dumps({k: v for k, v in manifest.items() if k != "files"}), "'files' is missing"),
        (lambda manifest: json.dumps({**manifest, "step": "4"}), "step is '4'"),
        (lambda manifest: json.dumps({**manifest, "format": 9}), "format 9, this version reads 1"),
        (lambda manifest: json.dumps({**manifest, "files": {"../../x": {}}}), "outside of the checkpoint"),
        (lambda manifest: json.dumps([manifest]), "manifest of a checkpoint"),
    ],
)
def test_damaged_manifest_is_named_and_never_the_best(whole, tmp_path, change, message):
    for step in (2, 4):
        shutil.copytree(whole / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    path = tmp_path / "checkpoint-2" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(change({**manifest, "eval_loss": 0.1}))
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        read_manifest(path.parent)
    assert message in str(caught.value)
    assert best_checkpoint(tmp_path) is None
    for step, loss in ((2, float("nan")), (4, 1.0)):
        path = tmp_path / f"checkpoint-{step}" / "manifest.json"
        path.write_text(json.dumps({**manifest, "step": step, "eval_loss": loss}))
    assert best_checkpoint(tmp_path) == tmp_path / "checkpoint-4"


@pytest.mark.parametrize("name", ["model/shard-00002-model-00001-of-00001", "random_state/rank-00001"])
def test_file_that_cannot_be_parsed_is_one_error_that_names_its_folder(rows, whole, tmp_path, name):
    copy = tmp_path / "run" / "checkpoint-4"
    shutil.copytree(whole / "checkpoint-4", copy)
    path = copy / f"{name}.safetensors"
    path.write_bytes(b"x" * path.stat().st_size)
    arguments = [*common(rows), "--output_dir", copy.parent, "--resume_from_checkpoint", "checkpoint-4"]
    done = Run(arguments, tmp_path / "log").wait()
    assert done.codes == [1, 1] and "Traceback" not in done.output
    assert f"{copy / name.split('/')[0]}" in done.output and "--check_hashes names a damaged file" in done.output


def test_best_checkpoint_needs_rows_to_be_judged_on(rows, tmp_path):
    best = ["--load_best_model_at_end", "--eval_steps", 2, "--output_dir", tmp_path / "run"]
    done = Run([*common(rows), *best], tmp_path / "log").wait()
    assert done.codes == [1, 1] and done.output.count("--load_best_model_at_end needs a test split") == 1


def test_saving_before_the_first_successful_step_does_not_count_as_one(tmp_path):
    """Under fp16 the scaler may skip the first steps: torch makes Adam's state by a step of its own."""
    assert run_on_cpu_ranks(save_before_first_step, None, 1) == 0


def save_before_first_step(_):
    """One rank: the first update with and without a look at the state before it."""
    updates = []
    for looks in (False, True):
        model = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.ones_(model.weight)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, fused=True)
        training_tensors(model, optimizer) if looks else None
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        updates.append(model.weight.full_tensor().detach().clone())
    assert torch.equal(*updates)
