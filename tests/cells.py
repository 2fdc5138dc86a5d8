"""The cells of exactness_worker.py: run in one launch, and judged."""

import json

from launching import accelerate_launch

WORKER = "tests/exactness_worker.py"


def launch_worker(path, *arguments, flags=()):
    done = accelerate_launch(WORKER, path, *arguments, flags=flags)
    assert done.returncode == 0, done.stdout[-12_000:]
    return json.loads(path.read_text())


def check_cell(name, cell, later=1):
    tolerance = 5e-6 if "reduce_every_micro_batch" in name else 1e-6
    assert max(cell["loss"]) <= 1e-6, cell["loss"]
    for error in ("norm", "gradient"):
        assert cell[error][0] <= tolerance, cell[error]
        assert max(cell[error]) <= later * tolerance, cell[error]
    assert cell["weight"] <= 5e-5
    assert cell["is_sharded"]
    assert cell["state_dtypes"] == ["torch.float32"]
