"""What a user reads when a run fails: rank, step, place, cause, what to do; last on the screen, from every launcher.

The faults are real (faulty_run.py), on rank 1 of 2, through `accelerate launch`.
"""

import json
import signal
from types import SimpleNamespace

import pytest
import torch
from in_process import finetune_in_process
from launching import RECIPES, accelerate_launch, in_fp32
from rows.batches import fetch_ahead, training_steps
from tools.diagnosis.failures import WAIT_S, explained_failures, place_of
from tools.diagnosis.hang_watch import ENDED, end_if_apart
from tools.diagnosis.memory_diagnosis import new_bytes
from tools.planner.advice import next_knobs
from training.last_words import LONGEST, in_one_line, is_first_to_fail

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
    first = "rank 1, step 2: in the loop: KeyError: 'the disk is gone'"
    assert shown.count(f"Error: {first}") == 1
    tail = shown[shown.index("Root Cause") :]  # of the launcher's own last lines
    assert first in tail and "faulty_run.py" in tail
    assert shown.endswith(f"\nFailed: {first}\n")  # behind the launcher's box
    assert "rank 0, step" not in shown  # it only lost a peer
    status = json.loads((tmp_path / "run.json").read_text())["status"]
    assert status.startswith("failed: ") and "the disk is gone" in status
    assert "the disk is gone" in (tmp_path / "report.md").read_text()


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
    assert "rank 1: step 2, finetune.py:" in at and "calling faulty" in at
    assert at.index("rank 1: step 2") < at.index("rank 0: step 2, ")


@pytest.mark.parametrize(
    ("error", "place"),
    [
        (KeyError("input_ids"), "reading the data"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "reading the data"),
    ],
)
def test_place_of_a_row_that_cannot_be_read(error, place):
    class Broken(list):
        def __getitem__(self, index):
            raise error

    model = torch.nn.Linear(1, 1)
    with pytest.raises(type(error)) as caught:
        next(training_steps(Broken([{}]), 1, 1, 0, 1, seed=0, pad_token_id=0))
    assert place_of(caught.value, model) == place
    if isinstance(error, RuntimeError):  # its signal comes anywhere
        assert place_of(error, model) == place


def test_rank_is_silent_where_rank_0_has_said_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.diagnosis.failures.signal.signal", lambda *action: None)
    reason = "a.jsonl, line 7: is not JSON"
    monkeypatch.setattr(
        "tools.diagnosis.failures.time.sleep", lambda _: (tmp_path / "failure-rank-0.txt").write_text(reason)
    )
    accelerator, arguments = SimpleNamespace(process_index=1), SimpleNamespace(output_dir=tmp_path)
    with pytest.raises(SystemExit) as ended, explained_failures(accelerator, None, None, arguments, None, ""):
        raise SystemExit(f"\nError: {reason}\n")
    assert ended.value.code == 1 and not (tmp_path / "failure-rank-1.txt").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_other_ranks_leave_rank_0_the_first_word_on_what_all_met(tmp_path, monkeypatch, rank):
    done = []
    monkeypatch.setattr("tools.diagnosis.failures.time.sleep", lambda seconds: done.append(seconds))
    monkeypatch.setattr("tools.diagnosis.failures.signal.signal", lambda *action: done.append(action))
    monkeypatch.setattr("tools.diagnosis.failures.tell_launcher", done.append)
    accelerator, arguments = SimpleNamespace(process_index=rank), SimpleNamespace(output_dir=tmp_path)
    with pytest.raises(SystemExit), explained_failures(accelerator, None, None, arguments, None, ""):
        raise SystemExit("\nError: a.jsonl, line 7: is not JSON\n")
    waits = [(signal.SIGTERM, signal.SIG_DFL), WAIT_S] if rank else []
    assert done == [*waits, "a.jsonl, line 7: is not JSON"]
    assert (tmp_path / f"failure-rank-{rank}.txt").read_text() == done[-1]


def test_place_of_rows_that_cannot_be_sent_is_not_the_optimizers(monkeypatch):
    """fetch_ahead's own function has the name of one of the optimizer's."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory")))
    steps = iter([([{"labels": torch.ones(1, 2, dtype=torch.long)}], {}, [])])
    with pytest.raises(RuntimeError) as caught:
        fetch_ahead(steps, torch.device("meta")).result()
    assert place_of(caught.value, torch.nn.Linear(1, 1)) == "reading the data"
    (advice,) = next_knobs("reading the data", None, None, "finetune.py", 2)
    assert "--dataloader_num_workers" in advice


def test_memory_by_part_counts_each_storage_once_and_passes_over_what_has_none():
    seen, dense = {}, torch.ones(4, 4)
    assert [new_bytes(value, seen) for value in (dense, dense[1:], torch.eye(3).to_sparse(), None)] == [64, 0, 0, 0]


def notes_of(folder, notes):
    folder.mkdir()
    for rank, values in enumerate(notes):
        (folder / f"rank-{rank}.json").write_text(json.dumps({"at": "step 1, a", "calls": "", **values}))


@pytest.mark.parametrize(
    ("notes", "ends"),
    [
        ([{"since": 0, "noted": 100}, {"since": 0, "noted": 100}], False),  # both in one place: a long evaluation
        ([{"since": 0, "noted": 100}, {"at": "step 2, a", "since": 0, "noted": 100}], True),
        ([{"since": 0, "noted": 100}, {"at": "step 2, a", "since": 95, "noted": 100}], False),  # it moves
        ([{"since": 0, "noted": 100}, {"since": 0, "noted": 20}], True),  # stopped, in the same place
    ],
)
def test_ranks_end_only_where_they_are_apart_and_none_moves(tmp_path, monkeypatch, notes, ends):
    notes_of(tmp_path / "ranks", notes)
    monkeypatch.setattr("tools.diagnosis.hang_watch.time.time", lambda: 100)
    ended = []
    monkeypatch.setattr("tools.diagnosis.hang_watch.os._exit", ended.append)
    end_if_apart(tmp_path / "ranks", 0, 2, 50, 0)
    assert ended == ([1] if ends else [])
    assert (tmp_path / "ranks" / ENDED).exists() == ends


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
