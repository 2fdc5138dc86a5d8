"""One row of any common format, read as its author meant it: a chat, a prompt with its completion, or plain text."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# Columns of each format, in the order in which they are looked for.
FORMATS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt/completion": ("prompt", "completion"),
    "instruction/output": ("instruction", "output"),
    "text": ("text",),
}
# Foreign names of the four roles that chat templates know.
ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "bot", "chatgpt", "model", "ai", "function_call", "tool_call"),
    "tool": ("tool", "function", "observation", "ipython", "function_response", "tool_response"),
}
TOOL_CALLERS = ("function_call", "tool_call")
TURN_WEIGHTS = ("weight", "train", "loss")  # per-turn columns that say whether a turn is learnt (OpenAI, axolotl)

# Columns of a text file's rows: the row as JSON, where it stood, and why it could not be read (else empty).
ROW, WHERE, PROBLEM = "_row", "_where", "_problem"


@dataclass
class Example:
    """A chat (messages and, for each, whether it is learnt), or a prompt and its completion; a text has no prompt."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    is_learnt: list[bool] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    prompt: str = ""
    completion: str = ""


def row_of(record: dict[str, Any], index: int, columns: dict[str, str]) -> tuple[dict[str, Any], str, str]:
    """(row, where it stands, problem) of one record, with the user's column names changed to ours."""
    if ROW in record:
        row, where, problem = json.loads(record[ROW] or "{}"), record[WHERE], record[PROBLEM]
    else:  # Arrow fills objects with the fields of all other rows
        row, where, problem = without_nulls(record), f"row {index + 1}", ""
    return {**row, **{ours: row[theirs] for ours, theirs in columns.items() if theirs in row}}, where, problem


def as_columns(records: list[dict[str, Any]]) -> dict[str, list]:
    """Records as columns; a column that only some have is null in the others."""
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


def find_format(row: dict[str, Any], mapped: Iterable[str] = ()) -> str:
    """Return which of FORMATS a row is; one that the user's --dataset_columns make comes first.

    Raises:
        ValueError: none, with what is needed.
    """
    columns = {name for name, value in row.items() if value is not None}
    for name, needed in sorted(FORMATS.items(), key=lambda item: not set(item[1]) <= set(mapped)):
        if set(needed) <= columns:
            return name
    allowed = "; ".join(" + ".join(needed) for needed in FORMATS.values())
    raise ValueError(
        f"the columns with values are {sorted(columns)}; needed: {allowed}. Name the columns of a pair yourself, for "
        "example --dataset_columns prompt=question,completion=answer"
    )


def read_example(row: dict[str, Any], row_format: str, has_chat_template: bool) -> Example:
    """Return what a row means. Instructions become a chat where the tokenizer has a template, else a pair.

    Raises:
        ValueError: a column or turn that is missing, empty, of another type or of an unknown role; says which.
    """
    if row_format in ("messages", "conversations"):
        turns = row[row_format]
        if row.get("system") and isinstance(turns, list) and not any(role_of(turn) == "system" for turn in turns):
            turns = [{"role": "system", "content": row["system"]}, *turns]
        return read_chat(turns, read_tools(row), row_format)
    if row_format == "prompt/completion" and isinstance(row["prompt"], list):
        prompt, completion = read_chat(row["prompt"], None, "prompt", False), as_turns(row["completion"])
        answer = read_chat(completion, read_tools(row), "completion")
        is_learnt = [False] * len(prompt.messages) + answer.is_learnt
        return Example(prompt.messages + answer.messages, is_learnt, answer.tools)
    given = [name for name in (*FORMATS[row_format], "input", "system") if row.get(name) is not None]
    wrong = [f"{name} is {type(row[name]).__name__}" for name in given if not isinstance(row[name], str)]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}; expected text")
    last = FORMATS[row_format][-1]
    if not row[last].strip():
        raise ValueError(f"{last} is empty")
    if row_format == "text":
        return Example(completion=row["text"])
    if row_format == "prompt/completion":
        return Example(prompt=row["prompt"], completion=row["completion"])
    return read_instruction(row, has_chat_template)


def read_instruction(row: dict[str, Any], has_chat_template: bool) -> Example:
    """An instruction with its input and output, after a system text and earlier exchanges if there are any."""
    question = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
    history = row.get("history") or []
    is_pairs = isinstance(history, list) and all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in history)
    if not is_pairs or not all(isinstance(text, str) for pair in history for text in pair):
        raise ValueError("history is no list of [question, answer] pairs of text")
    if not has_chat_template:
        if row.get("system") or history:
            raise ValueError("system and history need a tokenizer with a chat template")
        return Example(prompt=f"{question}\n\n", completion=row["output"])
    turns = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for asked, answered in history:
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    turns += [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
    return read_chat(turns, read_tools(row), "instruction")


def as_turns(completion: Any) -> list[dict[str, Any]]:
    """A completion beside a prompt of messages: messages too, or the text of one answer."""
    return [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion


def read_chat(turns: Any, tools: list[dict[str, Any]] | None, column: str, needs_answer: bool = True) -> Example:
    """Return the turns with the roles that templates know. Raises ValueError, naming the turn."""
    if not isinstance(turns, list):
        raise ValueError(f"{column} is {type(turns).__name__}; expected a list of turns")
    if not turns:
        raise ValueError(f"{column} is empty")
    messages, is_learnt = [], []
    for number, turn in enumerate(turns, start=1):
        try:
            message, weight = read_turn(turn)
        except ValueError as error:
            raise ValueError(f"{column}, turn {number}: {error}") from error
        messages.append(message)
        is_learnt.append(message["role"] == "assistant" and weight)
    if needs_answer and not any(is_learnt):
        roles = [message["role"] for message in messages]
        raise ValueError(f"no answer to learn: roles are {roles}, none is an assistant with weight")
    return Example(messages, is_learnt, tools)


def role_of(turn: Any) -> str | None:
    """The role that templates know, None for a foreign one."""
    given = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
    return next((known for known, names in ROLES.items() if given in names), None)


def read_turn(turn: Any) -> tuple[dict[str, Any], bool]:
    """Return (message, whether its author wants it learnt)."""
    if not isinstance(turn, dict):
        raise ValueError(f"found {type(turn).__name__}; expected an object")
    given, role = turn.get("role", turn.get("from")), role_of(turn)
    if role is None:
        known = ", ".join(name for names in ROLES.values() for name in names)
        raise ValueError(f"unknown role {str(given)[:40]!r}; known: {known}")
    content = turn.get("content", turn.get("value"))
    if content is None and role != "assistant":
        raise ValueError(f"a {role} turn has no content")
    message: dict[str, Any] = {"role": role, "content": join_parts(content)}
    calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else None)
    if given in TOOL_CALLERS:
        calls, message["content"] = as_json(message["content"], "a function call"), ""
        calls = calls if isinstance(calls, list) else [calls]
    if calls:
        message["tool_calls"] = [read_tool_call(call) for call in calls]
    kept = ("name", "tool_call_id", "reasoning_content")
    message |= {name: turn[name] for name in kept if turn.get(name) is not None}
    if role == "assistant" and not message["content"].strip() and not calls:
        raise ValueError("an assistant turn is empty")
    weights = [turn[name] for name in TURN_WEIGHTS if turn.get(name) is not None]
    wrong = [weight for weight in weights if isinstance(weight, str) or weight not in (0, 1)]
    if wrong:
        raise ValueError(f"weight {wrong[0]!r}; allowed: 0, 1, true, false")
    return message, all(weights)


def join_parts(content: Any) -> str:
    """The text of a turn: a string, nothing (beside tool calls), or parts of text. Raises ValueError for others."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"content is {type(content).__name__}; expected text or a list of text parts")
    texts = []
    for part in content:
        kind = "text" if isinstance(part, str) else part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise ValueError(f"content holds a part of type {kind}; only text parts can be learnt here")
        text = part if isinstance(part, str) else part.get("text")
        if not isinstance(text, str):
            raise ValueError(f"content holds a text part whose text is {type(text).__name__}")
        texts.append(text)
    return "".join(texts)


def read_tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """A call as templates expect it: {"type": "function", "function": {"name", "arguments" as an object}}."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise ValueError(f"a tool call needs a name, found {str(call)[:80]}")
    arguments = function.get("arguments", function.get("parameters", {}))
    arguments = as_json(arguments, "tool call arguments") if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of the call {function['name']!r} are {type(arguments).__name__}, no object")
    kept = {"id": call["id"]} if "id" in call else {}
    return {**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def read_tools(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The functions a chat may call: a list, or a JSON string of one; plain ones get the envelope templates expect."""
    tools = row.get("tools") or row.get("functions") or None
    tools = as_json(tools, "tools") if isinstance(tools, str) else tools
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"tools is {type(tools).__name__}; expected a list of objects")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def as_json(text: str, what: str) -> Any:
    """Parse JSON inside a row. Raises ValueError naming what it should have been."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} is not JSON ({error}): {text[:80]!r}") from error


def without_nulls(value: Any) -> Any:
    """Drop null fields at any depth: Arrow fills a row's objects with the fields of all other rows."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
