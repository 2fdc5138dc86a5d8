"""Lets the tests import the siblings in recipes/ by bare name, as the recipes themselves do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))


def pytest_configure(config) -> None:
    """Register the markers."""
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
    config.addinivalue_line("markers", "arithmetic: depends on how the processor computes; make test-plain runs these")


def pytest_report_header(config) -> str:
    """What bf16 costs here: on a CPU that emulates it the same tests take longer."""
    import torch
    from utils import cost_beside_fp32

    cost = cost_beside_fp32(torch.bfloat16, torch.device("cpu"))
    return f"arithmetic: a bf16 matrix product takes {cost:.1f} times as long as in fp32"
