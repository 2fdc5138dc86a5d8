"""Which tokens are learnt: the tokens of a row, and the labels that follow from the spans of its answers."""

import copy
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from jinja2 import TemplateError
from tokenizers.processors import PostProcessor
from transformers import PreTrainedTokenizerBase

from .chat import Spans, end_tokens, render, special_tokens, template_text
from .formats import Example

IGNORE_INDEX = -100  # what torch's cross-entropy leaves out

Tokens = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids, and the characters where each begins and ends
Part = tuple[list[int], list[int], str]  # input ids, labels, what happened to them


def render_prompt(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text up to the last answer, with the template's generation prompt."""
    return template_text(example, tokenizer, -1, has_prompt=True)


class MergedSeam(ValueError):
    """A token begins before an answer and ends inside it: no prompt could ever lead the model to it."""


def encode_all(
    examples: list[Example], tokenizer: PreTrainedTokenizerBase, assistant_only_loss: bool, completion_only_loss: bool
) -> list[tuple[list[int], list[int], str] | Exception]:
    """Return, for each example, (input ids, labels, notes), or what is wrong with it.

    The notes: `apart` for a pair that was tokenised apart, as at inference, where a token would cross the seam between
    prompt and completion; `special` where a control token stands in the content; `endless` where an answer has no end.
    """
    special = special_tokens(tokenizer)
    ends, pattern = end_tokens(special, tokenizer), re.compile("|".join(map(re.escape, special)) or "$^")
    results: list[Any] = []
    for example in examples:
        try:
            results.append(render(example, tokenizer, assistant_only_loss, completion_only_loss, ends))
        except (ValueError, KeyError, TypeError, AttributeError, TemplateError) as error:
            results.append(error)
    good = [index for index, result in enumerate(results) if not isinstance(result, Exception)]
    for index, tokens in zip(good, tokenize_texts([results[index][0] for index in good], tokenizer)):
        (text, spans), example = results[index], examples[index]
        contents = [message["content"] for message in example.messages] or [example.prompt, example.completion]
        notes = " special" * any(map(pattern.search, contents))
        notes += " endless" * any(not text[start:end].rstrip().endswith(ends) for start, end in spans)
        try:
            results[index] = (*label_tokens(tokens, text, spans, tokenizer, bool(example.messages)), notes)
        except MergedSeam as error:
            results[index] = error
            apart = encode_apart(tokens[0], example.prompt, text, tokenizer) if not example.messages else None
            if apart:
                results[index] = (*apart, notes + " apart")
    return results


def encode_apart(
    whole: np.ndarray, prompt: str, text: str, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[int]] | None:
    """The prompt's own tokens, then the completion's; None where together they are another text than the whole.

    Tokenizers in the manner of SentencePiece put a blank before any text, so the completion is tried behind a newline
    too, whose tokens are then cut off.
    """
    ((ids, _, _),) = tokenize_texts([prompt], tokenizer)
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    for anchor in ("", "\n"):
        texts = [anchor, anchor + text[len(prompt) :]]
        head, rest = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        is_cut, rest = rest[: len(head)] == head, rest[len(head) :]
        if is_cut and decode(ids.tolist() + rest) == decode(whole):
            return ids.tolist() + rest, [IGNORE_INDEX] * len(ids) + rest
    return None


def tokenize_texts(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    """Return the tokens of each text.

    Exactly one begin token for a tokenizer that uses one: its own, unless the text (a chat template's) starts with it.
    An end token that the tokenizer appends is dropped: the text ends as its format says.
    """
    has_begin = [tokenizer.bos_token is not None and text.lstrip().startswith(tokenizer.bos_token) for text in texts]
    results: list[Tokens] = [()] * len(texts)
    for writes_begin in (False, True):
        chosen = [index for index, has in enumerate(has_begin) if has == writes_begin]
        if not chosen:
            continue
        encoded = encode_untrimmed([texts[index] for index in chosen], tokenizer, not writes_begin)
        for index, token_ids, offsets in zip(chosen, encoded["input_ids"], encoded["offset_mapping"]):
            ids, (starts, ends) = np.asarray(token_ids), np.asarray(offsets).reshape(-1, 2).T
            is_own = starts < ends
            if not is_own.all():
                is_own |= ~np.isin(ids, tokenizer.all_special_ids) | (np.arange(len(ids)) == 0)
            results[index] = ids[is_own], starts[is_own], ends[is_own]
    return results


def encode_untrimmed(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool
) -> dict[str, list[list]]:
    """Tokens with offsets that cover their blanks, which some tokenizers (GPT-NeoX) trim: a seam would not be seen."""
    core = tokenizer.backend_tokenizer
    given = core.post_processor
    core.post_processor = untrimmed(given)
    try:
        unused = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
        return tokenizer(texts, add_special_tokens=add_special_tokens, return_offsets_mapping=True, **unused)
    finally:
        core.post_processor = given


def untrimmed(processor: PostProcessor | None) -> PostProcessor | None:
    """The same processor, with offsets that hide no blanks."""
    state = processor.__getstate__() if processor else b""
    if b'"trim_offsets":true' not in state:
        return processor
    processor = copy.deepcopy(processor)
    processor.__setstate__(state.replace(b'"trim_offsets":true', b'"trim_offsets":false'))
    return processor


def label_tokens(
    tokens: Tokens, text: str, spans: Spans, tokenizer: PreTrainedTokenizerBase, allows_blank: bool = True
) -> tuple[list[int], list[int]]:
    """Return (input ids, labels): every token that lies in a span is learnt.

    In a chat a blank that the template wrote before the answer may be part of its first token.

    Raises:
        MergedSeam: a token begins before a span and ends inside it.
    """
    ids, starts, ends = tokens
    is_learnt = np.zeros(len(ids), dtype=bool)
    for start, end in spans:
        is_learnt |= (starts < end) & (ends > start)
        merged = np.flatnonzero((starts < start) & (ends > start))
        if len(merged) and (text[starts[merged[0]] : start].strip() or not allows_blank):
            near = tokenizer.convert_ids_to_tokens(ids[max(0, merged[0] - 2) : merged[0] + 3].tolist())
            token = tokenizer.convert_ids_to_tokens(int(ids[merged[0]]))
            raise MergedSeam(
                f"the answer starts inside the token {token!r} (around it: {near}); move blanks from the "
                "end of the prompt to the start of the answer, or put one there"
            )
    return ids.tolist(), np.where(is_learnt, ids, IGNORE_INDEX).tolist()


def fit(
    ids: list[int], labels: list[int], max_length: int, truncation_mode: str, *, is_text: bool, bos_token_id: int | None
) -> Iterator[Part]:
    """Yield a row as it is, or cut to max_length as truncation_mode says; the state says what was done.

    keep_start: the end goes. An answer that is cut off is not learnt: it would teach the model not to stop.
    keep_end: the beginning goes, but for the begin token. drop: the row goes. split: pieces, nothing goes.
    """
    if len(ids) <= max_length:
        yield ids, labels, "kept" if has_labels(labels) else "lost"
        return
    if truncation_mode == "drop":
        yield [], [], "dropped"
        return
    if truncation_mode == "split":
        for start in range(0, len(ids) - 1, max_length - 1):  # pieces share a token: all labels are predicted
            piece = [IGNORE_INDEX, *labels[start + 1 : start + max_length]]
            state = "kept split" if has_labels(piece) else "unlabelled"
            yield ids[start : start + max_length], piece, state
        return
    state = "kept cut"
    if truncation_mode == "keep_end":
        head = 1 if ids[0] == bos_token_id else 0
        first = len(ids) - max_length + head
        if not is_text and labels[first] != IGNORE_INDEX and labels[first - 1] != IGNORE_INDEX:
            state += " headless"
        ids, labels = ids[:head] + ids[first:], labels[:head] + labels[first:]
    else:
        is_cut_off = not is_text and labels[max_length - 1] != IGNORE_INDEX and labels[max_length] != IGNORE_INDEX
        ids, labels = ids[:max_length], labels[:max_length]
        if is_cut_off:
            answer = max_length - next((n for n, label in enumerate(labels[::-1]) if label == IGNORE_INDEX), max_length)
            labels = labels[:answer] + [IGNORE_INDEX] * (max_length - answer)
            state += " unfinished"
    yield ids, labels, state if has_labels(labels) else state.replace("kept", "lost")


def has_labels(labels: list[int]) -> bool:
    """Whether a row teaches anything: its first token is predicted by nothing."""
    return any(label != IGNORE_INDEX for label in labels[1:])
