"""Training loops that run beside one another, a step at a time in turn, so that all see the same machine."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from bench_work import Loop
from launching import clean_environment

CHECKED, PAIRS = 3, 20  # first steps, whose losses must agree; timed steps
STEPS_PER_LOG = 5  # timed steps between those that are timed with a log line, which come on top
TOLERANCE = 2e-5  # of the loss, relative, in fp32: Adam makes much of what rounds differently
LOGGING_STEPS = 10  # the recipes' default: a tenth of a log line is part of a step
RESAMPLES = 10_000


@dataclass
class Measured:
    """What a contender did."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each step, a tenth of a log line included
    log_line_s: float = 0.0
    peak_bytes: int = 0
    collectives: dict[str, list[int]] = field(default_factory=dict)


class Contender:
    """The processes of one loop. Between its turns they wait on a pipe and use no processor."""

    def __init__(self, loop: Loop, folder: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self.errors = open(Path(folder, f"{loop.runs}-{port}.txt"), "w+")  # noqa: SIM115 (as long as its processes)
        self.processes = []
        threads = max(1, (os.cpu_count() or 1) // loop.processes)
        variables = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        for rank in range(loop.processes):
            if loop.processes > 1:
                variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
                variables |= {"WORLD_SIZE": str(loop.processes), "LOCAL_WORLD_SIZE": str(loop.processes)}
                variables |= {"MASTER_PORT": str(port)}
            command = [sys.executable, str(Path(__file__).with_name("bench_loops.py")), json.dumps(asdict(loop))]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors, "text": True}
            self.processes.append(subprocess.Popen(command, env=clean_environment(**variables), **pipes))
        self.answer()

    def turn(self, command: str) -> tuple[float, dict[str, Any]]:
        """One step: seconds until the last rank has done it, and what rank 0 says."""
        started = time.perf_counter()
        for process in self.processes:
            process.stdin.write(command + "\n")
            process.stdin.flush()
        answer = self.answer()
        return time.perf_counter() - started, answer

    def answer(self) -> dict[str, Any]:
        """Rank 0's answer, once every rank has given one."""
        lines = [process.stdout.readline() for process in self.processes]
        if not all(lines):
            self.errors.seek(0)
            raise RuntimeError("A loop of the benchmark ended:\n" + self.errors.read()[-3000:])
        return json.loads(lines[0])

    def close(self) -> None:
        """End the processes: they do so when their pipe closes."""
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait()
            process.stdout.close()
        self.errors.close()


def run_in_turn(loops: Mapping[str, Loop], pairs: int = PAIRS, tolerance: float = TOLERANCE) -> dict[str, Measured]:
    """Measure loops that do equal work. Each round gives every loop one step; the order moves on by one per round.

    Raises:
        RuntimeError: a loop ended, or the losses of the first steps on the same rows differ: then work is not equal.
    """
    measured = {name: Measured() for name in loops}
    logged: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        contenders = {}
        for name, loop in loops.items():
            contenders[name] = Contender(loop, folder)
            stack.callback(contenders[name].close)
        timed = [command for i in range(1, pairs + 1) for command in ["step"] + ["log"] * (i % STEPS_PER_LOG == 0)]
        for step, command in enumerate(["check"] * (CHECKED + 1) + timed):  # a loop may log a step in the next turn
            for name in names[step % len(names) :] + names[: step % len(names)]:
                seconds, answer = contenders[name].turn(command)
                if command == "check":
                    measured[name].losses = answer["losses"][:CHECKED]
                else:
                    (measured[name].seconds if command == "step" else logged[name]).append(seconds)
            if step == CHECKED:
                for rows in {loop.rows for loop in loops.values()}:
                    check_losses({n: found.losses for n, found in measured.items() if loops[n].rows == rows}, tolerance)
        for name, contender in contenders.items():
            _, answer = contender.turn("measure")
            measured[name].peak_bytes, measured[name].collectives = answer["peak_bytes"], answer["collectives"]
    for name, found in measured.items():
        found.log_line_s = max(0.0, median(logged[name]) - median(found.seconds))
        found.seconds = [seconds + found.log_line_s / LOGGING_STEPS for seconds in found.seconds]
    return measured


def check_losses(losses: Mapping[str, list[float]], tolerance: float) -> None:
    """Raise RuntimeError unless all losses of the first steps agree."""
    first, *others = losses
    for other in others:
        errors = [abs(a - b) / b for a, b in zip(losses[other], losses[first])]
        if len(errors) < CHECKED or not max(errors) <= tolerance:
            raise RuntimeError(f"unequal work: losses of {first}: {losses[first]}, of {other}: {losses[other]}")


def speed_ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Our speed by theirs on equal work: the median over pairs of steps, and its 95% bounds (bootstrap)."""
    ratios = np.array(theirs) / np.array(ours)
    draws = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    lower, upper = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return float(np.median(ratios)), float(lower), float(upper)
