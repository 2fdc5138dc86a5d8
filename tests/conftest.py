"""Lets the tests import the siblings in recipes/ by bare name, as the recipes themselves do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))


def pytest_configure(config) -> None:
    """Register the marker of tests that need a GPU."""
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
