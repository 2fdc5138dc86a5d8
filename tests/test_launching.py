"""The tests' own limit: what stands still is ended, what works is not, however long it takes."""

import subprocess
import sys
import time

import launching
import pytest
from launching import Patience, run


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """A hang is one of three seconds."""
    monkeypatch.setattr(launching, "IDLE_S", 3.0)


def test_command_that_waits_for_ever_is_ended_with_its_stack():
    with pytest.raises(AssertionError, match=r"(?s)hangs: started.*line 1 in <module>"):
        run([sys.executable, "-c", "print('started', flush=True); import time; time.sleep(10_000)"])


def test_process_that_works_in_a_child_is_left_alone():
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {'while True: pass'!r}])"
    with subprocess.Popen([sys.executable, "-c", child]) as process:
        patience = Patience(process.pid)
        while patience.cpu_seconds() < 4:  # longer than IDLE_S, though it has a core to itself
            assert not patience.is_over()
            time.sleep(0.1)
        patience.kill()
