"""Run by test_out_of_memory.py in 2 processes: ranks that run out of memory in the middle of a step."""

import contextlib
import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from exactness_worker import CHUNK_TOKENS, Cell, command_line, judged, placed, prepared, references_of

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
import finetune_mem_limit
from hooks.structure import base_model
from saving.state import LiveState
from tools.proof import runs
from tools.proof.architecture import text_tokens
from tools.proof.cases import batches_of, same_bits
from tools.proof.exactness import Run
from training import out_of_memory
from training.evaluation import evaluate
from training.launch import end, make_accelerator
from transformers.models.llama.modeling_llama import LlamaMLP

PLACES = ("embedding", "forward", "loss", "recompute", "backward")
DEFERRED = (("hook_reduce_every_micro_batch", False),)
SIZES = {"accumulation": 3, "layers": 3, "chunk_tokens": CHUNK_TOKENS}
LAYOUTS = {
    "block": Cell("block", "every", **SIZES),
    "embeddings": Cell("embeddings", "every_2nd", **SIZES),
    "not resharded": Cell("no_reshard", "every", **SIZES),
    "two blocks, reduced once": Cell("two_blocks", "none", extra=DEFERRED, **SIZES),
}


def run_out() -> None:
    """What a GPU's allocator raises."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 1 GiB")


def raise_at(place: str, rows: int = 1) -> Callable[[LiveState], None]:
    """Make a model that runs out of memory at this place in micro-batches of more than `rows` rows."""

    def is_too_large(tensor: torch.Tensor) -> bool:
        return torch.is_grad_enabled() and tensor.shape[0] > rows and tensor.shape[1] > 2  # not in an evaluation

    def in_forward(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        (hidden,) = args or (kwargs["input"],)
        is_recompute = torch._C._current_graph_task_id() != -1
        if is_recompute == (place == "recompute") and is_too_large(hidden):
            run_out()

    def in_backward(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
        if is_too_large(output) and output.requires_grad:
            output.register_hook(lambda grad: run_out())

    def prepare(live: LiveState) -> None:
        model = base_model(live.model)
        blocks = model.model.layers
        if place == "backward":
            blocks[1].mlp.register_forward_hook(in_backward)
        elif place == "optimizer":
            live.optimizer.optimizer.register_step_pre_hook(lambda *_: run_out())
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
    out_path, _, base = command_line()
    accelerator = make_accelerator(base)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    results: dict = {"cells": {}}
    said: list[str] = []
    finetune_mem_limit.memory = lambda device: {"live_tensors_gib": 0.0}

    dropout = Cell("embeddings", "every", training="lora", **SIZES)
    references = references_of([*LAYOUTS.values(), dropout], base)

    def undisturbed(live: LiveState) -> None:
        pass

    def train(cell: Cell, live: LiveState) -> Run:
        with mock.patch.object(finetune_mem_limit.SmallerMicroBatches, "__init__", noting):
            return runs.train(live, cell.config(base), cell.case, references[cell], finetune_mem_limit)

    def run(cell: Cell, disturb: Callable[[LiveState], None] = undisturbed) -> Run:
        live = prepared(cell, base, accelerator)
        disturb(live)
        return train(cell, live)

    own_init = finetune_mem_limit.SmallerMicroBatches.__init__

    def noting(self, accelerator, model, arguments, state, say) -> None:
        own_init(self, accelerator, model, arguments, state=state, say=said.append)

    def entry(name: str, cell: Cell, disturb: Callable[[LiveState], None] = undisturbed) -> None:
        live = prepared(cell, base, accelerator)
        disturb(live)
        found = judged(cell, train(cell, live), references[cell])
        results["cells"][f"{name}-{cell.name}"] = {**found, **placed(live), "said": list(said)}
        said.clear()

    def on_rank_1(disturb: Callable[[LiveState], None]) -> Callable[[LiveState], None]:
        return disturb if rank == 1 else undisturbed

    for name, cell in LAYOUTS.items():
        for place in PLACES if name == "block" else ("forward", "recompute", "backward"):
            if place == "recompute" and cell.recompute == "none":
                continue
            entry(f"{name}, {place}", cell, on_rank_1(raise_at(place)))

    # After an evaluation FSDP2 would gather its last unit first: on the ranks that go on, not on the one that failed.
    def after_evaluation(place: str) -> Callable[[LiveState], None]:
        def disturb(live: LiveState) -> None:
            batches = batches_of(rank, 1, text_tokens(live.model))[0]
            evaluate(accelerator, live.model, batches, finetune_mem_limit.micro_batch_loss)
            on_rank_1(raise_at(place))(live)

        return disturb

    for place in ("forward", "backward"):
        entry(f"after an evaluation, {place}", LAYOUTS["embeddings"], after_evaluation(place))
    entry("both ranks at different places", LAYOUTS["block"], raise_at("backward" if rank == 0 else "forward"))
    for kind, numbers in ((out_of_memory.CountedAllGather, (9,)), (out_of_memory.CountedReduceScatter, (12,))):
        with no_buffer(kind, numbers if rank == 1 else ()):
            entry(f"buffer of {kind.__name__}", LAYOUTS["block"])

    # Dropout: a step that is done again draws what it drew, as a run does that has small micro-batches from the start.
    with mock.patch.object(finetune_mem_limit.SmallerMicroBatches, "split", split_from_the_start):
        expected = run(dropout)
    on = on_rank_1(raise_at("backward"))
    results["dropout"] = same_bits(run(dropout, on), expected)
    results["dropout, after an evaluation"] = same_bits(run(dropout, after_evaluation("forward")), expected)
    with mock.patch.object(out_of_memory, "set_generator_states"):
        results["dropout, not rewound"] = same_bits(run(dropout, on), expected)
    said.clear()

    results["ends"] = {}
    for name, place, rows in (("one row", "forward", 0), ("optimizer", "optimizer", 0)):
        code = None
        try:
            run(LAYOUTS["block"], on_rank_1(raise_at(place, rows)))
        except SystemExit as exit_:
            code = exit_.code
            accelerator.free_memory()
        codes = [None] * world_size
        dist.all_gather_object(codes, code)
        results["ends"][name] = codes
    if rank == 0:
        out_path.write_text(json.dumps(results, indent=1))
    end(accelerator)


def split_from_the_start(self, batch: dict) -> list[dict]:
    """Rows one by one, as if a rank had run out of memory before."""
    return [{name: values[i : i + 1] for name, values in batch.items()} for i in range(len(batch["input_ids"]))]


def one_row_fits() -> None:
    """In a rank of another run: from the second step on rank 1 is out of memory in micro-batches of more rows."""
    from training.progress import Progress

    begin, forward = Progress.begin, LlamaMLP.forward

    def too_large(module, hidden):
        if hidden.shape[0] > 1 and torch.is_grad_enabled():
            run_out()
        return forward(module, hidden)

    def begun(progress, step):
        if step == 2 and dist.get_rank() == 1:
            LlamaMLP.forward = too_large
        begin(progress, step)

    Progress.begin = begun


if __name__ == "__main__":
    main()
