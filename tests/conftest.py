"""Lets the tests import the packages of recipes/ by bare name, as the recipes themselves do."""

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "bench"))
sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background; all it starts would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


# The longest files first, the shortest last: what is left at the end keeps all workers busy.
LONGEST = (
    "test_verify",
    "test_checkpoint",
    "test_plan",
    "test_finetune",
    "test_exactness",
    "test_launch",
    "test_failures",
)


# What these find depends on how the processor computes: make test-plain runs them once more.
ARITHMETIC = {"test_verify", "test_exactness", "test_performance", "test_mem_limit", "test_non_finite", "test_packing"}
ARITHMETIC |= {"test_out_of_memory", "test_optimizer", "test_loss_watch", "test_loss_scaler"}


def pytest_collection_modifyitems(items) -> None:
    """Put the files in that order, which counts under --no-loadscope-reorder, and mark them."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    for item in items:
        if item.path.stem in ARITHMETIC or "default_run" in item.fixturenames:
            item.add_marker("arithmetic")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item) -> None:
    """A test whose cases are none would only be skipped: a failure."""
    if any("got empty parameter set" in str(mark) for mark in item.iter_markers("skip")):
        pytest.fail(f"{item.nodeid} has no case")


def pytest_configure(config) -> None:
    """Register the markers. A thread that fails has outlived its test, or hides a fault: an error."""
    config.addinivalue_line("filterwarnings", "error::pytest.PytestUnhandledThreadExceptionWarning")
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU")
    config.addinivalue_line(
        "markers", "slow: more cases of what others prove, or a whole run; make test-slow runs these"
    )
    config.addinivalue_line("markers", "arithmetic: depends on how the processor computes; make test-plain runs these")


def pytest_report_header(config) -> str:
    """What bf16 costs here: on a CPU that emulates it the same tests take longer."""
    import torch
    from hooks.dtypes import cost_beside_fp32

    cost = cost_beside_fp32(torch.bfloat16, torch.device("cpu"))
    return f"arithmetic: a bf16 matrix product takes {cost:.1f} times as long as in fp32"
