"""Print the flags of `accelerate launch` that suit the embedded sample on this machine, and say why on stderr.

    accelerate launch --config_file accelerate_configs/default.yaml $(python recipes/sample/launch_flags.py) ...

One process per GPU, or two on a machine without: the smallest number that shards. On a CPU that only emulates bf16 the
sample trains in fp32.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from hooks.dtypes import EMULATED, cost_beside_fp32


def launch_flags() -> list[str]:
    """The flags."""
    gpus = torch.cuda.device_count()
    flags = ["--num_processes", str(gpus or 2)]
    cost = 0.0 if gpus else cost_beside_fp32(torch.bfloat16, torch.device("cpu"))
    if cost > EMULATED:
        reason = f"this CPU emulates bf16: a matrix product takes {cost:.1f} times as long as in fp32"
        print(f"{reason}. The sample trains in fp32 (--mixed_precision no).", file=sys.stderr)
        flags += ["--mixed_precision", "no"]
    return flags


if __name__ == "__main__":
    print(*launch_flags())
