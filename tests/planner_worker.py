"""What a planned step is compared with: the same step on real tensors, seen by the profiler of torch's allocator.

    python planner_worker.py truth REQUESTS.json      real tensors in a fake process group, beside fake ones
    python planner_worker.py gloo REQUESTS.json       two processes over gloo, beside fake ones

Prints one JSON list: for each request the true peak, and the planner's. The truth never comes from the planner's own
count.
"""

import dataclasses
import gc
import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))


import torch
import torch.distributed as dist
from hooks.wrap import local
from tools.planner.planned_step import Request
from tools.planner.trace_step import ready, run_step
from tools.proof.cpu_ranks import run_on_cpu_ranks
from torch._C._profiler import _ExtraFields_Allocation
from torch.profiler import ProfilerActivity, profile

# Gloo's own buffers; and the scratch of a CPU kernel that pads uneven shards before a reduction (CUDA's has none).
NOT_OURS = ("c10d::", "_c10d_functional::", "gloo:", "aten::_chunk_cat")
STEPS = 3  # over gloo, whose threads may free a buffer sooner or later: the middle one counts


def main() -> None:
    warnings.filterwarnings("ignore")
    mode, path = sys.argv[1:]
    requests = [Request(**values) for values in json.loads(Path(path).read_text())]
    torch.set_num_threads(1)
    gc.freeze()  # the imported libraries are never garbage
    sys.exit(run_on_cpu_ranks(answer, requests, 2) if mode == "gloo" else answer(requests))


def answer(requests: list[Request]) -> None:
    """The truths, in the process group that there is or in a fake one; then the plans, by one process."""
    truths = [true_peak(dataclasses.replace(request, is_fake=False)) for request in requests]
    if dist.get_backend() == "gloo":
        rank = dist.get_rank()
        dist.barrier()
        dist.destroy_process_group()
        if rank:
            return
    found = []
    for request, truth in zip(requests, truths):
        planned = run_step(dataclasses.replace(request, round_to=1))
        found.append({**truth, "planned": planned.peak_with_host, **dataclasses.asdict(planned), "timeline": []})
    print(json.dumps(found), flush=True)


def true_peak(request: Request) -> dict[str, int]:
    """Bytes that are there before a step, and the most that the allocator's events add to them during it.

    What a collective allocates inside itself is gloo's own buffer; `with_gloo` has it.
    """
    with ready(request) as it:
        gc.collect()
        state = {}
        tensors = [*it.model.parameters(), *it.model.buffers(), *(v for batch in it.batches for v in batch.values())]
        tensors += [value for values in it.optimizer.state.values() for value in values.values()]
        for tensor in map(local, tensors):
            storage = tensor.untyped_storage()
            state[storage.data_ptr()] = storage.nbytes()
        rises = [highest_rise(partial(it.run, None)) for _ in range(1 if dist.get_backend() == "fake" else STEPS)]
    base = sum(state.values())
    del it
    gc.collect()
    ours, whole, count = sorted(rises)[len(rises) // 2]
    return {"true": base + ours, "with_gloo": base + whole, "events": count}


def highest_rise(run: Callable[[], object]) -> tuple[int, int, int]:
    """By how many bytes memory rises during a call, without and with gloo's own; and how many events say so."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = []
    for root in profiler.profiler.kineto_results.experimental_event_tree():
        collect(root, False, events)
    events.sort(key=lambda event: event[0])
    ours, gloos = [], set()
    for _, address, size, is_gloos in events:
        if size > 0 and is_gloos:
            gloos.add(address)
        elif address in gloos:
            gloos.discard(address)  # wherever it is freed
        else:
            ours.append(size)
    return highest(ours), highest(size for _, _, size, _ in events), len(events)


def collect(event, is_gloos: bool, found: list[tuple[int, int, int, bool]]) -> None:
    """(time, address, bytes, whether inside a collective) of each allocation and, with negative bytes, each free."""
    if isinstance(event.extra_fields, _ExtraFields_Allocation):
        found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, is_gloos))
    is_gloos = is_gloos or event.name.startswith(NOT_OURS)
    for child in event.children:
        collect(child, is_gloos, found)


def highest(changes) -> int:
    """The largest sum of a beginning of these numbers."""
    total = most = 0
    for change in changes:
        total += change
        most = max(most, total)
    return most


if __name__ == "__main__":
    main()
