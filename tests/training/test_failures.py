"""What a user reads when a run fails: rank, step, place, cause, what to do; last on the screen, from every launcher.

The faults are real (faulty_run.py), on rank 1 of 2, through `accelerate launch`.
"""

import contextlib
import json
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from in_process import finetune_in_process
from launching import RECIPES, accelerate_launch, in_fp32
from rows.batches import Step
from tiny_models import tiny_llama
from tools.diagnosis.memory_diagnosis import new_bytes
from tools.planner.advice import next_knobs
from torch._dynamo.utils import counters
from training.ahead import fetch_ahead
from training.failures import WAIT_S, explained_failures
from training.hang_watch import ENDED, end_if_stuck, signs_of_life, watch_for_hangs
from training.last_words import LONGEST, in_one_line, is_first_to_fail
from training.progress import Progress, follow_blocks

SAMPLE = RECIPES / "sample"
ARGUMENTS = [
    "--model_name_or_path",
    SAMPLE / "model",
    "--dataset_name",
    SAMPLE / "data" / "train.jsonl",
    "--max_steps",
    3,
]
ARGUMENTS += ["--config", SAMPLE / "arguments.yaml", "--report_to", "none", "--predict_with_generate", "false"]


def failed(fault, folder, *more):
    """What a launch with this fault prints."""
    arguments = [fault, *ARGUMENTS, "--output_dir", folder, *more]
    done = accelerate_launch("tests/faulty_run.py", *arguments, config=in_fp32())
    assert done.returncode != 0, done.stdout[-3000:]
    assert done.stdout.splitlines()[-1].startswith("Failed: rank 1, step 2: "), done.stdout[-3000:]
    return done.stdout


def test_error_on_one_rank_is_the_last_thing_on_the_screen(tmp_path):
    shown = failed("error", tmp_path)
    first = "rank 1, step 2: in reading the data: KeyError: 'the disk is gone'"
    assert shown.count(f"Error: {first}") == 1
    tail = shown[shown.index("Root Cause") :]  # of the launcher's own last lines
    assert first in tail and "faulty_run.py" in tail
    assert shown.endswith(f"\nFailed: {first}\n")  # behind the launcher's box
    assert "rank 0, step" not in shown  # it only lost a peer
    status = json.loads((tmp_path / "run.json").read_text())["status"]
    assert status.startswith("failed: ") and "the disk is gone" in status
    assert "the disk is gone" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_out_of_memory_names_place_parts_and_next_knob(tmp_path):
    shown = failed("memory", tmp_path)
    head = "rank 1, step 2: out of memory in forward: model.layers.0.mlp"
    tail = shown[shown.index("Root Cause") :]
    assert head in tail and "live then: parameter shards" in tail and "optimizer state" in tail
    assert "next: --per_device_train_batch_size 4:" in tail and "GiB at the peak (predicted)" in tail
    assert tail.index("--per_device_train_batch_size") < tail.index("next: finetune_mem_limit.py")
    snapshot = json.loads((tmp_path / "out_of_memory-rank-1.json").read_text())
    assert snapshot["parts"]["parameter shards"] == 1_435_264 * 4 // 2
    assert snapshot["parts"]["optimizer state"] >= 2 * snapshot["parts"]["parameter shards"]  # step counts too


def test_rank_that_is_killed_is_said_by_the_one_that_lost_it(tmp_path):
    arguments = ["killed", *ARGUMENTS, "--output_dir", tmp_path]
    done = accelerate_launch("tests/faulty_run.py", *arguments, config=in_fp32())
    assert done.returncode != 0 and "Signal 9 (SIGKILL)" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("Failed: rank 0, step 2, in ") and "another rank ended" in last


def test_rank_that_never_comes_is_named_with_step_and_place(tmp_path):
    arguments = ["hang", *ARGUMENTS, "--accelerate_config", in_fp32(), "--output_dir", tmp_path]
    shown = finetune_in_process([*arguments, "--hang_timeout", 6], tmp_path / "log", config=None, script="faulty_run")
    assert shown.codes == [1, 1]
    shown = shown.output
    assert "no rank has moved for 6 s (--hang_timeout); they wait for one another:" in shown
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["status"].startswith("failed: no rank has moved for 6 s") and facts["ended"]
    at = shown[shown.index("they wait for one another") :]
    assert at.index("rank 1: step 2, reading the data") < at.index("rank 0: step 2, ")
    assert "in faulty" in shown or "in reduce" in shown  # the stack of the rank that printed


def explained(error, progress, tmp_path, capsys, ranks=1):
    """What a rank says of an error in the middle of this phase."""
    accelerator = SimpleNamespace(process_index=0, num_processes=ranks)
    with pytest.raises(SystemExit), explained_failures(progress, accelerator, None, None, str(tmp_path)):
        raise error
    return capsys.readouterr().err


def test_place_is_the_phase_that_runs_and_its_module(tmp_path, capsys):
    progress, model = Progress(), tiny_llama()
    follow_blocks(model, progress)
    places = []
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda *_: places.append(progress.place))
    model.lm_head.register_forward_pre_hook(lambda *_: places.append(progress.place))
    progress.begin(3)
    with progress.mark("forward"):
        model(torch.ones(1, 4, dtype=torch.long))
    assert places == ["forward: model.layers.1.mlp", "logits and loss"]
    assert progress.place == "the loop"
    with contextlib.suppress(KeyError), progress.mark("backward"):
        raise KeyError
    assert "rank 0, step 3: in backward: KeyError: 'x'" in explained(KeyError("x"), progress, tmp_path, capsys)


def test_unit_that_cannot_be_gathered_for_a_block_is_no_forward_of_it():
    progress, model = Progress(), tiny_llama()
    gathered = []
    model.model.layers[2].register_forward_pre_hook(lambda *_: gathered.append(progress.place), prepend=True)
    follow_blocks(model, progress)  # as in the scripts, behind FSDP2's own hooks, which come first in the list
    with progress.mark("forward"):
        model(torch.ones(1, 4, dtype=torch.long))
    assert gathered == ["gathering a unit: model.layers.2"]


def test_compiled_blocks_are_one_graph_without_marks():
    progress, model = Progress(), tiny_llama()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    follow_blocks(model, progress)
    counters.clear()
    with progress.mark("forward"):
        for _ in range(2):
            model(torch.ones(1, 4, dtype=torch.long), use_cache=False)
    assert counters["stats"]["unique_graphs"] >= 1 and not counters["graph_break"]
    assert progress.module == "" and not progress.is_behind_blocks


@pytest.mark.parametrize("phase", ["reading the data", "forward"])
def test_loader_that_is_killed_is_reading_the_data_wherever_the_loop_is(tmp_path, capsys, phase):
    progress = Progress(step=2, phase=phase)
    error = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    assert "rank 0, step 2: in reading the data: RuntimeError" in explained(error, progress, tmp_path, capsys)


@pytest.mark.parametrize(("phase", "step"), [("evaluation", 0), ("saving", 4), ("forward", 4)])
def test_evaluation_before_training_belongs_to_no_step(tmp_path, capsys, phase, step):
    said = explained(KeyError("x"), Progress(step=step, phase=phase), tmp_path, capsys)
    assert f"rank 0, step {step}: in {phase}: " in said


def test_rank_that_fails_writes_down_the_failure_and_the_report_though_rank_0_cannot(tmp_path):
    """Rank 0 sits in a device call until it is killed: it never reaches its exit."""
    (tmp_path / "run.json").write_text(json.dumps({"status": "running", "num_processes": 2}))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    accelerator, progress = SimpleNamespace(process_index=1, num_processes=2), Progress(step=2, phase="backward")
    own = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit), explained_failures(progress, accelerator, None, None, str(tmp_path)):
            raise KeyError("the disk is gone")
    finally:
        signal.signal(signal.SIGTERM, own)
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["status"].startswith("failed: rank 1, step 2: in backward: KeyError") and facts["ended"]
    assert "the disk is gone" in (tmp_path / "report.md").read_text()


def test_rank_is_silent_where_rank_0_has_said_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("training.failures.signal.signal", lambda *action: None)
    reason = "a.jsonl, line 7: is not JSON"
    monkeypatch.setattr("training.failures.time.sleep", lambda _: (tmp_path / "failure-rank-0.txt").write_text(reason))
    accelerator = SimpleNamespace(process_index=1)
    with (
        pytest.raises(SystemExit) as ended,
        explained_failures(Progress(), accelerator, None, None, str(tmp_path)),
    ):
        raise SystemExit(f"\nError: {reason}\n")
    assert ended.value.code == 1 and not (tmp_path / "failure-rank-1.txt").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_leave_rank_0_the_first_word_on_what_all_met(tmp_path, monkeypatch, rank):
    done = []
    monkeypatch.setattr("training.failures.time.sleep", lambda seconds: done.append(seconds))
    monkeypatch.setattr("training.failures.signal.signal", lambda *action: done.append(action))
    monkeypatch.setattr("training.failures.tell_launcher", done.append)
    accelerator = SimpleNamespace(process_index=rank)
    with pytest.raises(SystemExit), explained_failures(Progress(), accelerator, None, None, str(tmp_path)):
        raise SystemExit("\nError: a.jsonl, line 7: is not JSON\n")
    waits = [(signal.SIGTERM, signal.SIG_DFL), WAIT_S] if rank else []
    assert done == [*waits, "a.jsonl, line 7: is not JSON"]
    assert (tmp_path / f"failure-rank-{rank}.txt").read_text() == done[-1]


def test_rows_that_cannot_be_sent_concern_the_step_that_asks_for_them(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    steps = iter([Step([{"labels": torch.ones(1, 2, dtype=torch.long)}], {}, [])])
    fetched = fetch_ahead(steps, torch.device("meta"))
    with pytest.raises(RuntimeError, match="out of memory"):
        fetched.result()
    (advice,) = next_knobs("reading the data", None)
    assert "--dataloader_num_workers" in advice


def test_memory_by_part_counts_each_storage_once_and_passes_over_what_has_none():
    seen, dense = {}, torch.ones(4, 4)
    assert [new_bytes(value, seen) for value in (dense, dense[1:], torch.eye(3).to_sparse(), None)] == [64, 0, 0, 0]


def notes_of(folder, notes):
    folder.mkdir()
    for rank, values in enumerate(notes):
        if values is not None:
            (folder / f"rank-{rank}.json").write_text(json.dumps({"at": "step 1, a", "moves": 5, **values}))


STILL = {"since": 0, "noted": 100}


@pytest.mark.parametrize(
    ("notes", "failed", "ends"),
    [
        ([STILL, STILL], (), True),  # all in one device call: whoever works marks it
        ([STILL, {**STILL, "at": "step 2, a"}], (), True),
        ([STILL, {"since": 95, "noted": 100}], (), False),  # it moves
        ([STILL, {"since": 0, "noted": 20}], (), True),  # stopped
        ([STILL, None], (), False),  # it has left the loop, and nothing is known
        ([STILL, None], (1,), True),  # it has failed, which is known
        ([{"since": 70, "noted": 100}, None], (1,), False),  # it may notice by itself
        ([{**STILL, "phase": "saving"}, {**STILL, "phase": "saving"}], (), False),  # to a slow disk
        ([{**STILL, "phase": "saving"}, {**STILL, "phase": "forward"}], (), True),
    ],
)
def test_ranks_end_where_none_moves_or_one_has_failed(tmp_path, monkeypatch, notes, failed, ends):
    notes_of(tmp_path / "ranks", notes)
    for rank in failed:
        (tmp_path / f"failure-rank-{rank}.txt").write_text("no more disk")
    monkeypatch.setattr("training.hang_watch.time.time", lambda: 100)
    ended, told = [], []
    monkeypatch.setattr("training.hang_watch.os._exit", ended.append)
    monkeypatch.setattr("training.hang_watch.tell_launcher", told.append)
    end_if_stuck(tmp_path / "ranks", 0, 2, 80)
    assert ended == ([1] if ends else [])
    assert (tmp_path / "ranks" / ENDED).exists() == ends
    assert all("rank 1: failed: no more disk" in message for message in told if failed)


def test_disk_that_is_full_ends_no_run(tmp_path, monkeypatch):
    """No rank can note that it moves."""
    notes, asked = [], []

    def full(*arguments):
        notes.append(arguments)
        if len(notes) == 20:  # five times the timeout
            raise StopIteration
        raise OSError("No space left on device")

    monkeypatch.setattr("training.hang_watch.note", full)
    monkeypatch.setattr("training.hang_watch.end_if_stuck", lambda *arguments: asked.append(arguments))
    # The watch runs in this thread: one of its own would outlive this test.
    run = lambda target, **_: SimpleNamespace(start=target)  # noqa: E731
    monkeypatch.setattr("training.hang_watch.threading", SimpleNamespace(Thread=run, get_ident=threading.get_ident))
    with pytest.raises(StopIteration):
        watch_for_hangs(Progress(phase="forward"), str(tmp_path), 0, 2, 0.2)
    assert not asked


def test_rank_that_is_furthest_behind_is_named_first(tmp_path, monkeypatch):
    notes_of(tmp_path / "ranks", [{**STILL, "moves": 9}, {**STILL, "moves": 7}, {**STILL, "moves": 8}])
    monkeypatch.setattr("training.hang_watch.time.time", lambda: 100)
    monkeypatch.setattr("training.hang_watch.os._exit", lambda status: None)
    told = []
    monkeypatch.setattr("training.hang_watch.tell_launcher", told.append)
    end_if_stuck(tmp_path / "ranks", 0, 3, 50)
    assert [line[:6] for line in told[0].splitlines()[1:]] == ["rank 1", "rank 2", "rank 0"]


def test_rank_moves_while_it_marks_or_runs_code():
    progress = Progress(phase="forward")
    sleeper = threading.Thread(target=time.sleep, args=(30,), daemon=True)
    sleeper.start()
    time.sleep(0.5)
    first = signs_of_life(progress, sleeper.ident)
    assert signs_of_life(progress, sleeper.ident) == first
    progress.enter("backward")
    assert signs_of_life(progress, sleeper.ident) != first
    assert signs_of_life(progress, threading.get_ident()) != signs_of_life(progress, sleeper.ident)


def test_reason_is_one_line_without_its_traceback():
    assert in_one_line("a.yaml: \n- one\n- two") == "a.yaml: - one - two"
    assert in_one_line("rank 1: KeyError: 'x'\nTraceback (most recent call last):\n  File a") == "rank 1: KeyError: 'x'"
    assert len(in_one_line("long " * 1000)) == LONGEST


def test_reason_is_left_for_the_last_line_once_and_not_by_ranks_that_start_again(tmp_path, monkeypatch):
    (tmp_path / "0").mkdir()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    path = str(tmp_path / "0" / "error.json")
    assert not is_first_to_fail(path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert [is_first_to_fail(path), is_first_to_fail(path)] == [True, False]
    assert not is_first_to_fail(None)  # these tests have no launcher
