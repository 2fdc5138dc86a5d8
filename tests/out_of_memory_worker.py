"""Launched by test_out_of_memory.py with 2 processes: ranks that run out of memory in the middle of a step."""

import contextlib
import dataclasses
import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from exactness_worker import Cell, compare, make_batches, replica_run, same_bits, sharded_run

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
import finetune_mem_limit
from hooks.config import read_hook_config
from hooks.structure import base_model
from training import out_of_memory
from training.evaluation import evaluate
from training.launch import end, make_accelerator

CHUNK = 5
PLACES = ("embedding", "forward", "loss", "recompute", "backward")
DEFERRED = (("hook_reduce_every_micro_batch", False),)
LAYOUTS = {
    "block": Cell("block", "every", accumulation=3, layers=3),
    "embeddings": Cell("embeddings", "every_2nd", accumulation=3, layers=3),
    "not resharded": Cell("no_reshard", "every", accumulation=3, layers=3),
    "two blocks, reduced once": Cell("two_blocks", "none", accumulation=3, extra=DEFERRED, layers=3),
}


def run_out() -> None:
    """What a GPU's allocator raises."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 1 GiB")


def raise_at(place: str, rows: int = 1) -> Callable[[torch.nn.Module, torch.optim.Optimizer], None]:
    """Make a model that runs out of memory at this place in micro-batches of more than `rows` rows."""

    def is_too_large(tensor: torch.Tensor) -> bool:
        return tensor.shape[0] > rows and tensor.shape[1] > 2

    def in_forward(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        (hidden,) = args or (kwargs["input"],)
        is_recompute = torch._C._current_graph_task_id() != -1
        if is_recompute == (place == "recompute") and is_too_large(hidden):
            run_out()

    def in_backward(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
        if is_too_large(output) and output.requires_grad:
            output.register_hook(lambda grad: run_out())

    def prepare(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model = base_model(model)
        blocks = model.model.layers
        if place == "backward":
            blocks[1].mlp.register_forward_hook(in_backward)
        elif place == "optimizer":
            optimizer.register_step_pre_hook(lambda *_: run_out())
        else:
            modules = {"embedding": model.model.embed_tokens, "loss": model.lm_head, "recompute": blocks[2].mlp}
            modules.get(place, blocks[2]).register_forward_pre_hook(in_forward, with_kwargs=True, prepend=True)

    return prepare


@contextlib.contextmanager
def no_buffer(kind: type, numbers: tuple[int, ...]) -> Iterator[None]:
    """The buffers of these numbers cannot be allocated for a collective."""
    calls, own = [], kind.allocate

    def allocate(self, *args, **kwargs):
        calls.append(1)
        if len(calls) in numbers and isinstance(self, kind):
            run_out()
        return own(self, *args, **kwargs)

    with mock.patch.object(kind, "allocate", allocate):
        yield


def main() -> None:
    gc.freeze()  # the imported libraries are never garbage; looking through them would cost more than a run
    base = dataclasses.replace(read_hook_config(None), hook_reduce_dtype="fp32", hook_offload_optimizer=False)
    accelerator = make_accelerator(base)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    results: dict = {"cells": {}}
    said: list[str] = []
    finetune_mem_limit.memory = lambda device: {"live_tensors_gib": 0.0}

    def run(cell: Cell, **kwargs) -> dict:
        with mock.patch.object(finetune_mem_limit.SmallerMicroBatches, "__init__", noting):
            return sharded_run(cell, base, accelerator, chunk_tokens=CHUNK, **kwargs)

    own_init = finetune_mem_limit.SmallerMicroBatches.__init__

    def noting(self, accelerator, model, rows, say) -> None:
        own_init(self, accelerator, model, rows, said.append)

    def entry(name: str, cell: Cell, found: dict) -> None:
        results["cells"][f"{name}-{cell.name}"] = {
            **compare(found, replica_run(cell, world_size, rank)),
            "said": list(said),
        }
        said.clear()

    for name, cell in LAYOUTS.items():
        for place in PLACES if name == "block" else ("forward", "recompute", "backward"):
            if place == "recompute" and cell.recompute == "none":
                continue
            on = {"before_training": raise_at(place)} if rank == 1 else {}
            entry(f"{name}, {place}", cell, run(cell, **on))

    # After an evaluation FSDP2 would gather its last unit first: on the ranks that go on, not on the one that failed.
    def after_evaluation(place: str) -> Callable[[torch.nn.Module, torch.optim.Optimizer], None]:
        def prepare(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
            batches = make_batches(LAYOUTS["embeddings"], rank, world_size)[0]
            evaluate(accelerator, model, batches, finetune_mem_limit.micro_batch_loss)
            if rank == 1:
                raise_at(place)(model, optimizer)

        return prepare

    for place in ("forward", "backward"):
        cell = LAYOUTS["embeddings"]
        entry(f"after an evaluation, {place}", cell, run(cell, before_training=after_evaluation(place)))
    both = {"before_training": raise_at("backward" if rank == 0 else "forward")}
    entry("both ranks at different places", LAYOUTS["block"], run(LAYOUTS["block"], **both))
    for kind, numbers in ((out_of_memory.CountedAllGather, (9,)), (out_of_memory.CountedReduceScatter, (12,))):
        with no_buffer(kind, numbers if rank == 1 else ()):
            entry(f"buffer of {kind.__name__}", LAYOUTS["block"], run(LAYOUTS["block"]))

    # Dropout: a step that is done again draws what it drew, as a run does that has small micro-batches from the start.
    dropout = Cell("embeddings", "every", training="lora", accumulation=3, layers=3)
    with mock.patch.object(finetune_mem_limit.SmallerMicroBatches, "split", split_from_the_start):
        expected = run(dropout)
    on = {"before_training": raise_at("backward")} if rank == 1 else {}
    results["dropout"] = same_bits(run(dropout, **on), expected)
    results["dropout, after an evaluation"] = same_bits(
        run(dropout, before_training=after_evaluation("forward")), expected
    )
    with mock.patch.object(out_of_memory, "set_generator_states"):
        results["dropout, not rewound"] = same_bits(run(dropout, **on), expected)
    said.clear()

    results["ends"] = {}
    for name, place, rows in (("one row", "forward", 0), ("optimizer", "optimizer", 0)):
        on = {"before_training": raise_at(place, rows)} if rank == 1 else {}
        code = None
        try:
            run(LAYOUTS["block"], **on)
        except SystemExit as exit_:
            code = exit_.code
            accelerator.free_memory()
        codes = [None] * world_size
        dist.all_gather_object(codes, code)
        results["ends"][name] = codes
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results, indent=1))
    end(accelerator)


def split_from_the_start(self, batch: dict) -> list[dict]:
    """Rows one by one, as if a rank had run out of memory before."""
    return [{name: values[i : i + 1] for name, values in batch.items()} for i in range(len(batch["input_ids"]))]


if __name__ == "__main__":
    main()
