"""Greedy answers to held-out prompts, and how many match the expected answer exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from hooks.wrap import reshard_all
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedTokenizerBase

from .arguments import FinetuneArguments
from .progress import Progress

if TYPE_CHECKING:  # rows of the user's own need no rows/
    from rows.tokenizing import Questions


class Answers:
    """Greedy answers to held-out prompts, before and after training; none where there are no questions."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        questions: Questions | None,
        arguments: FinetuneArguments,
    ) -> None:
        self.accelerator, self.model, self.tokenizer = accelerator, model, tokenizer
        self.questions, self.arguments = questions, arguments
        self.before: list[str] = []  # none in a resumed run

    def give(self, progress: Progress) -> list[str]:
        """The answers of now, in order, on every rank."""
        if self.questions is None:
            return []
        with progress.mark("answers"):
            return greedy_answers(
                self.accelerator,
                self.model,
                self.tokenizer,
                self.questions.prompts,
                is_rendered=self.questions.is_rendered,
                batch_size=self.arguments.per_device_eval_batch_size,
                max_new_tokens=self.arguments.max_new_tokens,
            )

    def compare(self, progress: Progress) -> tuple[dict[str, float], str]:
        """Answer once more: (the scores, a few prompts with their answers for a person to read)."""
        if self.questions is None:
            return {}, ""
        return compare_answers(self.questions.prompts, self.questions.answers, self.before, self.give(progress))


@torch.compiler.set_stance("force_eager")  # compiled blocks would be compiled once more for every length
@torch.no_grad()
def greedy_answers(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    *,
    is_rendered: bool,
    batch_size: int,
    max_new_tokens: int,
) -> list[str]:
    """Answer every prompt; the answers, in order, on every rank.

    Ranks take different prompts and stop at different lengths: `synced_gpus` keeps them in step until the last is done.
    """
    register_fsdp_forward_method(model, "generate")  # else the root unit's parameters stay sharded
    was_training = model.training
    ends = {tokenizer.eos_token_id, *as_list(model.generation_config.eos_token_id)} - {None}
    model.eval()
    answers: list[tuple[int, str]] = []
    rank, world_size = accelerator.process_index, accelerator.num_processes
    by_length = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))  # little padding in a batch
    for first in range(0, len(by_length), batch_size * world_size):
        mine = by_length[first : first + batch_size * world_size][rank * batch_size :][:batch_size]
        encoded = tokenizer(
            [prompts[index] for index in mine or [0]],
            add_special_tokens=not is_rendered,
            padding=True,
            padding_side="left",
            return_tensors="pt",
            return_token_type_ids=False,
        ).to(accelerator.device)
        output = model.generate(
            **encoded,
            do_sample=False,
            use_cache=True,
            max_new_tokens=max_new_tokens,
            synced_gpus=world_size > 1,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=sorted(ends),
            repetition_penalty=1.0,  # whatever the model's generation config says: plain greedy
        )
        new_tokens = output[:, encoded["input_ids"].shape[1] :]
        answers += list(zip(mine, tokenizer.batch_decode(new_tokens, skip_special_tokens=True)))
    reshard_all(model)
    model.train(was_training)
    return [answer for _, answer in sorted(gather_object(answers))]


def as_list(value: int | list[int] | None) -> list[int]:
    """A generation config holds one end token, several or none."""
    return value if isinstance(value, list) else [] if value is None else [value]


def exact_match(answers: list[str], expected: list[str]) -> float:
    """Share of answers equal to the expected text, surrounding blanks aside."""
    return sum(a.strip() == e.strip() for a, e in zip(answers, expected)) / len(expected)


def compare_answers(
    prompts: list[str], expected: list[str], before: list[str], after: list[str], n: int = 3
) -> tuple[dict[str, float], str]:
    """(the scores, a few prompts with their answers for a person to read). `before` is empty in a resumed run."""
    lines = []
    for i in range(min(n, len(prompts))):
        lines.append(f"prompt    {prompts[i].strip()!r}")
        lines += [f"  before   {before[i].strip()!r}"] if before else []
        lines += [f"  after    {after[i].strip()!r}", f"  expected {expected[i].strip()!r}"]
    scores = {"exact_match_before": exact_match(before, expected)} if before else {}
    scores["exact_match_after"] = exact_match(after, expected)
    shown = ", ".join(f"{score:.1%} {name.removeprefix('exact_match_')}" for name, score in scores.items())
    return scores, "\n".join([*lines, f"exact match of {len(prompts)} held-out answers: {shown}"])
