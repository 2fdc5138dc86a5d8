"""Start scripts the way a user does, away from this process's environment; wait for them as long as they work."""

import atexit
import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "accelerate_configs"
RECIPES = ROOT / "recipes"
PLAIN_ARITHMETIC = str(ROOT / "tests" / "plain_arithmetic")  # on PYTHONPATH: every process computes so
IDLE_S, IDLE_SHARE = 120.0, 0.05  # a run that used less than this share of one core for so long hangs


def private_bytes(process: int | str = "self") -> int:
    """Memory of a process that is no file's; 0 when it is over."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
    return 0


@functools.cache
def in_fp32(name: str = "default") -> Path:
    """A scenario's YAML that computes in fp32, with its own units, recompute and reduction; for what is not about bf16,
    in which a CPU that emulates it takes ten times as long."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    text, path = (CONFIGS / f"{name}.yaml").read_text(), Path(folder, f"{name}.yaml")
    assert text.count("\nmixed_precision: bf16\n") == 1
    path.write_text(text.replace("\nmixed_precision: bf16\n", "\nmixed_precision: 'no'\n"))
    return path


def part_of_sample(folder: Path, test_rows: int) -> Path:
    """The sample's data with some of its 256 test rows: answering them all takes longer than training."""
    folder.mkdir(parents=True)
    for name, rows in (("train", None), ("test", test_rows)):
        lines = (RECIPES / "sample" / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:rows]), encoding="utf-8")
    return folder


@functools.cache
def small_model() -> Path:
    """The sample's model without its last three blocks, for what does not depend on its size; with two blocks per unit
    the last unit has one."""
    folder = Path(tempfile.mkdtemp(), "model")
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    shutil.copytree(RECIPES / "sample" / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    weights = load_file(folder / "model.safetensors")
    kept = {name: w for name, w in weights.items() if not re.match(r"model\.layers\.[345]\.", name)}
    assert config["num_hidden_layers"] == 6 and len(weights) - len(kept) == 3 * 9
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def content_hash(path: Path) -> str:
    """Of a file's bytes; of a safetensors file of what it says, since its header holds the metadata in any order."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        end = 8 + int.from_bytes(data[:8], "little")
        data = json.dumps(json.loads(data[8:end]), sort_keys=True).encode() + data[end:]
    return hashlib.sha256(data).hexdigest()


class Patience:
    """Tells processes that hang from slow ones: not by how long they take, but by CPU time that no longer grows.

    On a machine ten times slower, or shared by ten, a run that works still uses a tenth of a core or more; ranks that
    wait for one another, with a launcher and a hang watch that look around, 0.014 of one (measured).
    """

    def __init__(self, *pids: int) -> None:
        self.known = {pid: psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)}
        self.marked, self.used = time.monotonic(), self.cpu_seconds()

    def processes(self) -> list[psutil.Process]:
        """The processes and all that they have started, also those whose parent has ended."""
        for process in list(self.known.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.known |= {child.pid: child for child in process.children(recursive=True)}
        return list(self.known.values())

    def cpu_seconds(self) -> float:
        """CPU time of those that live."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def is_over(self) -> bool:
        """Whether they have stood still for IDLE_S."""
        now, used = time.monotonic(), self.cpu_seconds()
        if used < self.used or used - self.used > IDLE_SHARE * IDLE_S:  # one has ended, or they work
            self.marked, self.used = now, used
        return now - self.marked > IDLE_S

    def kill(self) -> None:
        """End them all. SIGABRT first: Python prints its stacks where faulthandler is on."""
        processes = self.processes()
        for number in (signal.SIGABRT, signal.SIGKILL):
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):  # which it also raises for another of the same number
                    process.send_signal(number)
            time.sleep(1)


def clean_environment(**variables: str) -> dict[str, str]:
    """This environment without what a launcher would set; offline, one thread per process."""
    names = ("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_", "RECIPES_", "TORCHELASTIC_")
    exact = {"PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(names) and k not in exact}
    path = os.pathsep.join(filter(None, [*arithmetic_path(), variables.pop("PYTHONPATH", "")]))
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1"}
    return {**kept, **own, **({"PYTHONPATH": path} if path else {}), **variables}


def arithmetic_path() -> list[str]:
    """The folder of PLAIN_ARITHMETIC where this process runs under it: what it starts does too."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [folder for folder in folders if Path(folder).name == Path(PLAIN_ARITHMETIC).name]


def run(command: list[str], cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    """Run a command to the end of its output; stdout holds both streams."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=cwd, env=clean_environment(**variables), text=True, **streams)
    return subprocess.CompletedProcess(command, stdout=wait_for_end(process), returncode=process.returncode)


def wait_for_end(process: subprocess.Popen) -> str:
    """Wait for a process and its output, which is returned if it has a pipe. One that hangs is a failure."""
    patience = Patience(process.pid)
    while True:
        try:
            return process.communicate(timeout=1)[0] or ""
        except subprocess.TimeoutExpired:
            if patience.is_over():
                patience.kill()
                raise AssertionError(f"hangs: {(process.communicate()[0] or '')[-5000:]}") from None


def accelerate_launch(
    script: Path | str, *arguments: object, config: Path | str = CONFIGS / "default.yaml", flags: tuple = (), **kwargs
) -> subprocess.CompletedProcess:
    """`accelerate launch --config_file CONFIG SCRIPT ARGUMENTS` on a free port."""
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
    command = [*launcher, "--config_file", str(config), *map(str, flags), str(script), *map(str, arguments)]
    return run(command, **kwargs)


def torchrun(script: Path | str, *arguments: object, processes: int = 2, **kwargs) -> subprocess.CompletedProcess:
    """`torchrun --nproc_per_node=N SCRIPT ARGUMENTS` on a free port."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return run([*command, str(script), *map(str, arguments)], **kwargs)
