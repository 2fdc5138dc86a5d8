"""The run report: made at the end of a run however it ends, made again from its folder, and runs side by side."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys

import pytest
import report as report_command
import torch
from in_process import Run, finetune_in_process
from launching import RECIPES, small_model
from tools.report import run_report as report
from tools.report.comparison import compare_runs_report
from tools.report.run_report import read_run
from training import metrics
from training.run_files import read_metrics
from training.run_record import RunRecord

SAMPLE, MODEL = RECIPES / "sample", small_model()
PLOTS = ("loss.png", "speed.png", "optimization.png", "memory.png")


def rows_of(markdown, heading=None):
    """The first table below a heading, without its first two lines: first cell -> the others."""
    text = markdown.partition(f"\n{heading}\n")[2] if heading else markdown
    table = re.search(r"^\|.*\n\|[-|]+\n((?:\|.*\n)*)", text, re.MULTILINE)[1]
    cells = [[part.strip() for part in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
    return {first: others[0] if len(others) == 1 else others for first, *others in cells}


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """A short run on a few rows; the last evaluation and the answers included."""
    folder = tmp_path_factory.mktemp("data")
    for name, count in (("train", 40), ("test", 4)):
        lines = (SAMPLE / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    common = ["--model_name_or_path", MODEL, "--dataset_name", folder, "--max_length", 128]
    common += ["--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 1, "--logging_steps", 1]
    return [*common, "--learning_rate", 1e-3, "--report_to", "none"]


@pytest.fixture(scope="module")
def finished(arguments, tmp_path_factory):
    """(its folder, what it printed) of a run of 3 steps that saves its second."""
    folder = tmp_path_factory.mktemp("finished") / "one"
    more = ["--max_steps", 3, "--save_steps", 2, "--eval_steps", 2, "--predict_with_generate", "--max_new_tokens", 4]
    done = finetune_in_process([*arguments, *more, "--output_dir", folder], folder.parent / "log", reports=True)
    assert done.codes == [0, 0], done.output[-4000:]
    return folder, done.output


def test_report_holds_the_numbers_of_the_run(finished):
    folder, output = finished
    text = (folder / "report.md").read_text()
    verdict = rows_of(text)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses, evaluated = ([row[name] for row in rows if name in row] for name in ("loss", "eval_loss"))
    assert len(losses) == 3 and len(evaluated) == 3
    assert verdict["status"] == "finished" and verdict["last logged step"] == "3 of 3"
    assert verdict["loss"] == f"{losses[0]:.5g} (step 1) -> {losses[-1]:.5g} (step 3)"
    assert verdict["eval loss"].startswith(f"{evaluated[0]:.5g} (step 0) -> {evaluated[-1]:.5g} (step 3), lowest ")
    assert f"lowest {min(evaluated):.5g} " in verdict["eval loss"]
    assert verdict["exact match"] == "0.0% before -> 0.0% after"
    speed = statistics.median(row["tokens_per_second_per_gpu"] for row in rows if "loss" in row)
    assert verdict["speed"].startswith(f"{speed:,.0f} tok/s/gpu ") and "on 2 process(es)" in verdict["speed"]
    for name in PLOTS:
        assert f"]({name})" in text and (folder / name).read_bytes().startswith(b"\x89PNG")
    assert output.count(f"report: {folder / 'report.md'}\n") == 1


def test_report_holds_what_metrics_do_not(finished):
    folder, output = finished
    text = (folder / "report.md").read_text()
    wrap = json.loads((folder / "wrap_report.json").read_text())
    section = rows_of(text, "## What FSDP did")
    assert section["units, the root included"] == str(wrap["num_units"]) == "4"
    assert section["blocks that recompute"] == "3 of 3"
    changed = rows_of(text, "## Arguments")
    assert changed["--max_steps"] == ["3", "-1"] and changed["--learning_rate"] == ["0.001", "2e-05"]
    assert "--weight_decay" not in changed
    assert rows_of(text, "<details><summary>All arguments</summary>")["--weight_decay"] == ["0.0", "0.0"]
    assert rows_of(text, "<details><summary>All keys</summary>")["hook_norm_dtype"] == ["None", "default"]
    assert rows_of(text, "## Versions")["torch"] == torch.__version__
    samples = text.partition("\n## Samples\n")[2]
    assert samples.count("  before ") == samples.count("  after ") == 3 and "exact match of 4" in samples
    for line in ("train data", "micro-batch 2 x accumulation 1 x ranks 2"):
        assert line in output and line in text.partition("\n## Data\n")[2]


def test_diagnose_makes_the_same_report_again_without_torch(finished):
    folder, _ = finished
    before = {name: (folder / name).read_bytes() for name in ("report.md", *PLOTS)}
    for name in before:
        (folder / name).unlink()
    done = subprocess.run([sys.executable, RECIPES / "report.py", folder], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"report: {folder / 'report.md'}\n", done.stderr
    assert (folder / "report.md").read_bytes() == before["report.md"]
    assert all((folder / name).stat().st_size == len(before[name]) for name in PLOTS)
    code = "import sys, report; print({'torch', 'matplotlib', 'transformers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=RECIPES, text=True) == "set()\n"


def test_resumed_run_keeps_earlier_steps_and_is_compared_by_what_differs(arguments, finished, tmp_path, monkeypatch):
    """The second run is stopped by a signal, so that its report says that too."""
    one, two = finished[0], tmp_path / "two"
    two.mkdir()
    (two / "metrics.jsonl").write_bytes((one / "metrics.jsonl").read_bytes())
    more = ["--resume_from_checkpoint", one / "checkpoint-2", "--output_dir", two, "--max_steps", 10_000]
    run = Run([*arguments, *more], tmp_path / "log", reports=True)
    run.wait_for("step 4/")
    os.kill(run.ranks[0].pid, signal.SIGTERM)
    assert run.wait().codes == [143, 143]
    verdict = rows_of((two / "report.md").read_text())
    first = next(row["loss"] for row in read_metrics(one / "metrics.jsonl") if "loss" in row)
    assert (
        re.fullmatch(r"\d+ of 10000, resumed at step 2", verdict["last logged step"])
        and int(verdict["last logged step"].split()[0]) >= 4
    )
    assert verdict["loss"].startswith(f"{first:.5g} (step 1) -> ") and "(step 3)" not in verdict["loss"]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["report.py", str(one), str(two)])
    report_command.main()
    text = (tmp_path / "comparison.md").read_text()
    assert text.startswith("# 2 runs") and "| one | two |" in text and "(comparison.png)" in text
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    rows = rows_of(text)
    assert rows["status"] == ["finished", "stopped by a signal"] and rows["loss"][1] == verdict["loss"]
    settings = {name: values for name, values in rows.items() if name.startswith(("--", "YAML", "version"))}
    assert settings == {
        "--max_steps": ["3", "10000"],
        "--save_steps": ["2", "0"],
        "--eval_steps": ["2", "0"],
        "--predict_with_generate": ["True", "False"],
        "--max_new_tokens": ["4", "64"],
        "--resume_from_checkpoint": ["None", str(one / "checkpoint-2")],
    }


def test_non_finite_loss_is_reported_with_its_message(arguments, tmp_path):
    """A step this large leaves no finite weight behind."""
    folder = tmp_path / "run"
    broken = ["--learning_rate", 1e38, "--max_grad_norm", 1e9, "--max_steps", 4, "--output_dir", folder]
    done = finetune_in_process([*arguments, *broken], tmp_path / "log", reports=True)
    assert done.codes == [1, 1]
    (message,) = re.findall(r"^Error: (.*)$", done.output, re.MULTILINE)
    status = json.loads((folder / "run.json").read_text())["status"]
    assert status.startswith(f"failed: {message}") and "step" in message
    text = (folder / "report.md").read_text()
    assert rows_of(text)["status"] == report.cell(f"failed: {message}")
    assert rows_of(text)["last logged step"].endswith(" of 4") and "(loss.png)" in text
    assert done.output.count("report: ") == 1


def test_run_that_loses_a_rank_is_reported_as_failed(arguments, tmp_path):
    """The main process sees the connection break, outside of stop_together."""
    folder = tmp_path / "run"
    run = Run([*arguments, "--max_steps", 10_000, "--output_dir", folder], tmp_path / "log", reports=True)
    run.wait_for("step 2/")
    run.ranks[1].kill()
    assert run.wait().codes[0] == 1
    verdict = rows_of((folder / "report.md").read_text())
    assert verdict["status"].startswith("failed: ") and "Error: " in verdict["status"]
    assert int(verdict["last logged step"].split()[0]) >= 2


def write_run(folder, rows=(), plan=None, **facts):
    """A run's folder as a run leaves it."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.json").write_text(json.dumps({"status": "finished", **facts}))
    if plan is not None:
        (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def test_prediction_stands_beside_the_measured_peak(tmp_path):
    gpu = [{"step": n, "loss": 1.0, "peak_mem_gib": 1.5 + n / 4, "peak_allocated_gib": 1.0} for n in (1, 2)]
    gpu[1]["num_alloc_retries"] = 3
    step = {"peak": 2**30, "reserved": 2**31, "parts": {"weights": 2**29}, "peak_at": "backward of block 3"}
    run = write_run(tmp_path / "gpu", gpu, [{"name": "first", "step": step}, {"name": "second", "step": {}}])
    report.write_report(run)
    text = (run / "report.md").read_text()
    verdict = rows_of(text)
    assert verdict["memory of rank 0"] == "2.000 GiB reserved, 1.000 GiB allocated, 3 allocator retries"
    assert verdict["predicted memory"] == (
        "predicted reserved peak 2.000 GiB, measured 2.000 GiB (+0%); "
        "predicted allocated peak 1.000 GiB, measured 1.000 GiB (+0%)"
    )
    assert rows_of(text, "## Predicted memory by part") == {"weights": "0.500"} and "backward of block 3" in text
    cpu = write_run(tmp_path / "cpu", [{"step": 1, "live_tensors_gib": 0.25, "process_gib": 1.0}], {"step": step})
    verdict = report.verdict(read_run(cpu))
    assert verdict["memory of rank 0"] == "0.250 GiB in live tensors, 1.000 GiB of the process"
    assert verdict["predicted memory"].startswith("predicted peak 1.000 GiB, not measured on a CPU")


def test_no_value_breaks_a_table_or_a_block(tmp_path):
    nasty = "a|b\\|c\nd\u2028e `x` <details> *y*"
    facts = {"arguments": {"name": nasty}, "defaults": {"name": "a"}, "command": ["x.py", nasty], "data": ["```", "x"]}
    run = write_run(tmp_path / "a|b$_{", [{"step": 1, "loss": 1.0}], samples="````\n# no heading", **facts)
    report.write_report(run)
    text = (run / "report.md").read_text()
    assert rows_of(text, "## Arguments") == {"--name": [report.cell(nasty), "a"]}
    assert report.cell(nasty) == r"a\|b\\\|c<br>d<br>e \`x\` &lt;details> \*y\*"
    assert "\n`````\n````\n# no heading\n`````\n" in text
    other = write_run(tmp_path / "_b", [{"step": 1, "loss": 2.0}], arguments={"name": "plain"})
    compare_runs_report([run, other], tmp_path / "out")
    assert rows_of((tmp_path / "out" / "comparison.md").read_text())["--name"] == [report.cell(nasty), "plain"]


def test_torn_last_line_and_missing_files_leave_a_report(tmp_path):
    run = write_run(tmp_path / "run", [{"step": 1, "loss": 3.0}, {"step": 2, "loss": float("nan")}], status="running")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    report.write_report(run)
    verdict = rows_of((run / "report.md").read_text())
    assert verdict["loss"] == "3 (step 1) -> nan (step 2)" and verdict["status"] == report.KILLED
    (run / "run.json").unlink()
    report.write_report(run)
    assert rows_of((run / "report.md").read_text())["status"] == "unknown: no run.json"


def test_traceback_is_one_line_in_the_verdict_and_whole_below(tmp_path):
    status = 'failed: rank 1: Traceback (most recent call last):\n  File "x.py"\nRuntimeError: no memory\nmore\n'
    run = write_run(tmp_path / "run", status=status)
    report.write_report(run)
    text = (run / "report.md").read_text()
    assert rows_of(text)["status"] == "failed: RuntimeError: no memory" and f"```\n{status}\n```" in text
    assert rows_of(text)["loss"] == "not measured" and "png" not in text


def test_report_without_matplotlib_and_on_a_full_disk_fails_no_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as where it is not installed
    said = []
    run = write_run(tmp_path / "run", [{"step": 1, "loss": 3.0}])
    RunRecord(run, {"total_steps": 1}, said.append).end("finished")
    assert "without plots" in said[0] and "step 1" in (run / "report.md").read_text()
    record = RunRecord(run, {}, said.append)
    monkeypatch.setattr(
        "training.run_files.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("No space left on device"))
    )
    record.end("finished")
    assert len(said) == 3 and all("could not be written" in line and "No space left" in line for line in said[1:])


def test_folder_that_is_no_run_is_named(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    for folders in ([tmp_path], [run, tmp_path]):
        monkeypatch.setattr(sys, "argv", ["report.py", *map(str, folders), "--output_dir", str(tmp_path / "out")])
        with pytest.raises(SystemExit) as stopped:
            report_command.main()
        assert stopped.value.code == (
            f"Error: {tmp_path} is not the output folder of a run: it holds neither metrics.jsonl nor run.json."
        )
    (run / "plan.json").write_text("{")
    with pytest.raises(ValueError, match=r"plan\.json is not readable"):
        report.write_report(run)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", '{"arguments": 5}'),
        ("run.json", '{"started": "2026-01-01T00:00:00", "ended": "yesterday"}'),
        ("wrap_report.json", '{"units": 3}'),
        ("plan.json", '{"step": {"peak": "a"}}'),
        ("metrics.jsonl", '{"step": 1, "loss": 1' + 400 * "0" + "}"),
    ],
)
def test_damaged_values_are_one_line_and_no_traceback(tmp_path, monkeypatch, name, content):
    run = write_run(tmp_path / "run", [{"step": 1, "loss": 3.0}])
    with (run / "metrics.jsonl").open("ab") as lines:
        lines.write(b'\xff\xfe\n{"step": "two", "loss": 1}\n')
    diagnosed(run, monkeypatch)
    assert "loss | 3 (step 1)" in (run / "report.md").read_text()
    (run / name).write_text(content)
    with pytest.raises(SystemExit) as stopped:
        diagnosed(run, monkeypatch)
    assert stopped.value.code.startswith(f"Error: {run}: a file there holds other values than a run writes: run.json")


def diagnosed(run, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["report.py", str(run)])
    report_command.main()


def test_memory_counts_live_tensors_and_the_process():
    before = metrics.memory(torch.device("cpu"))
    held = torch.ones(2**27)  # 512 MiB: more than the process has to spare
    after = metrics.memory(torch.device("cpu"))
    assert set(after) == {"live_tensors_gib", "process_gib"}
    assert after["live_tensors_gib"] - before["live_tensors_gib"] == pytest.approx(held.nbytes / 2**30, rel=0.01)
    assert after["process_gib"] - before["process_gib"] == pytest.approx(held.nbytes / 2**30, rel=0.5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_memory_of_a_gpu_holds_both_peaks_and_the_retries():
    device = torch.device("cuda")
    before = metrics.memory(device)
    held = torch.ones(2**26, device=device)  # 256 MiB
    del held
    peaks = metrics.memory(device)
    assert peaks["peak_mem_gib"] >= peaks["peak_allocated_gib"] >= 0.25
    assert peaks["num_alloc_retries"] == before["num_alloc_retries"]  # counted from the start of the process
    assert metrics.memory(device)["peak_allocated_gib"] < peaks["peak_allocated_gib"]
