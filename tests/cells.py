"""The cells of exactness_worker.py: run in forked ranks, and judged."""

import json

from in_process import Run
from launching import CONFIGS


def run_cells(path, *arguments, world_size=2, worker="exactness_worker"):
    """What a worker wrote to a path, and all that its ranks printed."""
    done = Run(
        [path, *arguments], path.with_suffix(".log"), world_size, config=CONFIGS / "default.yaml", script=worker
    ).wait()
    assert not any(done.codes), done.output[-12_000:]
    return json.loads(path.read_text()) | {"output": done.output}


def check_cell(name, cell):
    """Every error against its limit, not the largest of them: max() passes over a nan."""
    tolerance = 5e-6 if "reduce_every_micro_batch" in name else 1e-6
    errors = cell["errors"]
    assert cell["is_passed"] and cell["tolerance"] == tolerance, cell
    assert errors["loss"] <= 1e-6 and errors["weights"] <= 5e-5, errors
    assert all(errors[kind] <= tolerance for kind in ("gradient", "norm", "later")), errors
    assert cell["is_sharded"] and cell["is_offloaded"] == ("fsdp_offload_params=True" in name)
    assert cell["state_dtypes"] == ["torch.float32"]
