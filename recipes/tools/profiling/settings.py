"""The same few steps of a script under other settings: what recompute costs, and what coarser units return.

Each setting runs in fresh processes, one started by each rank, one setting after another: the script itself, with the
same arguments and a YAML in which one key differs, in a folder that is removed afterwards. So the run that is measured
is the real one, each begins with an empty device, and one that runs out of memory in the middle of a collective is an
answer and no hang: its processes are ended. Nothing is trained that is kept.
"""

import argparse
import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from hooks.yaml_of_run import find_launch, load_yaml
from training.arguments import parse_arguments
from training.profiling import WARM_UP_STEPS
from training.run_files import read_metrics

POLL_S, GRACE_S = 0.1, 5.0  # a rank that failed with the others has so long to say why itself
NO_MEMORY = ("out of memory", "alloc_failed", "can't allocate memory", "memoryerror")
ECHOES = ("said nothing", "Connection closed", "Connection reset", "NCCL")  # of another rank's end
RECOMPUTE = "fsdp_activation_checkpointing"
WITHOUT_RECOMPUTE = {RECOMPUTE: False, f"{RECOMPUTE}_offload": False, "hook_checkpoint_function": None}
# Steps without an end, each logged, and nothing else: no evaluation, answers, checkpoints or trackers.
OVERRIDES = "--profile 0 --max_steps 1000000 --logging_steps 1 --eval_steps 0 --save_steps 0 "
OVERRIDES += "--load_best_model_at_end false --predict_with_generate false --resume_from_checkpoint none "
OVERRIDES += "--dataset_test_split none --report_to none"


@dataclass
class Setting:
    """What is changed against the run as asked (None: the key is taken out), or why it is not measured."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    left_out: str = ""


@dataclass
class Ranks:
    """Where the ranks tell each other how far their processes are. No process group: it would not survive a fork."""

    rank: int
    world_size: int
    store: dist.Store

    def gather(self, key: str, text: str) -> list[str]:
        """What every rank says under a key. Waits for all of them."""
        self.store.set(f"{key}/{self.rank}", text)
        return [self.store.get(f"{key}/{rank}").decode() for rank in range(self.world_size)]

    def raise_flag(self, key: str) -> None:
        """Tell all ranks."""
        self.store.add(key, 1)

    def is_raised(self, *keys: str) -> bool:
        """Whether a rank has raised any of these."""
        return any(self.store.add(key, 0) for key in keys)

    def leave(self) -> None:
        """Rank 0, which may hold the store, is the last to go."""
        self.store.add("left", 1)
        while self.rank == 0 and self.store.add("left", 0) < self.world_size:
            time.sleep(POLL_S)


def main() -> None:
    """Measure the settings and end, with status 1 if not even the run as asked could be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="to measure, after the warm-up")
    parser.add_argument("script", help="in the folder of this command; its arguments follow")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if given.steps < 1:
        parser.error(f"--steps: found {given.steps}, allowed: 1 or more")
    try:
        script = importlib.import_module(Path(given.script).stem)
        kind = script.train.__annotations__["arguments"]
    except (ModuleNotFoundError, AttributeError) as error:
        parser.error(f"{given.script} is no training script of this folder: {error}")
    try:
        arguments = parse_arguments(given.words, sample_dir=script.SAMPLE_DIR, kind=kind)
        raw = load_yaml(find_launch(arguments.accelerate_config).path)
    except ValueError as error:
        sys.exit(f"\nError: {error}\n" if os.environ.get("RANK", "0") == "0" else 1)
    sys.argv = [given.script, *given.words]  # what each run is started with
    run_settings(script.main, raw, Path(arguments.output_dir, "profile", "compare"), given.steps)


def run_settings(main: Callable[[], None], raw: dict[str, Any], folder: Path, steps: int) -> None:
    """Run each setting, print the table on rank 0 and write it beside the folder that the runs write to."""
    sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")  # it minds that processes are ended
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # from a launcher that is stopped: tidy up here too
    ranks = meet()
    try:
        found = [run_setting(main, Setting("as asked"), raw, folder, steps, ranks)]
        keys = json.loads(ranks.gather("keys", json.dumps(found[0].pop("keys", None)))[0])
        for setting in settings(keys) if keys else []:
            done = {"name": setting.name, "failure": setting.left_out, "is_left_out": True}
            found.append(done if setting.left_out else run_setting(main, setting, raw, folder, steps, ranks))
            found[-1].pop("keys", None)
    finally:
        if ranks.rank == 0:
            shutil.rmtree(folder / "run", ignore_errors=True)
    if ranks.rank == 0:
        has_failed = any("failure" in run and not run["is_left_out"] for run in found)
        if not has_failed:
            shutil.rmtree(folder, ignore_errors=True)
        logs = [f"what the runs printed: {folder}"] if has_failed else []
        print("\n".join([*table(found, steps), *logs]), flush=True)
        (folder.parent / "compare.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    ranks.leave()
    sys.exit(0 if keys else 1)


def meet() -> Ranks:
    """Connect the ranks that a launcher started; plain python is one rank by itself."""
    if "RANK" not in os.environ:
        return Ranks(0, 1, dist.HashStore())
    store, rank, world_size = next(dist.rendezvous("env://"))
    return Ranks(rank, world_size, dist.PrefixStore("profile_compare", store))


def settings(keys: dict[str, Any]) -> list[Setting]:
    """What to compare a run with, from the YAML's keys as they are in effect."""
    is_recomputing = keys[RECOMPUTE]
    without = Setting("recompute off", WITHOUT_RECOMPUTE, "" if is_recomputing else "it is off already")
    blocks, threshold = 2 * keys["hook_wrap_blocks_per_unit"], 2 * keys["fsdp_min_num_params"]
    coarser = Setting("coarser units", left_out="the whole model is one unit already")
    if keys["hook_wrap_function"]:
        coarser.left_out = "hook_wrap_function decides the units"
    elif keys["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP":
        coarser = Setting(f"{blocks} blocks per unit", {"hook_wrap_blocks_per_unit": blocks})
    elif keys["fsdp_auto_wrap_policy"] == "SIZE_BASED_WRAP":
        coarser = Setting(f"units from {threshold:,} parameters", {"fsdp_min_num_params": threshold})
    return [without, coarser]


def changed_yaml(raw: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The YAML's content with keys of its fsdp_config changed, however they are spelt there, or taken out (None)."""
    names = {*changes, *(name.removeprefix("fsdp_") for name in changes)}
    kept = {name: value for name, value in (raw.get("fsdp_config") or {}).items() if name not in names}
    return {**raw, "fsdp_config": {**kept, **{name: value for name, value in changes.items() if value is not None}}}


def run_setting(
    main: Callable[[], None], setting: Setting, raw: dict[str, Any], folder: Path, steps: int, ranks: Ranks
) -> dict[str, Any]:
    """Start one process per rank, measure `steps` steps after the warm-up on rank 0, and end the processes."""
    name, output, failure = setting.name, folder / "run", ""
    log = folder / f"{name.replace(' ', '_')}-{ranks.rank}.log"
    config = folder / "changed.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    if ranks.rank == 0:
        shutil.rmtree(output, ignore_errors=True)
        config.write_text(yaml.safe_dump(changed_yaml(raw, setting.changes)), encoding="utf-8")
    port = int(ranks.gather(f"{name}/port", str(port))[0])
    argv = [*sys.argv, *OVERRIDES.split(), "--output_dir", str(output), "--accelerate_config", str(config)]
    # A fork is ready at once. Where there is a device, its driver may have been asked for, which no fork survives.
    method = "spawn" if torch.accelerator.is_available() else "fork"
    process = multiprocessing.get_context(method).Process(target=run_script, args=(main, argv, port, str(log)))
    process.start()
    try:
        while not ranks.is_raised(f"{name}/done", f"{name}/failed"):
            process.join(POLL_S)
            if ranks.rank == 0 and len(logged_steps(output)) >= WARM_UP_STEPS + steps:
                ranks.raise_flag(f"{name}/done")
            elif process.exitcode is not None:
                ranks.raise_flag(f"{name}/failed")
        if not ranks.is_raised(f"{name}/done"):  # after it, ranks only lose the others, whose processes were ended
            process.join(GRACE_S)
            failure = last_words(log, process.exitcode) if process.exitcode is not None else ""
        peak_gib = peak_host_gib(process.pid)
    finally:
        process.kill()
        process.join()
    failures = ranks.gather(f"{name}/end", failure)
    if any(failures):
        return {"name": name, "failure": first_cause(failures), "is_left_out": False}
    return measured(setting, logged_steps(output)[WARM_UP_STEPS:][:steps], output, peak_gib) if ranks.rank == 0 else {}


def run_script(main: Callable[[], None], argv: list[str], port: int, log: str) -> None:
    """Be one rank of a run by itself: the launcher's environment with a port of its own, output into a file."""
    os.setpgrp()  # a Ctrl-C is for the rank that started this: the run itself would save a checkpoint
    if sys.platform == "linux":  # PR_SET_PDEATHSIG: end with the rank that started it, however that ends
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    os.environ.pop("TORCHELASTIC_ERROR_FILE", None)  # what fails in here is not this rank's failure
    sys.argv = argv
    main()


def logged_steps(output: Path) -> list[dict[str, Any]]:
    """The steps that a run has logged."""
    return [row for row in read_metrics(output / "metrics.jsonl") if "loss" in row]


def measured(setting: Setting, rows: list[dict[str, Any]], output: Path, peak_host: float | None) -> dict[str, Any]:
    """Speed and peak memory of the steps logged, and the keys in effect."""
    wrap = json.loads((output / "wrap_report.json").read_text(encoding="utf-8"))
    keys = {key: entry["value"] for key, entry in wrap["keys"].items()}
    unchanged = [key for key, value in setting.changes.items() if keys[key] != value]
    if unchanged:
        failure = f"{unchanged[0]} is set on the launcher's command line; leave it out there"
        return {"name": setting.name, "failure": failure, "is_left_out": True}
    peaks = [row["peak_mem_gib"] for row in rows if "peak_mem_gib" in row]
    return {
        "name": setting.name,
        "changes": setting.changes,
        "tokens_per_second_per_rank": [row["tokens_per_second_per_gpu"] for row in rows],
        "memory_gib": max(peaks) if peaks else peak_host,
        "keys": keys,
    }


def last_words(log: Path, exit_status: int) -> str:
    """What a process that ended by itself said last."""
    if exit_status == -signal.SIGKILL:
        return "killed (out of memory on the host?)"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("Error: ")), (lines or ["said nothing"])[-1])
    return said.removeprefix("Error: ")[:300]


def first_cause(failures: list[str]) -> str:
    """Of what ranks say, the cause: most only lost their connection to the one that failed."""
    said = [f"rank {rank}: {text}" for rank, text in enumerate(failures) if text]
    memory = [text for text in said if any(sign in text.lower() for sign in NO_MEMORY)]
    others = [text for text in said if not any(echo in text for echo in ECHOES)]
    return f"does not fit ({memory[0]})" if memory else (others or said)[0]


def table(found: list[dict[str, Any]], steps: int) -> list[str]:
    """The comparison for the screen. A ratio is the median over steps, each against the same rows in the run as asked;
    how far apart those are tells what is noise."""
    lines = [f"the same {steps} step(s) each, after {WARM_UP_STEPS} to warm up; ratios to the run as asked"]
    lines.append(f"{'setting':<32}{'tokens/s per rank':>18}  {'ratio (of steps)':<24}{'peak GiB':>9}{'ratio':>7}")
    for run in found:
        if "failure" in run:
            lines.append(f"{run['name']:<32}{'not measured: ' if run['is_left_out'] else ''}{run['failure']}")
            continue
        speeds, memory = run["tokens_per_second_per_rank"], run["memory_gib"]
        ratios = [speed / asked for speed, asked in zip(speeds, found[0]["tokens_per_second_per_rank"])]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        asked = found[0]["memory_gib"]
        peak = f"{memory:>9.3f}{memory / asked:>7.2f}" if memory and asked else f"{'?':>9}{'?':>7}"
        lines.append(f"{run['name']:<32}{statistics.median(speeds):>18,.0f}  {ratio:<24}{peak}")
    return lines


def peak_host_gib(pid: int) -> float | None:
    """The most host memory that a process has had, None where /proc does not tell."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**20
    return None
