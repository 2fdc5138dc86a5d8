"""The text of a row and the character spans of it that are learnt: for a chat, what the model's own template writes.

Spans come from the chat template's own generation markers if it has them, else from rendering the chat turn by turn,
which is checked: a template that writes earlier turns differently later on, or leaves a part of the chat out, is an
error, never a silently wrong mask.
"""

import json
import re
from dataclasses import replace
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from .formats import Example

Spans = list[tuple[int, int]]
Path = tuple[str | int, ...]  # of a piece of a chat: ("messages", 2, "content")
WORD = "qzx{}xzq"  # stands in for a piece: no template, language or chat writes it
MARKERS = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
BEGIN, END = WORD.format("begin"), WORD.format("end")
MARK = WORD.format("mark")  # a macro
MARKED = "{% macro " + MARK + "() %}" + BEGIN + "{{ caller() }}" + END + "{% endmacro %}\n"  # Jinja drops this newline


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """All special tokens, longest first. Those with a role (eos, pad) are few: a turn may end in another one."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(sorted({*added, *tokenizer.all_special_tokens}, key=lambda token: (-len(token), token)))


def end_tokens(special: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The special tokens that an answer may end in: all but the begin token, unless it is the end token too."""
    return tuple(token for token in special if token != tokenizer.bos_token or token == tokenizer.eos_token)


def render(
    example: Example,
    tokenizer: PreTrainedTokenizerBase,
    assistant_only_loss: bool,
    completion_only_loss: bool,
    ends: tuple[str, ...],
) -> tuple[str, Spans]:
    """Return (text, character spans that are learnt).

    Raises:
        ValueError: no chat template, or one that leaves out a part of the chat or rewrites turns.
    """
    if not example.messages:
        text, end = example.prompt + example.completion, tokenizer.eos_token or ""
        if end and example.completion.rstrip().endswith(end):
            text = text.rstrip().removesuffix(end)  # one is added, and two would be learnt
        text += end
        return text, [(len(example.prompt) if completion_only_loss else 0, len(text))]
    if tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template; use prompt/completion or text columns, or another model")
    example = without_own_ends(example, tokenizer, ends)
    marked = marked_text(example, tokenizer) if assistant_only_loss else None
    text = marked[0] if marked else template_text(example, tokenizer)
    check_complete(text, example, tokenizer)
    if not assistant_only_loss:
        is_assistant = [message["role"] == "assistant" for message in example.messages]
        excluded = [out and answers for out, answers in zip(example.is_excluded, is_assistant)]
        if not any(excluded):
            return text, [(0, len(text))]
        cut = turn_spans(text, replace(example, is_learnt=excluded), tokenizer)
        return text, list(zip([0, *(end for _, end in cut)], [*(start for start, _ in cut), len(text)]))
    spans = marked_spans(*marked, example, tokenizer, ends) if marked else []
    return text, spans or turn_spans(text, example, tokenizer)


def template_text(
    example: Example,
    tokenizer: PreTrainedTokenizerBase,
    stop: int | None = None,
    has_prompt: bool = False,
    **other: str,
) -> str:
    """What the template writes for the turns before `stop`; has_prompt: with its generation prompt."""
    turns, options = example.messages[:stop], {"tools": example.tools, **example.template_options, **other}
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=has_prompt, **options)


def without_own_ends(example: Example, tokenizer: PreTrainedTokenizerBase, ends: tuple[str, ...]) -> Example:
    """Answers without an end token of their own where the template adds the same one: two would be learnt."""
    for i, message in enumerate(example.messages):
        content = message["content"].rstrip()
        if message["role"] != "assistant" or not content.endswith(ends):
            continue
        own = next(token for token in ends if content.endswith(token))
        word = WORD.format(i)
        _, _, follows = template_text(put(example, {("messages", i, "content"): word}), tokenizer).partition(word)
        if follows.lstrip().startswith(own):
            example = put(example, {("messages", i, "content"): content.removesuffix(own)})
    return example


def put(example: Example, pieces: dict[Path, str]) -> Example:
    """The chat with other text for some of its pieces."""

    def changed(value: Any, path: Path) -> Any:
        if path in pieces:
            return pieces[path]
        if isinstance(value, dict):
            return {key: changed(item, (*path, key)) for key, item in value.items()}
        return [changed(item, (*path, i)) for i, item in enumerate(value)] if isinstance(value, list) else value

    messages, tools = changed(example.messages, ("messages",)), changed(example.tools, ("tools",))
    return replace(example, messages=messages, tools=tools)


def find_pieces(example: Example) -> dict[Path, str]:
    """Where the parts of a chat stand that its template must write, and what they are called.

    An earlier answer that is not learnt may be shortened: templates leave out earlier reasoning on purpose.
    """
    found: dict[Path, str] = {}
    for n, tool in enumerate(example.tools or []):
        name = tool["function"].get("name")
        path = ("tools", n, "function", "name") if isinstance(name, str) else ("tools", n, "function")
        found[path] = f"the tool {name!r}"
    for i, (message, is_learnt) in enumerate(zip(example.messages, example.is_learnt)):
        turn = f"turn {i + 1} ({message['role']})"
        if is_learnt or message["role"] != "assistant":
            if message["content"].strip():
                found["messages", i, "content"] = f"or changes {turn}"
            if is_learnt and str(message.get("reasoning_content") or "").strip():
                found["messages", i, "reasoning_content"] = f"the reasoning of {turn}"
        for n, call in enumerate(message.get("tool_calls") or []):
            path = ("messages", i, "tool_calls", n, "function")
            for name in (("name",), *(("arguments", key) for key in call["function"]["arguments"])):
                found[(*path, *name)] = f"the tool call {call['function']['name']!r} of {turn}, or a part of it"
    return found


def check_complete(text: str, example: Example, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if the template leaves out tools, tool calls or a turn: the model would learn to guess.

    A word of its own in place of each piece must turn up: the piece itself may stand in the text for another reason.
    """
    fix = "use a template that writes it, or leave it out of the data"
    last_only = ", or learn the last answer only (--mask_history)"
    pieces = find_pieces(example)
    if all(path[0] == "messages" and path[2] == "content" for path in pieces) and in_order(text, example, tokenizer):
        return
    words = {path: WORD.format(n) for n, path in enumerate(pieces)}
    rendered = template_text(put(example, words), tokenizer)
    for path, word in words.items():
        # What a template writes may depend on other pieces, so one that is missing is tried alone.
        if word not in rendered and word not in template_text(put(example, {path: word}), tokenizer):
            is_answer = path[0] == "messages" and path[2] != "tool_calls" and example.is_learnt[path[1]]
            raise ValueError(f"the chat template leaves out {pieces[path]}; {fix}{last_only * is_answer}")
    for i, (message, is_learnt) in enumerate(zip(example.messages, example.is_learnt)):
        content = message["content"]
        if is_learnt and content.strip() not in text:  # other blanks, or written as JSON, is as good
            forms = content, json.dumps(content, ensure_ascii=False)[1:-1], json.dumps(content)[1:-1]
            if not any("".join(form.split()) in "".join(text.split()) for form in forms):
                raise ValueError(
                    f"the chat template leaves out or changes turn {i + 1} ({message['role']}); {fix}{last_only}"
                )


def in_order(text: str, example: Example, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether each content stands in the text after the one before, and not in the template: then none is left out."""
    at, template = 0, tokenizer.get_chat_template(tools=example.tools)
    for message in example.messages:
        content = message["content"].strip()
        if content in template:
            return False
        at = text.find(content, at) + len(content)
        if at < len(content):
            return False
    return True


def marked_text(example: Example, tokenizer: PreTrainedTokenizerBase) -> tuple[str, Spans] | None:
    """(the chat, the spans of its {% generation %} blocks), None for a template without blocks."""
    template = tokenizer.get_chat_template(tools=example.tools)
    if not MARKERS.search(template):
        return None
    # transformers tells of tokens alone, and a token may cross a border.
    template = MARKED + MARKERS.sub(lambda m: m[1] + ("endcall" if m[2] else f"call {MARK}()") + m[3], template)
    pieces = re.split(f"{BEGIN}|{END}", template_text(example, tokenizer, chat_template=template))
    text, ends = "".join(pieces), list(accumulate(map(len, pieces)))  # of what is no answer and of answers, in turn
    if text != template_text(example, tokenizer):
        raise ValueError("the chat template changes the text of its {% generation %} blocks; cannot mask it")
    return text, list(zip(ends[::2], ends[1::2]))


def marked_spans(
    text: str, found: Spans, example: Example, tokenizer: PreTrainedTokenizerBase, ends: tuple[str, ...]
) -> Spans:
    """The template's {% generation %} blocks that are learnt, each with the end token that follows it."""
    answers = [i for i, message in enumerate(example.messages) if message["role"] == "assistant"]
    if len(found) != len(answers):
        raise ValueError(
            f"the chat template marks {len(found)} answers, but the chat has {len(answers)}; cannot mask it"
        )
    eos = tokenizer.eos_token
    if not eos or not all(end_of_turn(text, start, end, (eos,)) for start, end in found):
        # A token with which the chat or an answer's header begins is no end, even where it follows an answer.
        prompt = template_text(example, tokenizer, has_prompt=True).removeprefix(text)
        ends = tuple(token for token in ends if not prompt.lstrip().startswith(token) or token == eos)
    return [
        (start, max(end, end_of_turn(text, start, end, ends) or len(lone_turn(text, example, tokenizer, i))))
        for (start, end), i in zip(found, answers)
        if example.is_learnt[i]
    ]


def end_of_turn(text: str, start: int, end: int, ends: tuple[str, ...]) -> int:
    """Where the end token stops that closes or follows a marked answer, blanks between them or not; 0 without one."""
    if text[start:end].rstrip().endswith(ends):
        return end
    rest = text[end:].lstrip()
    follows = next((token for token in ends if rest.startswith(token)), "")
    return len(text) - len(rest) + len(follows) if follows else 0


def lone_turn(text: str, example: Example, tokenizer: PreTrainedTokenizerBase, i: int) -> str:
    """The text up to the end of turn i, empty if the template writes it differently when later turns follow."""
    alone = template_text(example, tokenizer, i + 1).rstrip()
    return alone if text.startswith(alone) else ""


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
        before = template_text(example, tokenizer, i, has_prompt=True)
        if before == template_text(example, tokenizer, i):
            before += header(before, example, tokenizer, i)
        after = template_text(example, tokenizer, i + 1).rstrip()
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


def header(before: str, example: Example, tokenizer: PreTrainedTokenizerBase, i: int) -> str:
    """What a template without a generation prompt writes between the turns before i and the text of an answer there.

    It is not learnt: at inference somebody has to write it. Blanks alone are no header: they belong to the answer.
    """
    word = WORD.format(i)
    plain = replace(example, messages=[*example.messages[:i], {"role": "assistant", "content": word}])
    found, _, _ = template_text(plain, tokenizer).partition(word)
    return found.removeprefix(before) if found[len(before) :].strip() else ""
