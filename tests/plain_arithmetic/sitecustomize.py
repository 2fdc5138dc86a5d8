"""Arithmetic as on a CPU without bf16 instructions, in every Python process that finds this folder on PYTHONPATH.

oneDNN is off from the moment torch is imported, and torch is imported no sooner than without this. Together with
ATEN_CPU_CAPABILITY=avx2, products of bf16 matrices go through torch's own loops then.
"""

import importlib.util
import sys

NAME = "torch.backends.mkldnn"


class WithoutMkldnn:
    """A finder of that one module: the usual one, switched off once it is there."""

    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_disable(module):
            execute(module)
            sys.modules[name].enabled = False

        spec.loader.exec_module = execute_and_disable
        return spec


sys.meta_path.insert(0, WithoutMkldnn())
