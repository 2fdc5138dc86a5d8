"""Counts, in a rank on a CPU, where the host would wait for a device: what reads a value of a tensor that was sent.

As a command it has torch raise where the host waits for a GPU.
"""

import importlib
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
READS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten._unique2}
READS |= {aten.unique_dim, aten.unique_consecutive, aten.bincount, aten.repeat_interleave}
CALLS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu)
COPIES = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)  # of numbers, from memory that is not pinned


class OnHost(torch.Tensor):
    """A tensor in front of the copy to the device; what is computed of it is on the host too."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        if function is torch.Tensor.to and (kwargs or {}).get("non_blocking"):
            return result.as_subclass(torch.Tensor).clone()
        return result


class Noting:
    """A mode that tells `note` of what it sees."""

    def __init__(self, note):
        super().__init__()
        self.note = note


class Operators(Noting, TorchDispatchMode):
    """Sees what reads values."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        values = [value for value in [*args, *kwargs.values()] if isinstance(value, torch.Tensor)]
        reads = operator.overloadpacket in READS
        if operator.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            reads = any(index is not None and index.dtype == torch.bool for index in args[1])
        if reads and not any(isinstance(value, OnHost) for value in values):
            self.note(str(operator))
        return operator(*args, **kwargs)


class Calls(Noting, TorchFunctionMode):
    """Sees calls that no operator tells of on a CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in CALLS and not isinstance(args[0], OnHost):
            self.note(function.__name__)
        if function in COPIES and (kwargs.get("device") is not None or function is torch.Tensor.new_tensor):
            self.note(function.__name__)
        result = function(*args, **kwargs)
        return result.as_subclass(OnHost) if function is torch.tensor and kwargs.get("device") is None else result


def place():
    """Where in the code, innermost last."""
    frames = [one for one in traceback.extract_stack() if "/torch/" not in one.filename]
    return " < ".join(f"{Path(one.filename).name}:{one.name}" for one in reversed(frames[-6:-2]))


def count():
    """Print a line per wait of the third step, and how many there were: the first makes the optimizer's state, and a
    tool looks at the weights after it and the second."""
    from rows import batches
    from training.progress import Progress

    waits, begin, gather, is_between_hosts = [], Progress.begin, dist.all_gather_object, []

    def note(what):
        if not is_between_hosts:
            waits.append(f"WAIT {what} | {place()}")

    def begun(progress, step):
        if step == 3:
            Operators(note).__enter__()
            Calls(note).__enter__()
        if step == 4:
            lines = "\n".join(["", *waits, f"WAITS {len(waits)}", ""])
            os.write(sys.stdout.fileno(), lines.encode())  # at once: the other rank prints into the same file
        begin(progress, step)

    def gathered(objects, one, group=None):
        is_between_hosts.extend([True] * (group is not None))  # gloo's, wherever the tensors are
        gather(objects, one, group=group)
        is_between_hosts.clear()

    def on_host(collate):
        return lambda *args, **kwargs: {n: v.as_subclass(OnHost) for n, v in collate(*args, **kwargs).items()}

    Progress.begin, dist.all_gather_object = begun, gathered
    batches.collate, batches.collate_packed = on_host(batches.collate), on_host(batches.collate_packed)


def count_unknown():
    """count, with nothing handed on to the model."""
    from training import chunked_loss, losses

    def plain(model, batch, leave_out=()):
        return model(**{name: values for name, values in batch.items() if name not in leave_out})

    losses.run_model = chunked_loss.run_model = plain
    count()


def main():
    """Run a script of recipes/ on GPUs: waits.py SCRIPT [its arguments]. In its third step torch raises where the CPU
    waits for a GPU anywhere but where the script reads the step's numbers."""
    name = sys.argv.pop(1)
    script = importlib.import_module(name)
    from training.progress import Progress

    begin, read, reads = Progress.begin, script.read_together, []

    def begun(progress, step):
        torch.cuda.set_sync_debug_mode("error" if step == 3 else "default")
        if step == 4:
            print(f"\nREADS {len(reads)}\n", end="", flush=True)  # one write: ranks share the screen
        reads.clear()
        begin(progress, step)

    def reading(*values):
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        reads.append(1)
        numbers = read(*values)
        torch.cuda.set_sync_debug_mode(mode)
        return numbers

    Progress.begin, script.read_together = begun, reading
    script.main()


if __name__ == "__main__":
    main()
