"""compare.py on finetune.py, where rank 1 has no memory left in the middle of a step if nothing is recomputed."""

import os
import sys
from pathlib import Path

import finetune
import torch
import yaml
from tools.profiling import settings


def main() -> None:
    finetune.main = run_that_needs_recompute
    settings.main()


own_main = finetune.main


def run_that_needs_recompute() -> None:
    """The script's main. A real request for more than there is, in the second micro-batch of rank 1."""
    config = yaml.safe_load(Path(sys.argv[sys.argv.index("--accelerate_config", -2) + 1]).read_text())
    own, calls = finetune.micro_batch_loss, []

    def micro_batch_loss(*args):
        calls.append(1)
        if len(calls) == 2:
            torch.empty(2**50)
        return own(*args)

    if os.environ["RANK"] == "1" and not config["fsdp_config"]["fsdp_activation_checkpointing"]:
        finetune.micro_batch_loss = micro_batch_loss
    own_main()
