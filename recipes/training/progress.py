"""Where this rank is: the step, the phase and the block, marked by the loop as it goes.

Failures, the hang watch and profiles read the same marks. One costs some microseconds and waits for nothing.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from hooks.structure import find_blocks, outermost, outermost_module_lists
from torch import nn
from torch.profiler import record_function


@dataclass
class Progress:
    """`phase` is "" outside of the loop, where ranks need not wait for one another soon."""

    step: int = 0  # the optimizer step that runs, from 1; between two steps the one before
    signals: list[int] = field(default_factory=list)  # that ask the run to save and end (launch.note_stop_signals)
    phase: str = ""
    module: str = ""  # the block, or the part of one, that is in its forward
    is_gathering: bool = False  # the module's unit
    is_behind_blocks: bool = False
    follows_blocks: bool = False
    moves: int = 0  # marks so far: a rank that goes on is not stuck

    def begin(self, step: int) -> None:
        """An optimizer step begins."""
        self.step = step
        self.enter("the loop")

    @contextlib.contextmanager
    def mark(self, phase: str) -> Iterator[None]:
        """Run a block of code as this phase. Where it raises, the phase stays: there it failed."""
        outer = "the loop" if self.phase else ""  # not the phase of an attempt that failed
        self.enter(phase)
        with record_function(f"recipe: {phase}"):
            yield
        self.enter(outer)

    def enter(self, phase: str) -> None:
        """Be in this phase from here on, in no block."""
        self.phase, self.module = phase, ""
        self.is_gathering = phase == "forward" and self.follows_blocks  # of the root, first
        self.is_behind_blocks = False
        self.moves += 1

    @property
    def place(self) -> str:
        """The phase, and the module where one is known: `forward: model.layers.3.mlp`."""
        phase = self.phase or "before or after the loop"
        if phase == "forward" and self.is_behind_blocks:
            return "logits and loss"
        phase = "gathering a unit" if phase == "forward" and self.is_gathering else phase
        return f"{phase}: {self.module}" if self.module else phase


def follow_blocks(model: nn.Module, progress: Progress) -> Progress:
    """Let the blocks of a wrapped model mark that they run: before their unit is gathered, while they compute, behind
    the last one. Compiled blocks do not. Returns `progress`."""
    progress.follows_blocks = True
    model.register_forward_pre_hook(partial(before, progress, "", False))  # behind FSDP2's, which gathers the root
    blocks = outermost(find_blocks(model)) if outermost_module_lists(model) else []
    for number, (name, block) in enumerate(blocks):
        is_last = number == len(blocks) - 1
        block.register_forward_pre_hook(partial(before, progress, name, True), prepend=True)  # before FSDP2's own
        block.register_forward_pre_hook(partial(before, progress, name, False))
        block.register_forward_hook(partial(after, progress, "", is_last))
        for key, part in block.named_children():
            if any(part.children()):
                part.register_forward_pre_hook(partial(before, progress, f"{name}.{key}", False))
                part.register_forward_hook(partial(after, progress, name, False))
    return progress


def before(progress: Progress, name: str, is_gathering: bool, *_: object) -> None:
    """A module's forward begins, or its unit is gathered for it."""
    if not torch.compiler.is_compiling():
        progress.module, progress.is_gathering, progress.is_behind_blocks = name, is_gathering, False
        progress.moves += 1


def after(progress: Progress, outer: str, is_last: bool, *_: object) -> None:
    """A module's forward has ended, inside of this one."""
    if not torch.compiler.is_compiling():
        progress.module, progress.is_behind_blocks = outer, is_last
        progress.moves += 1
