"""finetune.py that notes where its state lies after each step: offload_worker.py [finetune.py's arguments].

Into metrics.jsonl, beside a step's values, go the devices of this rank's parameters and of the optimizer's moments, and
how many slices of 16 MiB the step visits the device in: 0 for an optimizer that is not offloaded.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import finetune
import finetune_mem_limit
import torch
from hooks.wrap import local
from training.metrics import MetricsLog
from training.optimizer import OffloadedAdamW


def main() -> None:
    OffloadedAdamW.slice_bytes = 2**24  # of a small model the whole state would be one slice, and save little
    note_places()
    finetune.main()


def note_places() -> None:
    """Let the scripts of this process do so."""
    kept, write = [], MetricsLog.write

    def keeping(make):
        def make_optimizer(model, *args):
            kept[:] = model, make(model, *args)
            return kept[1]

        return make_optimizer

    def write_places(log, step, values):
        model, optimizer = kept
        moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
        slices = len(list(optimizer.slices())) if isinstance(optimizer, OffloadedAdamW) else 0
        places = {"parameters_on": places_of(model.parameters()), "moments_on": places_of(moments), "slices": slices}
        write(log, step, {**values, **places})

    for script in (finetune, finetune_mem_limit):
        script.make_optimizer = keeping(script.make_optimizer)
    MetricsLog.write = write_places


def places_of(tensors) -> list[str]:
    """The kinds of memory in which the shards of some tensors lie."""
    shards = [local(tensor) for tensor in tensors]
    pinned = {shard.is_pinned() for shard in shards} if torch.cuda.is_available() else {False}
    kinds = {shard.device.type for shard in shards}
    return sorted(f"{kind}, pinned" if kind == "cpu" and pinned == {True} else kind for kind in kinds)


if __name__ == "__main__":
    main()
