"""What is in memory at each moment of a training step: every tensor storage, its bytes, its part and when it went.

Works on real and on fake tensors, which have no memory behind them; planned_step.py runs a step of any size
with the latter.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

from .. import private_torch

PARAMETERS, GRADIENTS, OPTIMIZER = "parameter shards", "gradient shards", "optimizer state"
GATHERED, COMMUNICATION, WHOLE_GRADIENTS = "gathered units", "communication buffers", "gradients not yet reduced"
ACTIVATIONS, RECOMPUTE, LOSS = "activations", "recompute", "logits and loss"
BACKWARD, STEP, OTHER, HOST = "backward temporaries", "clip and step temporaries", "batch and buffers", "host"
PINNED = "host, pinned"
ON_HOST = (HOST, PINNED)
PARTS = (
    *(PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, COMMUNICATION, WHOLE_GRADIENTS),
    *(ACTIVATIONS, RECOMPUTE, LOSS, BACKWARD, STEP, OTHER),
)
MAX_POINTS = 1500  # of the timeline that is handed on


class MemoryTrace(private_torch.OperatorMode):
    """Counts while it is entered, beginning with the state of `model` and `optimizer`.

    Sizes are rounded up to `round_to` bytes (512: CUDA's allocator; 1: the bytes alone), pinned ones to a power of two,
    as torch's host allocator does by itself. `is_host_state`: parameters,
    gradients and optimizer state lie in host memory (fsdp_offload_params), and so does what clip and step make.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, round_to: int = 512, is_host_state: bool = False
    ) -> None:
        super().__init__()
        self.model, self.optimizer, self.round_to, self.is_host_state = model, optimizer, round_to, is_host_state
        self.storages = WeakIdKeyDictionary()  # storage -> [part, bytes, number, stream]
        self.now: Counter[str] = Counter()
        self.total = self.peak = self.host_peak = self.peak_with_host = self.number = self.skipping = 0
        self.peak_parts: dict[str, int] = {}
        self.phase_peaks: dict[str, int] = {}
        self.peak_at = self.unit = ""
        self.phase, self.is_in_head, self.in_host = "forward", False, False
        self.timeline: list[tuple[str, tuple[int, ...]]] = []
        self.log: list[tuple[int, int, int]] = []  # (number, bytes, stream); bytes 0: it went
        self.streams: dict[int, int] = {id(torch.cpu.current_stream()): 0}
        # "all-gather calls", "all-gather bytes", "forward flops", "forward moved" (bytes read and written by what is no
        # matrix product), and so on for the other collectives and phases.
        self.counts: Counter[str] = Counter()

    # -- what is tagged, and as what --

    def part_of_new(self) -> str:
        """The part that a storage made now belongs to, unless something says otherwise later."""
        if self.in_host or (self.is_host_state and self.phase in ("clip", "optimizer step")):
            return PINNED if self.in_host else HOST
        if self.phase in ("clip", "optimizer step"):
            return STEP
        if self.phase == "backward" and torch.is_grad_enabled():  # a backward formula runs without
            return LOSS if self.is_in_head else RECOMPUTE
        if self.is_in_head or self.phase == "loss":
            return LOSS
        return ACTIVATIONS if self.phase in ("forward", "evaluation") else BACKWARD

    def tag(self, value: torch.Tensor | None, part: str) -> None:
        """Count a tensor's storage under this part."""
        if value is None:
            return
        value = value.to_local() if isinstance(value, DTensor) else value
        storage = value.untyped_storage()
        if storage not in self.storages:
            self.add(storage, part)
            return
        record = self.storages[storage]
        if record[0] != part:
            self.resized(record, 0)
            record[0] = part
            self.resized(record, storage.nbytes())

    def add(self, storage: torch.UntypedStorage, part: str) -> None:
        """Begin to follow a storage, until it is freed."""
        self.number += 1
        stream = self.streams.setdefault(id(torch.cpu.current_stream()), len(self.streams))
        record = [part, 0, self.number, stream]
        self.storages[storage] = record
        self.resized(record, storage.nbytes())
        gone = weakref.finalize(storage, MemoryTrace.resized, weakref.proxy(self), record, 0)
        gone.atexit = False

    def resized(self, record: list, nbytes: int) -> None:
        """A followed storage has so many bytes from now on."""
        with contextlib.suppress(ReferenceError):  # the trace itself is gone
            size = self.rounded(nbytes, record[0])
            if record[1] and record[0] not in ON_HOST:
                self.log.append((record[2], 0, record[3]))
            self.account(record, size - record[1])
            record[1] = size
            if size and record[0] not in ON_HOST:
                self.number += 1
                record[2] = self.number
                self.log.append((self.number, size, record[3]))

    def rounded(self, nbytes: int, part: str) -> int:
        """What an allocator takes for so many bytes: torch's of pinned memory a power of two."""
        if part == PINNED and self.round_to > 1 and nbytes:
            return 1 << (nbytes - 1).bit_length()
        return -(-nbytes // self.round_to) * self.round_to

    @property
    def on_host(self) -> int:
        """Bytes that lie in host memory now."""
        return sum(self.now[part] for part in ON_HOST)

    def account(self, record: list, difference: int) -> None:
        """Add to the totals."""
        self.now[record[0]] += difference
        if record[0] in ON_HOST:
            self.host_peak = max(self.host_peak, self.on_host)
        else:
            self.total += difference

    def tag_state(self) -> None:
        """Parameters, gradients, buffers and optimizer state as they are now."""
        state = HOST if self.is_host_state else None
        for parameter in self.model.parameters():
            self.tag(parameter, PINNED if state else PARAMETERS)
            self.tag(parameter.grad, state or GRADIENTS)
        for buffer in self.model.buffers():
            self.tag(buffer, OTHER)
        is_offloaded = hasattr(self.optimizer, "take_back")
        for values in self.optimizer.state.values():
            for value in values.values():
                if isinstance(value, torch.Tensor):
                    moves = is_offloaded and value.ndim
                    self.tag(value, PINNED if moves else state or OPTIMIZER)

    def mark(self, phase: str) -> None:
        """The step goes over to this phase: forward, backward, clip, optimizer step, evaluation."""
        self.phase, self.unit = phase, ""
        self.notice("")

    def notice(self, what: str) -> None:
        """See whether there was never more than now, and note the moment for the chart."""
        parts = tuple(self.now[part] for part in PARTS)
        if not self.timeline or self.timeline[-1][1] != parts:
            self.timeline.append((self.phase, parts))
        self.phase_peaks[self.phase] = max(self.phase_peaks.get(self.phase, 0), self.total)
        if self.phase != "evaluation":
            self.peak_with_host = max(self.peak_with_host, self.total + self.on_host)
        if self.total > self.peak and self.phase != "evaluation":
            self.peak, self.peak_parts = self.total, {part: n for part, n in zip(PARTS, parts) if n}
            self.peak_at = ", ".join(filter(None, (self.phase, self.unit, what)))

    # -- how it sees --

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operations come here one by one
        result = func(*args, **(kwargs or {}))
        if self.skipping:
            return result
        name = str(func)
        if func is private_torch.ALL_GATHER:
            self.tag(args[0], COMMUNICATION)
            self.note_collective("all-gather", args[0].nbytes)
        elif func is private_torch.REDUCE_SCATTER:
            self.tag(args[1], COMMUNICATION)
            self.note_collective("reduce-scatter", args[1].nbytes)
        elif name.startswith(private_torch.ALL_REDUCES):
            self.note_collective("all-reduce", sum(value.nbytes for value in tensors_in(args)))
        part, made = self.part_of_new(), 0
        for value in tensors_in(result):
            if value.device.type == "cpu":
                storage = value.untyped_storage()
                if storage not in self.storages:
                    self.add(storage, part)
                    made += value.nbytes
        self.note_work(func, args, kwargs or {}, result, made)
        self.notice(name.removesuffix(".default"))
        return result

    def note_collective(self, kind: str, nbytes: int) -> None:
        """Bytes of the gathered or not yet scattered tensor."""
        self.counts[f"{kind} calls"] += 1
        self.counts[f"{kind} bytes"] += nbytes

    def note_work(self, func: Any, args: tuple, kwargs: dict, result: Any, made: int) -> None:
        """Operations of matrix products and attention (causal counts half), and the bytes that all else moves."""
        during = "recompute" if self.phase == "backward" and torch.is_grad_enabled() else self.phase
        packet = func.overloadpacket
        if packet in (private_torch.ATTENTION, private_torch.ATTENTION_BACKWARD):
            is_backward = packet is private_torch.ATTENTION_BACKWARD
            query, key, value = args[1:4] if is_backward else args[:3]
            flops = sdpa_flop_count(query.shape, key.shape, value.shape) * (2.5 if is_backward else 1)
            self.counts[f"{during} flops"] += int(flops / (2 if any(a is True for a in args) else 1))
        elif packet in flop_registry:
            self.counts[f"{during} flops"] += flop_registry[packet](*args, **kwargs, out_val=result)
        elif made:
            self.counts[f"{during} moved"] += made + sum(value.nbytes for value in tensors_in(args))

    def __enter__(self) -> "MemoryTrace":
        self.undo = contextlib.ExitStack()
        for owner, name, replacement in self.replacements():
            self.undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        base = getattr(self.model, "base_model", self.model)
        head = self.model.get_output_embeddings() if hasattr(self.model, "get_output_embeddings") else None
        head = head if head is not None else base.get_output_embeddings()
        for handle in (head.register_forward_pre_hook(self.enter_head), self.root_hook()):
            self.undo.callback(handle.remove)
        self.tag_state()
        self.notice("")
        self.start = len(self.log)
        return super().__enter__()

    def __exit__(self, *arguments: Any) -> None:
        super().__exit__(*arguments)
        self.undo.close()

    def root_hook(self) -> Any:
        """A new forward begins outside the head."""
        return self.model.register_forward_pre_hook(lambda *_: setattr(self, "is_in_head", False))

    def enter_head(self, head: nn.Module, inputs: tuple) -> None:
        """From here on it is logits and loss, in forward, and in backward until the gradient of the head's input."""
        self.is_in_head = True
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: setattr(self, "is_in_head", False))

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """What has to be seen and passes no dispatcher: (owner, name, in its place while this is entered)."""
        trace, resize = self, torch.UntypedStorage.resize_
        methods = (private_torch.ALLOCATES, private_torch.REDUCES, private_torch.PROPAGATES)
        allocate, reduce, propagate = (getattr(*method) for method in methods)

        def resize_(storage: torch.UntypedStorage, size: int) -> None:  # FSDP2 frees gathered parameters so
            resize(storage, size)
            if storage in trace.storages:
                trace.resized(trace.storages[storage], storage.nbytes())
                trace.notice("gathering")

        def allocated(parameter: Any, *args: Any, **kwargs: Any) -> None:
            allocate(parameter, *args, **kwargs)
            for output in private_torch.gathered(parameter):
                trace.tag(output, GATHERED)

        def named(method: Any) -> Any:
            def with_name(group: Any, *args: Any, **kwargs: Any) -> Any:
                trace.unit = private_torch.unit_name(group)
                return method(group, *args, **kwargs)

            return with_name

        def reduced(group: Any, *args: Any, **kwargs: Any) -> None:
            trace.unit = f"{private_torch.unit_name(group)} (reduction)"
            for of_now, _, _ in private_torch.gradients(group):
                trace.tag(of_now, WHOLE_GRADIENTS)
            reduce(group, *args, **kwargs)
            for _, kept, shard in private_torch.gradients(group):
                trace.tag(kept, WHOLE_GRADIENTS)
                trace.tag(shard, HOST if trace.is_host_state else GRADIENTS)

        def propagated(self: Any, *args: Any, **kwargs: Any) -> Any:
            trace.skipping += 1  # DTensor runs fake operations of global shape to learn theirs: nobody's memory
            try:
                return propagate(self, *args, **kwargs)
            finally:
                trace.skipping -= 1

        yield torch.UntypedStorage, "resize_", resize_
        yield *private_torch.ALLOCATES, allocated
        for method in private_torch.BEGINS:
            yield *method, named(getattr(*method))
        yield *private_torch.REDUCES, reduced
        yield *private_torch.PROPAGATES, propagated

    @contextlib.contextmanager
    def host(self) -> Iterator[None]:
        """What is made inside lies in host memory."""
        before, self.in_host = self.in_host, True
        try:
            yield
        finally:
            self.in_host = before

    def points(self) -> list[tuple[str, tuple[int, ...]]]:
        """The timeline in at most MAX_POINTS moments, the fullest of every stretch."""
        size = -(-len(self.timeline) // MAX_POINTS)
        stretches = [self.timeline[i : i + size] for i in range(0, len(self.timeline), size)]
        return [max(stretch, key=lambda moment: sum(moment[1])) for stretch in stretches]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors among what an operator is given or returns."""
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in tensors_in(value)]
    return [values] if isinstance(values, torch.Tensor) else []
