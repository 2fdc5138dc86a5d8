"""What test_launch.py does in a rank before launch_worker.py runs."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))


def soon():
    """A rank that waits says so soon."""
    from training import roll_call

    roll_call.PATIENCE_S = 0.5


def wrong_interface():
    """Gloo is told of an interface that no machine has."""
    os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
