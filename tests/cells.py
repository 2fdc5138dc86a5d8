"""The cells of exactness_worker.py: run in one launch, and judged."""

import json

from launching import accelerate_launch

WORKER = "tests/exactness_worker.py"
STEPS = 3  # of each cell


def launch_worker(path, *arguments, flags=()):
    done = accelerate_launch(WORKER, path, *arguments, flags=flags)
    assert done.returncode == 0, done.stdout[-12_000:]
    return json.loads(path.read_text())


def check_steps(errors, first, rest):
    """The first step's error and the later ones'."""
    assert len(errors) == STEPS and errors[0] <= first and all(error <= rest for error in errors[1:]), errors


def check_cell(name, cell, later=1):
    """Every error against its limit, not the largest of them: max() passes over a nan."""
    tolerance = 5e-6 if "reduce_every_micro_batch" in name else 1e-6
    check_steps(cell["loss"], 1e-6, 1e-6)
    check_steps(cell["norm"], tolerance, later * tolerance)
    check_steps(cell["gradient"], tolerance, later * tolerance)
    assert cell["weight"] <= 5e-5
    assert cell["is_sharded"] and cell["is_offloaded"] == ("fsdp_offload_params=True" in name)
    assert cell["state_dtypes"] == ["torch.float32"]
