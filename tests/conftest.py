"""Lets the tests import the siblings in recipes/ by bare name, as the recipes themselves do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))
