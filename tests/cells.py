"""The cells of exactness_worker.py: run in one launch, and judged."""

import json

from launching import accelerate_launch

WORKER = "tests/exactness_worker.py"


def launch_worker(path, *arguments, flags=()):
    done = accelerate_launch(WORKER, path, *arguments, flags=flags)
    assert done.returncode == 0, done.stdout[-12_000:]
    return json.loads(path.read_text())


def check_cell(name, cell):
    """Every error against its limit, not the largest of them: max() passes over a nan."""
    tolerance = 5e-6 if "reduce_every_micro_batch" in name else 1e-6
    errors = cell["errors"]
    assert cell["is_passed"] and cell["tolerance"] == tolerance, cell
    assert errors["loss"] <= 1e-6 and errors["weights"] <= 5e-5, errors
    assert all(errors[kind] <= tolerance for kind in ("gradient", "norm", "later")), errors
    assert cell["is_sharded"] and cell["is_offloaded"] == ("fsdp_offload_params=True" in name)
    assert cell["state_dtypes"] == ["torch.float32"]
