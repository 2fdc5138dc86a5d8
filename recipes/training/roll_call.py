"""The ranks' start: who is missing is said by one that waits, and where gloo cannot connect what it tried."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from .last_words import tell_launcher

PATIENCE_S = 30.0  # for ranks that start later
CONNECTING = timedelta(minutes=10)  # to the store of a rank 0 that is not there yet


@contextlib.contextmanager
def roll_call() -> Iterator[None]:
    """Run a block that waits for all ranks. After PATIENCE_S one rank prints who has not come: rank 0, or who is there
    in its place.

    Ranks note themselves in the store by which torch brings them together (the launcher's, else rank 0's).

    Raises:
        SystemExit: gloo cannot connect this rank. There is nothing yet by which ranks could agree on a failure.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_over = threading.Event()
    waiting = threading.Thread(target=call_roll, args=(rank, world_size, is_over), daemon=True)
    if world_size > 1:
        waiting.start()
    try:
        yield
    except RuntimeError as error:
        if "gloo" not in str(error).lower():
            raise
        message = f"rank {rank}: gloo could not connect ({str(error).splitlines()[0]}): {tried_by_gloo()}"
        tell_launcher(message)
        raise SystemExit(f"\nError: {message}\n") from error
    finally:
        is_over.set()


def call_roll(rank: int, world_size: int, is_over: threading.Event) -> None:
    """Note that this rank has come, and wait; then say who has not, if it is this rank's to say."""
    found: list[Store] = []
    threading.Thread(target=connect, args=(rank, world_size, found), daemon=True).start()
    if is_over.wait(PATIENCE_S):
        return
    if not found:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        what = f"for rank 0, which does not answer at {place}"
        return print(f"note: rank {rank} on {socket.gethostname()} waits at start {what}", flush=True)
    with contextlib.suppress(RuntimeError):  # the store has gone, and with it the run
        is_here = (found[0].check([str(other)]) for other in range(world_size))
        if next(other for other, has_come in enumerate(is_here) if has_come or other == rank) < rank:
            return  # that one says it
        missing = [other for other in range(world_size) if other != rank and not found[0].check([str(other)])]
        if is_over.is_set():
            return
        if missing:
            what = f"for {len(missing)} of {world_size} ranks, which have not started: {ranges(missing)}"
        else:
            what = f"for the connections between all {world_size} ranks, which have started. Here {tried_by_gloo()}"
        print(f"note: rank {rank} on {socket.gethostname()} waits at start {what}", flush=True)


def connect(rank: int, world_size: int, found: list[Store]) -> None:
    """Note this rank in the store, and add it to `found`: as torch's own rendezvous finds or makes it."""
    is_master = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    options = {"timeout": CONNECTING, "wait_for_workers": False, "multi_tenant": True}
    with contextlib.suppress(RuntimeError):  # who cannot reach it says so in torch's own words
        store = TCPStore(host, port, world_size, is_master, **options)
        store = PrefixStore(f"roll_call/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        store.set(str(rank), socket.gethostname())
        found.append(store)


def tried_by_gloo() -> str:
    """Which interface gloo takes on this machine, and how to name another."""
    host, named = socket.gethostname(), os.environ.get("GLOO_SOCKET_IFNAME")
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "no address"
    tried = f"GLOO_SOCKET_IFNAME is {named}" if named else f"it takes the interface of the hostname, {host} ({address})"
    return (
        f"{tried}. Set GLOO_SOCKET_IFNAME on every machine to the interface by which the machines reach one another "
        f"(`ip -brief address` lists them; here: {', '.join(name for _, name in socket.if_nameindex())})"
    )


def ranges(numbers: list[int]) -> str:
    """Ascending numbers, those that follow one another as a range: 1, 4-6."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
