"""Ranks of one distributed run on this machine's CPU, without a launcher."""

import ctypes
import gc
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

PATIENCE_S = 600  # for a rank that does not come to a collective, at most its share of the unsharded runs later
AGREEMENT_S = 120  # for a rank that does not say how a case ended: the one that failed alone ends all of them then
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_on_cpu_ranks(function: Callable[[Any], None], argument: Any, num_processes: int) -> int:
    """Call a function in processes that form one distributed run over gloo; returns the exit status of the first."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    arguments = (function, argument, num_processes, port)
    try:
        torch.multiprocessing.start_processes(run_rank, arguments, num_processes, start_method="fork")
    except torch.multiprocessing.ProcessRaisedException as raised:
        print(f"\nError: {raised}\n", file=sys.stderr)
        return 1
    except torch.multiprocessing.ProcessExitedException as stopped:
        if stopped.exit_code > 0:  # a rank that stopped by itself has said why
            return stopped.exit_code
        name = signal.Signals(-stopped.exit_code).name
        print(f"\nError: rank {stopped.error_index} was killed by {name} (out of memory?).\n", file=sys.stderr)
        return 1
    return 0


def run_rank(rank: int, function: Callable[[Any], None], argument: Any, num_processes: int, port: int) -> None:
    """Be one rank: the environment that a launcher would set, one thread, then the function.

    The process group is made here, with PATIENCE_S: elsewhere it would be half an hour.
    """
    if sys.platform == "linux":  # end with the parent, however it ends
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    gc.freeze()  # the imported libraries are never garbage; looking through them would cost more than a tiny step
    function(argument)


def captured(function: Callable[[], int]) -> tuple[int, str, str]:
    """Call a function that returns or exits with a status; returns that, and what it and its processes printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    own = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            status = function()
        except SystemExit as stopped:
            status = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(own[0], 1)
            os.dup2(own[1], 2)
        out.seek(0)
        err.seek(0)
        return status, out.read(), err.read()


def describe(error: BaseException) -> str:
    """An exception in a line, with the place that raised it; where ranks stopped together, the one they stopped for."""
    error = (error.__context__ or error) if isinstance(error, SystemExit) else error
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"


def agreement_group() -> dist.ProcessGroup:
    """A group to agree in: a rank that failed may have left the others in a collective of the default one."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=AGREEMENT_S))


def failed_alike(failure: str, what: str, group: dist.ProcessGroup) -> bool:
    """Whether all ranks failed. Where only some did, the others wait in a collective: they print it and exit."""
    failures: list[str | None] = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(failures, failure, group=group)
        if all(failures) or not any(failures):
            return bool(failure)
    except RuntimeError:  # a rank did not come: it waits elsewhere, or is gone
        pass
    if failure:
        print(f"\nError: rank {dist.get_rank()} alone failed in {what!r}: {failure}\n", file=sys.stderr, flush=True)
    os._exit(1)
