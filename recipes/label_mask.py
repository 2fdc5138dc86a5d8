"""Which tokens are learnt: the text of a row, the character spans of its answers, and the labels that follow from them.

Spans come from the chat template's own generation markers if it has them, else from rendering the chat turn by turn,
which is checked: a template that writes earlier turns differently later on is an error, never a silently wrong mask.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from data_formats import Example
from jinja2 import TemplateError
from losses import IGNORE_INDEX
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

Spans = list[tuple[int, int]]
Tokens = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids, and the characters where each begins and ends
Part = tuple[list[int], list[int], str]  # input ids, labels, what happened to them


def render(
    example: Example,
    tokenizer: PreTrainedTokenizerBase,
    assistant_only_loss: bool = True,
    completion_only_loss: bool = True,
) -> tuple[str, Spans]:
    """Return (text, character spans that are learnt).

    Raises:
        ValueError: no chat template, or one that drops tools or rewrites turns.
    """
    if not example.messages:
        text = example.prompt + without_end(example.completion, tokenizer) + (tokenizer.eos_token or "")
        return text, [(len(example.prompt) if completion_only_loss else 0, len(text))]
    if tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template; use prompt/completion or text columns, or another model")
    for message in example.messages:
        message["content"] = without_end(message["content"], tokenizer)
    text = tokenizer.apply_chat_template(example.messages, tools=example.tools, tokenize=False)
    check_complete(text, example, tokenizer)
    if not assistant_only_loss:
        return text, [(0, len(text))]
    return text, marked_spans(text, example, tokenizer) or turn_spans(text, example, tokenizer)


def without_end(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text without an end token of its own: one is added, and two would be learnt."""
    end = tokenizer.eos_token
    return text.rstrip().removesuffix(end) if end and text.rstrip().endswith(end) else text


def render_prompt(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text up to the last answer, with the template's generation prompt."""
    return tokenizer.apply_chat_template(
        example.messages[:-1], tools=example.tools, tokenize=False, add_generation_prompt=True
    )


def check_complete(text: str, example: Example, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if the template leaves out tools, tool calls or a turn: the model would learn to guess."""
    if example.tools and tokenizer.apply_chat_template(example.messages, tokenize=False) == text:
        raise ValueError(f"the chat template leaves out the tool {example.tools[0]['function'].get('name')!r}")
    if any("tool_calls" in message for message in example.messages):
        without = [{key: m[key] for key in m if key != "tool_calls"} for m in example.messages]
        if tokenizer.apply_chat_template(without, tools=example.tools, tokenize=False) == text:
            raise ValueError("the chat template leaves out tool calls; it does not know tools")
    for number, (message, is_learnt) in enumerate(zip(example.messages, example.is_learnt), start=1):
        if (is_learnt or message["role"] != "assistant") and message["content"].strip() not in text:
            raise ValueError(f"the chat template leaves out or changes turn {number} ({message['role']})")


def marked_spans(text: str, example: Example, tokenizer: PreTrainedTokenizerBase) -> Spans:
    """Spans of the template's {% generation %} blocks, each with the end token that follows it; none without blocks."""
    if "generation %}" not in tokenizer.chat_template and "generation -%}" not in tokenizer.chat_template:
        return []
    rendered, found = render_jinja_template(
        conversations=[example.messages],
        tools=example.tools,
        chat_template=tokenizer.chat_template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    if rendered[0] != text:
        raise ValueError("the chat template renders its generation markers as another text; cannot mask it")
    ends = sorted(tokenizer.all_special_tokens, key=len, reverse=True)
    answers = [learnt for message, learnt in zip(example.messages, example.is_learnt) if message["role"] == "assistant"]
    if len(found[0]) != len(answers):
        raise ValueError(
            f"the chat template marks {len(found[0])} answers, but the chat has {len(answers)}; cannot mask it"
        )
    spans = []
    for (start, end), is_learnt in zip(found[0], answers):
        follows = next((token for token in ends if text.startswith(token, end)), "")
        is_closed = any(text[start:end].rstrip().endswith(token) for token in ends)
        spans += [(start, end if is_closed else end + len(follows))] if is_learnt else []
    return spans


def turn_spans(text: str, example: Example, tokenizer: PreTrainedTokenizerBase) -> Spans:
    """What the template adds for each learnt turn after its generation prompt.

    Raises:
        ValueError: a template that writes a turn differently when later turns follow; shows where.
    """
    spans = []
    for i, is_learnt in enumerate(example.is_learnt):
        if not is_learnt:
            continue
        if i == 0:
            raise ValueError(
                "the chat starts with an assistant turn, and the template cannot say where its text begins: drop the "
                'turn, or give it "weight": 0'
            )
        before = tokenizer.apply_chat_template(
            example.messages[:i], tools=example.tools, tokenize=False, add_generation_prompt=True
        )
        after = tokenizer.apply_chat_template(example.messages[: i + 1], tools=example.tools, tokenize=False).rstrip()
        for alone, whole in ((before, text), (before, after), (after, text)):
            if not whole.startswith(alone):
                at = next((n for n, (a, b) in enumerate(zip(alone, whole)) if a != b), min(len(alone), len(whole)))
                raise ValueError(
                    f"the chat template writes turn {i + 1} differently when later turns follow "
                    f"({alone[max(0, at - 20) : at + 20]!r} alone, {whole[max(0, at - 20) : at + 20]!r} in the chat); "
                    "cannot mask it. Learn the last answer only (--mask_history), or use another template"
                )
        spans.append((len(before), len(after)))
    return spans


class MergedSeam(ValueError):
    """A token begins before an answer and ends inside it: no prompt could ever lead the model to it."""


def encode_all(
    examples: list[Example], tokenizer: PreTrainedTokenizerBase, assistant_only_loss: bool, completion_only_loss: bool
) -> list[tuple[list[int], list[int], bool] | Exception]:
    """Return, for each example, (input ids, labels, whether a pair was tokenised apart), or what is wrong with it.

    A pair is tokenised apart, as at inference, where a token would cross the seam between prompt and completion.
    """
    results: list[Any] = []
    for example in examples:
        try:
            results.append(render(example, tokenizer, assistant_only_loss, completion_only_loss))
        except (ValueError, KeyError, TypeError, AttributeError, TemplateError) as error:
            results.append(error)
    good = [index for index, result in enumerate(results) if not isinstance(result, Exception)]
    for index, tokens in zip(good, tokenize_texts([results[index][0] for index in good], tokenizer)):
        (text, spans), example = results[index], examples[index]
        try:
            results[index] = (*label_tokens(tokens, text, spans, tokenizer, bool(example.messages)), False)
        except MergedSeam as error:
            results[index] = error
            apart = encode_apart(example.prompt, text, tokenizer) if not example.messages else ([], [])
            if apart[0] and tokenizer.decode(apart[0]) == tokenizer.decode(tokens[0]):
                results[index] = (*apart, True)
    return results


def encode_apart(prompt: str, text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The prompt's own tokens, then the completion's."""
    ((ids, _, _),) = tokenize_texts([prompt], tokenizer)
    rest = tokenizer(text[len(prompt) :], add_special_tokens=False, verbose=False)["input_ids"]
    return ids.tolist() + rest, [IGNORE_INDEX] * len(ids) + rest


def tokenize_texts(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    """Return the tokens of each text.

    Exactly one begin token for a tokenizer that uses one: its own, unless the text (a chat template's) starts with it.
    An end token that the tokenizer appends is dropped: the text ends as its format says.
    """
    has_begin = [tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token) for text in texts]
    results: list[Tokens] = [()] * len(texts)
    for writes_begin in (False, True):
        chosen = [index for index, has in enumerate(has_begin) if has == writes_begin]
        if not chosen:
            continue
        encoded = tokenizer(
            [texts[index] for index in chosen],
            add_special_tokens=not writes_begin,
            return_offsets_mapping=True,
            verbose=False,
        )
        for index, token_ids, offsets in zip(chosen, encoded["input_ids"], encoded["offset_mapping"]):
            ids, (starts, ends) = np.asarray(token_ids), np.asarray(offsets).reshape(-1, 2).T
            is_own = (starts < ends) | ~np.isin(ids, tokenizer.all_special_ids) | (np.arange(len(ids)) == 0)
            results[index] = ids[is_own], starts[is_own], ends[is_own]
    return results


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
    ids: list[int], labels: list[int], max_length: int, truncation_mode: str, is_text: bool, bos_token_id: int | None
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
