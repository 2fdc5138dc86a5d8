"""Ranks of one distributed run on this machine's CPU, without a launcher."""

import os
import socket
from collections.abc import Callable
from typing import Any

import torch


def run_on_cpu_ranks(function: Callable[[Any], None], argument: Any, num_processes: int) -> int:
    """Call a function in processes that form one distributed run over gloo; returns the exit status of the first."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    arguments = (function, argument, num_processes, port)
    try:
        torch.multiprocessing.start_processes(run_rank, arguments, num_processes, start_method="fork")
    except torch.multiprocessing.ProcessExitedException as stopped:  # a rank that stopped has said why
        return abs(stopped.exit_code)
    return 0


def run_rank(rank: int, function: Callable[[Any], None], argument: Any, num_processes: int, port: int) -> None:
    """Be one rank: the environment that a launcher would set, one thread, then the function."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    function(argument)
