"""One row of any common format, read as its author meant it: a chat, a prompt with its completion, or plain text."""

import json
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
    row, where, problem = record, f"row {index + 1}", ""
    if ROW in record:
        row, where, problem = json.loads(record[ROW] or "{}"), record[WHERE], record[PROBLEM]
    return {**row, **{ours: row.get(theirs) for ours, theirs in columns.items()}}, where, problem


def find_format(columns: list[str]) -> str:
    """Return which of FORMATS these columns are. Raises ValueError if none, with what is needed."""
    for name, needed in FORMATS.items():
        if set(needed) <= set(columns):
            return name
    allowed = "; ".join(" + ".join(needed) for needed in FORMATS.values())
    raise ValueError(
        f"The data has columns {sorted(columns)}; needed: {allowed}. Name the columns of a pair yourself, for example "
        "--dataset_columns prompt=question,completion=answer."
    )


def read_example(row: dict[str, Any], row_format: str, has_chat_template: bool) -> Example:
    """Return what a row means. Instructions become a chat where the tokenizer has a template, else a pair.

    Raises:
        ValueError: a column or turn that is missing, empty, of another type or of an unknown role; says which.
    """
    missing = [name for name in FORMATS[row_format] if row.get(name) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} is missing or null")
    if row_format in ("messages", "conversations"):
        return read_chat(row[row_format], read_tools(row), row_format)
    if row_format == "prompt/completion" and isinstance(row["prompt"], list):
        prompt, completion = read_chat(row["prompt"], None, "prompt", False), as_turns(row["completion"])
        answer = read_chat(completion, read_tools(row), "completion")
        is_learnt = [False] * len(prompt.messages) + answer.is_learnt
        return Example(prompt.messages + answer.messages, is_learnt, answer.tools)
    columns = FORMATS[row_format]
    wrong = [f"{name} is {type(row[name]).__name__}" for name in columns if not isinstance(row[name], str)]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}; expected text")
    if not row[columns[-1]].strip():
        raise ValueError(f"{columns[-1]} is empty")
    if row_format == "text":
        return Example(completion=row["text"])
    if row_format == "prompt/completion":
        return Example(prompt=row["prompt"], completion=row["completion"])
    question = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
    if not has_chat_template:
        return Example(prompt=f"{question}\n\n", completion=row["output"])
    turns = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for asked, answered in row.get("history") or []:
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    turns += [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
    return read_chat(turns, None, "instruction")


def as_turns(completion: Any) -> list[dict[str, Any]]:
    """A completion beside a prompt of messages: messages too, or the text of one answer."""
    return [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion


def read_chat(turns: Any, tools: list[dict[str, Any]] | None, column: str, needs_answer: bool = True) -> Example:
    """Return the turns with the roles that templates know. Raises ValueError, naming the turn."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f"{column} is {type(turns).__name__}; expected a list of turns")
    if not turns:
        raise ValueError(f"{column} is empty")
    messages, is_learnt = [], []
    for number, turn in enumerate(turns, start=1):
        try:
            message, weight = read_turn(without_nulls(turn))
        except ValueError as error:
            raise ValueError(f"{column}, turn {number}: {error}") from error
        messages.append(message)
        is_learnt.append(message["role"] == "assistant" and weight)
    if needs_answer and not any(is_learnt):
        roles = [message["role"] for message in messages]
        raise ValueError(f"no answer to learn: roles are {roles}, none is an assistant with weight")
    return Example(messages, is_learnt, tools)


def read_turn(turn: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return (message, whether its author wants it learnt)."""
    given = turn.get("role", turn.get("from"))
    role = next((known for known, names in ROLES.items() if given in names), None)
    if role is None:
        known = ", ".join(name for names in ROLES.values() for name in names)
        raise ValueError(f"unknown role {given!r}; known: {known}")
    content = turn.get("content", turn.get("value"))
    if content is None and role != "assistant":
        raise ValueError(f"a {role} turn has no content")
    message: dict[str, Any] = {"role": role, "content": join_parts(content)}
    calls = turn.get("tool_calls")
    if given in TOOL_CALLERS:
        calls, message["content"] = as_json(message["content"], "a function call"), ""
        calls = calls if isinstance(calls, list) else [calls]
    if calls:
        message["tool_calls"] = [read_tool_call(call) for call in calls]
    message |= {name: turn[name] for name in ("name", "tool_call_id", "reasoning_content") if name in turn}
    if role == "assistant" and not message["content"].strip() and not calls:
        raise ValueError("an assistant turn is empty")
    weights = [turn[name] for name in TURN_WEIGHTS if name in turn]
    return message, all(bool(weight) for weight in weights)


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
        texts.append(part if isinstance(part, str) else part["text"])
    return "".join(texts)


def read_tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """A call as templates expect it: {"type": "function", "function": {"name", "arguments" as an object}}."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise ValueError(f"a tool call needs a name, found {call!r}")
    arguments = function.get("arguments", function.get("parameters", {}))
    arguments = as_json(arguments, "tool call arguments") if isinstance(arguments, str) else arguments
    kept = {"id": call["id"]} if "id" in call else {}
    return {**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def read_tools(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The functions a chat may call: a list, or a JSON string of one; plain ones get the envelope templates expect."""
    tools = row.get("tools") or None
    tools = as_json(tools, "tools") if isinstance(tools, str) else tools
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"tools is {type(tools).__name__}; expected a list of objects")
    tools = [without_nulls(tool) for tool in tools]
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
