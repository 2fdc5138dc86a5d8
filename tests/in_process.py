"""Run a script's main in ranks forked from one process that has imported everything: a run costs a second or two.

A rank can be given faults: it is killed at the n-th thing it does on disk below a folder, or a signal is sent to it.
Reports are made only where a test asks for them: they cost as much as the run.
"""

import atexit
import builtins
import faulthandler
import importlib
import io
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from launching import RECIPES, Patience, arithmetic_path, in_fp32

FOLDERS = [*arithmetic_path(), str(RECIPES), str(Path(__file__).parent)]
os.environ["PYTHONPATH"] = os.pathsep.join(FOLDERS)  # for the fork server's imports
SCRIPTS = ("finetune", "finetune_mem_limit", "finetune_performance", "verify", "replay")
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([*SCRIPTS, "launch_worker", "in_process", "preloaded"])


@dataclass
class Disk:
    """What a rank does on disk below `folder`: it counts, and at `kill_at` (1 is the first) the process is killed.

    A write is two things: half of its bytes, then the rest, so that a kill leaves torn files too.
    """

    folder: str
    kill_at: int = 0
    events: list[str] = field(default_factory=list)

    def happens(self, what: str, path: object) -> None:
        """Note one thing, before it is done."""
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path).startswith(self.folder):
            return
        self.events.append(f"{what} {os.fspath(path).removeprefix(self.folder)}")
        if len(self.events) == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        """Put this in the way of open, write, fsync, mkdir, replace, rmtree and unlink."""
        own_open, own_fsync = io.open, os.fsync

        def opened(file, mode="r", *args, **kwargs):
            writes = "w" in mode
            if writes:
                self.happens("open", file)
            stream = own_open(file, mode, *args, **kwargs)
            if not writes or not str(file).startswith(self.folder):
                return stream
            return Torn(stream, str(file), self)

        def fsync(descriptor):
            self.happens("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
            own_fsync(descriptor)

        builtins.open = io.open = opened
        os.fsync = fsync
        for module, name in ((os, "mkdir"), (os, "replace"), (os, "unlink"), (os, "rmdir"), (shutil, "rmtree")):
            setattr(module, name, self.watched(name, getattr(module, name)))

    def watched(self, name, own):
        """A function whose first argument is a path, noted before it runs."""

        def call(path, *args, **kwargs):
            self.happens(name, path)
            return own(path, *args, **kwargs)

        return call


class Torn:
    """A file whose writes come in halves."""

    def __init__(self, stream, path, disk):
        self.stream, self.path, self.disk = stream, path, disk

    def write(self, data):
        half = len(data) // 2
        self.stream.write(data[:half])
        self.stream.flush()
        self.disk.happens("write", self.path)
        return half + self.stream.write(data[half:])

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.stream.close()


@dataclass
class Faults:
    """What goes wrong in a run. `ranks`: which ones; the others run undisturbed."""

    ranks: tuple[int, ...] = ()
    folder: str = ""  # what happens on disk below it is counted
    kill_at: int = 0
    counts: str = ""  # a file to write the counted events to
    file_size_limit: int = 0  # bytes: a larger write fails as on a full disk
    limit_from_step: int = 0
    breaks_reading: bool = False  # of a checkpoint's tensors


def be_rank(script, rank, world_size, port, arguments, log, faults, reports, before):
    """One rank: the environment that torchrun sets, `before`, then the script. World size 0: plain python."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    if world_size:
        os.environ |= {name: str(value) for name, value in ranks.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    import gc

    import finetune
    import torch
    from training import run_record

    faulthandler.enable()
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # as under a launcher; a fork server would outlive a kill
    gc.freeze()  # the imported libraries are never garbage
    finetune.memory = lambda device: {"live_tensors_gib": 0.0}  # counting live tensors costs more than a step
    atexit._clear()  # what the fork server registered is not this rank's
    if not reports:
        run_record.make_report = lambda folder, say: None
    sys.argv = [f"{script}.py", *(a.replace("{own_rank}", str(rank)) for a in arguments)]
    disk = Disk(faults.folder, faults.kill_at)
    if rank in faults.ranks and faults.folder:
        disk.watch()
    if rank in faults.ranks and faults.file_size_limit:
        limit_files(finetune, faults)
    if rank in faults.ranks and faults.breaks_reading:
        torch.distributed.checkpoint.HuggingFaceStorageReader.read_metadata = stale_file
    code = 0
    try:
        if before is not None:
            before()
        importlib.import_module(script).main()
    except SystemExit as stopped:
        code = stopped.code or 0
        if isinstance(code, str):
            print(code)
            code = 1
    except BaseException as error:
        import traceback

        traceback.print_exc()
        sys.last_value = error  # as the interpreter does
        code = 1
    if reports:
        atexit._run_exitfuncs()
    if rank in faults.ranks and faults.counts:
        Path(f"{faults.counts}-{rank}").write_text("\n".join(disk.events))
    sys.stdout.flush()
    os._exit(code)


def stale_file(_):
    """What a network disk may answer on one machine."""
    raise OSError(116, "Stale file handle")


def limit_files(finetune, faults):
    """From the checkpoint of a step on, the disk takes no file larger than the limit."""
    import resource

    own = finetune.CheckpointWriter.save

    def save(writer):
        if writer.live.state["step"] >= faults.limit_from_step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (faults.file_size_limit, resource.RLIM_INFINITY))
        return own(writer)

    finetune.CheckpointWriter.save = save


@dataclass
class Done:
    """How a run ended."""

    codes: list[int]
    output: str


class Run:
    """A run of some ranks in the background."""

    def __init__(
        self,
        arguments,
        log,
        world_size=2,
        config="default",
        faults=None,
        script="finetune",
        reports=False,
        before: Callable[[], None] | None = None,
        first: list[int] | None = None,
    ):
        """`config`: a YAML's path, None for none, or a scenario's name: its YAML in fp32. `before`: called in each
        rank, a function of a module in tests/. `first`: the ranks that start now; all unless it is said."""
        log.unlink(missing_ok=True)
        config = in_fp32(config) if isinstance(config, str) else config
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        arguments = [*arguments, "--accelerate_config", config] if config else arguments
        common = (world_size, port, [str(a) for a in arguments], str(log), faults or Faults(), reports, before)
        self.log = log
        ranks = range(max(world_size, 1))
        self.ranks = [CONTEXT.Process(target=be_rank, args=(script, rank, *common)) for rank in ranks]
        for rank in ranks if first is None else first:
            self.start(rank)

    def start(self, rank):
        """Start a rank."""
        self.ranks[rank].start()

    def wait_for(self, text):
        """Wait until the run has printed this."""
        patience = Patience(*(process.pid for process in self.ranks if process.pid))
        while text not in (self.log.read_text() if self.log.exists() else ""):
            is_alive = any(process.is_alive() for process in self.ranks if process.pid)
            assert is_alive and not patience.is_over(), self.log.read_text()[-3000:]
            time.sleep(0.05)

    def wait(self):
        """Wait for the end; a rank that hangs is a failure."""
        patience = Patience(*(process.pid for process in self.ranks))
        hung = []
        while not hung and any(process.is_alive() for process in self.ranks):
            for process in self.ranks:
                process.join(0.5 / len(self.ranks))
            if patience.is_over():
                hung = [rank for rank, process in enumerate(self.ranks) if process.is_alive()]
                patience.kill()
        for process in self.ranks:
            process.join()
        output = self.log.read_text()
        assert not hung, f"ranks {hung} hang: {output[-5000:]}"
        return Done([process.exitcode for process in self.ranks], output)


def finetune_in_process(arguments, log, **kwargs):
    """Run to the end."""
    return Run(arguments, log, **kwargs).wait()
