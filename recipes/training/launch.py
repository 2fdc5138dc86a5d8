"""The Accelerator from the YAML, on GPUs or on a CPU, and errors that end all ranks together."""

import atexit
import contextlib
import functools
import gc
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, GradScalerKwargs
from datasets.utils import disable_progress_bars
from datasets.utils import logging as datasets_logging
from filelock import FileLock
from hooks.config import HookConfig, as_plain_dict
from hooks.dtypes import check_device_dtype
from safetensors import SafetensorError
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.utils import logging as transformers_logging

from .alike import flat, versions
from .arguments import FinetuneArguments
from .last_words import tell_launcher, tell_of_crashes
from .roll_call import roll_call

SHOWN = 10  # differences of a rank
PATIENCE_S = 30.0  # for the other ranks, before a failed one speaks alone


def device_count() -> int:
    """Number of accelerators that FSDP2 can use on this machine; 0 means CPU (Apple's GPU has no collectives)."""
    if not torch.accelerator.is_available() or torch.accelerator.current_accelerator().type == "mps":
        return 0
    return torch.accelerator.device_count()


def connect_ranks() -> PartialState:
    """Join the ranks of this run. Plain `python script.py` becomes a run of one rank on the same code path."""
    tell_of_crashes()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    if "RANK" not in os.environ:
        os.environ.update(alone)
        os.environ["MASTER_PORT"] = "0"  # any free port
    too_many_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > device_count()
    # A gloo thread keeps the tensors of its last collective until its group is destroyed. Sharded modules form
    # reference cycles that hold the group; left to the interpreter's shutdown, the thread aborts the process (in a
    # third of short runs).
    atexit.register(gc.collect)
    with roll_call() if not dist.is_initialized() else contextlib.nullcontext():
        state = PartialState(cpu=too_many_processes)
        if not dist.is_initialized():  # Accelerate makes no group for a single process on a CPU
            dist.init_process_group("gloo")
    return state


@functools.cache
def control_group() -> dist.ProcessGroup:
    """A gloo group to agree in while ranks do unequal work, such as loading in turn: NCCL would give up in minutes."""
    connect_ranks()
    with roll_call():
        return dist.new_group(backend="gloo", timeout=timedelta(days=1))


class Stopped(SystemExit):
    """The end that all ranks have agreed on."""


@contextlib.contextmanager
def stop_together() -> Iterator[None]:
    """Run a block that may fail on some ranks: a failure on one ends all, each message printed once, exit status 1.

    Without it, the other ranks would wait in their next collective until its timeout. ValueError and OSError are the
    user's to read and are printed as they are; anything else is a bug and is printed with its traceback. Ranks that all
    exit by themselves, and alike (--help), do so.
    """
    failure = leaving = None
    try:
        yield
    except Stopped:  # in a block inside of this one
        raise
    except (ValueError, OSError, SafetensorError) as error:
        failure = str(error)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # a user's function may exit
        leaving = None if isinstance(error, Exception) else error
        if leaving and os.environ.get("WORLD_SIZE", "1") == "1":
            raise
        failure = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    control_group()  # connected before the patience of a failed rank begins
    printed: list[str] = []
    late = threading.Timer(PATIENCE_S, print_late, (failure, printed))  # the others may wait for this rank elsewhere
    late.daemon = True
    if failure:
        late.start()
    failures = gather(failure)
    late.cancel()
    if not any(failures):
        return
    if leaving and set(failures) == {failure}:
        raise leaving
    if failure:
        late.join()  # it may be in the middle of it
    has_told = gather(bool(printed))
    told, is_news = [], []
    for message in dict.fromkeys(message for message in failures if message):
        ranks = [rank for rank, other in enumerate(failures) if other == message]
        told.append(("" if len(ranks) == len(failures) else f"rank {', '.join(map(str, ranks))}: ") + message)
        is_news.append(not any(has_told[rank] for rank in ranks))
    if dist.get_rank() == 0:
        for message in (message for message, is_new in zip(told, is_news) if is_new):
            print(f"\nError: {message}\n", file=sys.stderr, flush=True)
        tell_launcher("\n".join(told))
    sys.last_value = SystemExit("\n".join(told))  # where Python keeps an error that nobody caught: for run_record.py
    dist.barrier(
        group=control_group()
    )  # rank 0 has printed before the launcher sees the first exit and ends the others
    raise Stopped(1)


def print_late(failure: str, printed: list[str]) -> None:
    """Say why a rank failed that cannot reach the others, or has to wait long for them."""
    message = f"rank {dist.get_rank()} has failed, and waits for the others: {failure}"
    tell_launcher(message)
    print(f"\nError: {message}\n", file=sys.stderr, flush=True)
    printed.append(message)


def note_stop_signals() -> list[int]:
    """Return a list into which the signals that ask to stop are noted from now on: SIGTERM and SIGUSR1 (a scheduler's
    warning), and Ctrl-C. The script saves and ends; a second Ctrl-C, which a launcher passes on as SIGTERM, ends at
    once."""
    received: list[int] = []

    def note(number: int, _: object) -> None:
        if signal.SIGINT in received and number in (signal.SIGINT, signal.SIGTERM):
            os._exit(128 + signal.SIGINT)  # not even waiting for a checkpoint that a thread writes
        received.append(number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, note)
    return received


def gather(own: Any) -> list[Any]:
    """What each rank has given, in their order. Waits for them in host memory, as long as they need. A collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own, group=control_group())
    return found


def decided_by_rank_0(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns on rank 0, on every rank: what they read from a disk must not differ."""
    with stop_together():
        result = function(*arguments) if dist.get_rank() == 0 else None
    results = [result]
    dist.broadcast_object_list(results, group=control_group())
    return results[0]


def same_everywhere(facts: dict[str, Any]) -> None:
    """Raise ValueError on every rank unless all hold the same facts: it names the ranks that differ from rank 0, their
    machines and what differs. A fact may be a dictionary of facts. A collective, which no rank may fail before."""
    own = dict(flat(facts))
    first = decided_by_rank_0(dict, own)
    names = [name for name in {**first, **own} if own.get(name) != first.get(name)]
    lines = [f"{name}: {own.get(name)!r} here, {first.get(name)!r} on rank 0" for name in names[:SHOWN]]
    lines += [f"{len(names) - SHOWN} more"] if len(names) > SHOWN else []
    told = gather((socket.gethostname(), lines))
    different = [f"rank {rank} ({machine}): {line}" for rank, (machine, lines) in enumerate(told) for line in lines]
    if different:
        fix = "Start every machine with the same YAML, arguments, data, model, libraries and recipe files."
        raise ValueError("The ranks differ:\n- " + "\n- ".join(different) + f"\n{fix}")


def one_rank_at_a_time() -> FileLock:
    """A lock that the ranks of one machine take in turn to load and wrap what is not safetensors.

    transformers makes a private copy of such weights; taking turns, a machine holds one beside the shards, not one per
    rank. The lock lies where no other user can make it.
    """
    run = f"{os.environ['MASTER_ADDR']}-{os.environ['MASTER_PORT']}-{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    run += f"-{os.getpid()}" if os.environ["WORLD_SIZE"] == "1" else ""  # no turns to take, and port 0 in every run
    folder = Path(tempfile.gettempdir(), f"fsdp-recipes-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ValueError(f"{folder} must be a folder that is yours alone (mode 700): remove it, or set TMPDIR")
    return FileLock(folder / f"load-{run}.lock".replace(os.sep, "-"))


def check_processes(config: HookConfig) -> None:
    """Raise ValueError where the processes that run are not those that were asked for."""
    world_size, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if world_size == 1 and int(os.environ.get(name, "1")) > 1 and config.num_processes is None:
            raise ValueError(
                f"{name} is {os.environ[name]}, but every process would train alone: start one `torchrun` or "
                "`accelerate launch` per machine, which starts the processes."
            )
    if config.num_processes is not None and config.num_processes != world_size:
        raise ValueError(
            f"accelerate launch was asked for {config.num_processes} processes, but {world_size} runs (WORLD_SIZE). "
            "Leave --cpu out of the command: without GPUs these scripts use the CPU by themselves."
        )
    if device_count() and local > device_count():
        raise ValueError(
            f"{local} processes on this machine, but {device_count()} device(s). Run:\n  accelerate launch "
            f"--config_file {config.path} --num_processes {device_count()} {' '.join(sys.argv)}"
        )


def make_accelerator(config: HookConfig, arguments: FinetuneArguments | None = None) -> Accelerator:
    """Make the Accelerator: FSDP2 over NCCL on GPUs, and over gloo on a machine without (where Accelerate alone would
    silently run every process by itself).

    The plugin's own wrap and recompute are switched off; our hooks do both jobs before `prepare`. The accelerator's
    accumulation stays at 1: the scripts own the window and divide by label tokens themselves. Of the arguments it
    reads the loss scale, the trackers and the output folder.

    Raises:
        ValueError: unsupported dtype on this device, processes that do not match, ranks that were started otherwise.
    """
    check_processes(config)
    connect_ranks()
    plugin = FullyShardedDataParallelPlugin()
    plugin.auto_wrap_policy = None
    plugin.activation_checkpointing = plugin.activation_checkpointing_offload = False
    arguments = FinetuneArguments(report_to=["none"]) if arguments is None else arguments
    trackers = [name for name in arguments.report_to if name != "none"] or None
    keys = {name: entry["value"] for name, entry in as_plain_dict(config).items()}
    # Before anything that could fail on some ranks only.
    same_everywhere({"YAML": keys, "argument": vars(arguments), **versions()})
    is_cpu = device_count() == 0
    accelerator = Accelerator(
        cpu=is_cpu,
        mixed_precision=config.mixed_precision,
        fsdp_plugin=plugin,
        gradient_accumulation_steps=1,
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[GradScalerKwargs(init_scale=arguments.fp16_initial_scale)],
        log_with=trackers,
        project_dir=arguments.output_dir,
    )
    if not accelerator.is_main_process:  # the libraries' messages, once
        transformers_logging.set_verbosity_error()
        datasets_logging.set_verbosity_error()
    if not (accelerator.is_main_process and sys.stderr.isatty()):  # their progress bars, on a terminal only
        transformers_logging.disable_progress_bar()
        disable_progress_bars()
    if is_cpu:  # Accelerate's constructor takes the plugin for device types only
        accelerator.state.fsdp_plugin = plugin
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    check_device_dtype(config, accelerator.device)
    world_size = int(os.environ["WORLD_SIZE"])
    if accelerator.num_processes != world_size or not accelerator.is_fsdp2:
        found = f"{accelerator.num_processes} process(es), {accelerator.distributed_type}"
        raise ValueError(f"Accelerate sees {found}, but WORLD_SIZE is {world_size} with FSDP2 asked for. Stopping.")
    assert accelerator.gradient_accumulation_steps == 1, accelerator.gradient_accumulation_steps
    return accelerator


def make_device_mesh(accelerator: Accelerator) -> DeviceMesh:
    """One mesh dimension over all ranks: every parameter is sharded over all of them."""
    return init_device_mesh(accelerator.device.type, (accelerator.num_processes,), mesh_dim_names=("dp_shard",))


def end(accelerator: Accelerator) -> None:
    """Close the trackers and leave the process group."""
    accelerator.end_training()
    if dist.is_initialized():
        dist.destroy_process_group()
    control_group.cache_clear()  # let go before the interpreter ends, for the reason that connect_ranks gives
