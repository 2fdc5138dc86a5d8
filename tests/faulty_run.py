"""finetune.py with a fault on rank 1 in its second step: faulty_run.py FAULT [finetune.py's arguments].

error: its rows cannot be read; hang: they never come; killed: no process any more; memory: a block asks for 32 TiB.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import finetune
import torch
from rows import prepare
from transformers.models.llama.modeling_llama import LlamaMLP

STEP = 2


def main() -> None:
    fault, sys.argv = sys.argv[1], ["finetune.py", *sys.argv[2:]]
    if os.environ["RANK"] == "1":
        own_steps = prepare.training_steps
        prepare.training_steps = lambda *args, **kwargs: faulty(own_steps(*args, **kwargs), fault)
    finetune.main()


def faulty(steps, fault):
    """The steps, up to the one with the fault."""
    for number, step in enumerate(steps, 1):
        if number == STEP and fault == "error":
            raise KeyError("the disk is gone")
        if number == STEP and fault == "hang":
            time.sleep(10_000)
        if number == STEP and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == STEP and fault == "memory":
            LlamaMLP.forward = greedy
        yield step


def greedy(module, hidden):
    """A forward that asks for more than there is."""
    return hidden + torch.empty(2**45, dtype=torch.uint8, device=hidden.device)[0]


if __name__ == "__main__":
    main()
