"""Prints, as one JSON line from rank 0, what the launch path found. Used by test_launch.py instead of a whole recipe.

With `--fail RANK` that rank raises ValueError in a block of stop_together; with `--break RANK` an unexpected error;
with `--interrupt RANK` it is interrupted there, and with `--exit RANK` (or all) its code exits with status 0; with
`--crash RANK` it fails outside of such a block. `--late RANK`: it ends the block when a failed one has spoken.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import torch
from hooks.config import as_plain_dict, read_hook_config
from torch import nn
from torch.distributed.fsdp import fully_shard
from training import launch
from training.launch import connect_ranks, end, make_accelerator, make_device_mesh, one_rank_at_a_time, stop_together


def option(name: str) -> str | None:
    """The word after an option of this script."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None


def main() -> None:
    with stop_together():
        config_path = option("--accelerate_config")
        if config_path and "{rank}" in config_path:
            config_path = config_path.format(rank=connect_ranks().process_index)
        config = read_hook_config(config_path)
    with stop_together():
        accelerator = make_accelerator(config)
    rank = accelerator.process_index
    with stop_together():
        if option("--late") is not None:
            launch.PATIENCE_S = 0.1
            time.sleep(2 if option("--late") == str(rank) else 0)
        if option("--fail") == str(rank):
            raise ValueError(f"rank {rank} found a bad row")
        if option("--break") == str(rank):
            raise RuntimeError("an unexpected error")
        if option("--exit") in (str(rank), "all"):
            sys.exit(0)
        if option("--interrupt") == str(rank):
            raise KeyboardInterrupt
    if option("--crash") == str(rank):
        raise KeyError("nobody expects this")
    with one_rank_at_a_time():
        turn = [time.monotonic()]
        time.sleep(0.2)
        turn.append(time.monotonic())
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=make_device_mesh(accelerator))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    model(torch.full((1, 4), float(rank))).sum().backward()
    norm = accelerator.clip_grad_norm_(model.parameters(), 1e9).item()
    found = {
        "world_size": accelerator.num_processes,
        "type": str(accelerator.distributed_type),
        "is_fsdp2": accelerator.is_fsdp2,
        "backend": torch.distributed.get_backend(),
        "found_by": config.found_by,
        "path": config.path,
        "norm": norm,
        "gathered": accelerator.gather(torch.tensor([rank])).tolist(),
        "turns": accelerator.gather(torch.tensor([turn], dtype=torch.float64)).tolist(),
        "keys": as_plain_dict(config),
    }
    accelerator.print("FOUND " + json.dumps(found))
    end(accelerator)


if __name__ == "__main__":
    main()
