"""Out of memory on one rank: all ranks redo the step's rows in smaller micro-batches, or stop with what to try next."""

import contextlib
import gc
import math
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule

from .arguments import FinetuneArguments
from .launch import control_group, stop_together
from .losses import IGNORE_INDEX
from .memory_errors import first_line, is_out_of_memory
from .random_state import generator_states, set_generator_states

Batch = dict[str, torch.Tensor]
ONE_ROW = (
    "One row is too long for this memory. Next, in this order: fsdp_activation_checkpointing on every block, "
    "hook_wrap_embeddings: true, a shorter --max_length, hook_offload_optimizer: true, fsdp_offload_params: true, more "
    "ranks."
)
TWO_TOKENS = (
    "The gathered units alone are too large. Next, in this order: hook_wrap_blocks_per_unit: 1, hook_prefetch_units: "
    "1, hook_wrap_embeddings: true, hook_offload_optimizer: true, fsdp_offload_params: true, more ranks."
)
OPTIMIZER = "Next, in this order: hook_offload_optimizer: true, fsdp_offload_params: true, --use_peft, more ranks."


class SmallerMicroBatches:
    """Runs the micro-batches of a step in pieces whose rows halve when a rank is out of memory.

    `state`: where the run stands. A run that goes on keeps its pieces: rounding, and dropout's masks, depend on them.

    The step stays the same: same rows, same random state, and the loss is divided by the label tokens of the whole
    step, so its gradient is that of the unsplit micro-batches, but for rounding (and for dropout, whose masks depend on
    the shapes, and a mixture's balancing loss, which is a mean over a micro-batch).

    A rank that fails in the middle of a forward or backward leaves the others in a collective that waits for it. It
    goes through the step once more with rows of two tokens, does not send what it had sent, and sends the rest; then
    all ranks learn of it at the same place. In memory that pass costs the gathered units alone.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: FSDPModule,
        arguments: FinetuneArguments,
        *,
        state: dict[str, int],
        say: Callable[[str], None],
    ) -> None:
        self.accelerator, self.model, self.say = accelerator, model, say
        rows = arguments.per_device_train_batch_size
        self.rows_asked, self.rows = rows, min(rows, state["rows_per_piece"] or rows)
        if self.rows < rows:
            say(f"micro-batches of {self.rows} instead of {rows} row(s): it was out of memory before its checkpoint")
        self.sent = SentInStep()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(CountedAllGather(self.sent))
                module.set_custom_reduce_scatter(CountedReduceScatter(self.sent))

    def run(self, forward_backward: Callable[[list[Batch]], torch.Tensor], micro_batches: list[Batch]) -> torch.Tensor:
        """Return what `forward_backward` returns for these micro-batches or their pieces. A collective.

        Ends all ranks (SystemExit) where a single row is too much for one of them.
        """
        device = self.accelerator.device
        while True:
            state = generator_states(device)
            pieces = [piece for batch in micro_batches for piece in self.split(batch)]
            self.sent.start()
            loss_sum, failure = self.attempt(forward_backward, pieces)
            if failure:
                self.model.reset_iter_state()
                release(device)
                self.send_the_rest(forward_backward, pieces, failure)
            num_failed = torch.tensor(int(bool(failure)))
            dist.all_reduce(num_failed, group=control_group())  # between the hosts: the devices still work
            if not num_failed:
                return loss_sum
            self.model.zero_grad()  # of all the step's micro-batches: some hold another rank's filler
            loss_sum = None
            release(device)
            set_generator_states(state, device)
            self.halve(failure)

    def send_the_rest(self, forward_backward: Callable, pieces: list[Batch], failure: str) -> None:
        """Send what the other ranks wait for. Out of memory here too, this rank ends, and with it the run."""
        if self.accelerator.num_processes == 1:
            return
        self.sent.start(already=self.sent.count)
        _, again = self.attempt(forward_backward, [filler(batch) for batch in pieces])
        if again:
            rank = self.accelerator.process_index
            why = f"rank {rank}: out of memory ({failure}), and with rows of two tokens too. {TWO_TOKENS}"
            raise SystemExit(f"\nError: {why}\n")

    def attempt(
        self, forward_backward: Callable[[list[Batch]], torch.Tensor], pieces: list[Batch]
    ) -> tuple[torch.Tensor | None, str]:
        """(the result, "") or (None, what was out of memory); nothing of a failed attempt is kept alive."""
        try:
            return forward_backward(pieces), ""
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold the activations
            return None, first_line(error)

    def split(self, batch: Batch) -> list[Batch]:
        """The pieces of a micro-batch, as many on every rank: one that has fewer rows gets fillers without labels."""
        if self.rows == self.rows_asked:
            return [batch]
        parts = {name: values.split(self.rows) for name, values in batch.items()}
        pieces = [dict(zip(parts, values)) for values in zip(*parts.values())]
        return pieces + [filler(batch)] * (math.ceil(self.rows_asked / self.rows) - len(pieces))

    @property
    def state(self) -> dict[str, int]:
        """What a checkpoint says of it."""
        return {"rows_per_piece": self.rows if self.rows < self.rows_asked else 0}

    def halve(self, failure: str) -> None:
        """Halve the rows of a piece, and say so once."""
        failures = [None] * self.accelerator.num_processes
        dist.all_gather_object(failures, failure)
        with stop_together():
            if failure and self.rows == 1:
                raise ValueError(f"out of memory in forward or backward ({failure}). {ONE_ROW}")
        self.rows = max(1, self.rows // 2)
        found = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text)
        times = math.ceil(self.rows_asked / self.rows)
        self.say(
            f"out of memory ({found}). The step's rows run again, and from here on, in micro-batches of {self.rows} "
            f"instead of {self.rows_asked} row(s), {times} times as many: the global batch stays"
        )


def filler(batch: Batch) -> Batch:
    """A row of two tokens without labels, of the same kind as these rows."""
    small = {name: values[:1, :2].clone() for name, values in batch.items()}
    small["labels"].fill_(IGNORE_INDEX)
    if "attention_mask" in small:
        small["attention_mask"].fill_(1)
    return small


@contextlib.contextmanager
def stop_if_out_of_memory(where: str, advice: str) -> Iterator[None]:
    """Run a block that no rank can redo: one that is out of memory there ends all, with what to try next."""
    with stop_together():
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError(f"out of memory in {where} ({first_line(error)}). {advice}") from error


def release(device: torch.device) -> None:
    """Give back what a failed attempt held."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


class SentInStep:
    """How many collectives of FSDP2 a rank has sent in this step, and how many it is not to send again."""

    def __init__(self) -> None:
        self.start()

    def start(self, already: int = 0) -> None:
        """Begin a step, or begin one again of which the first `already` collectives were sent."""
        self.count, self.already = 0, already

    def send(self, collective: Callable[[], Any]) -> tuple[Any, bool]:
        """(its handle, whether it was sent)."""
        is_new = self.count >= self.already
        handle = collective() if is_new else None
        self.count += 1  # after it: one that fails was not sent
        return handle, is_new


class CountedAllGather:
    """FSDP2's own all-gather, counted."""

    def __init__(self, sent: SentInStep) -> None:
        self.sent = sent

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer, as FSDP2 makes it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        handle, is_sent = self.sent.send(
            lambda: dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        )
        if not is_sent:
            output_tensor.zero_()  # whatever is computed from it is thrown away; zeros overflow nowhere
        return handle


class CountedReduceScatter(CountedAllGather):
    """FSDP2's own reduce-scatter, counted."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        handle, is_sent = self.sent.send(
            lambda: dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        )
        if not is_sent:
            output_tensor.zero_()
        return handle
