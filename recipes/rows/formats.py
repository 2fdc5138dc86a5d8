"""One row of any common format, read as its author meant it: a chat, a prompt with its completion, or plain text."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

from .turns import as_json, flags_of_turns, kind_of, read_template_options, read_tools, read_turn, role_of

# Columns of each format, in the order in which they are looked for.
FORMATS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt/completion": ("prompt", "completion"),
    "instruction/output": ("instruction", "output"),
    "text": ("text",),
}
OPTIONAL = {"instruction/output": ("input", "system")}  # columns of text that a format reads if they are there

# Columns of a record: the row as JSON, where it stood, and why it could not be read (else empty).
ROW, WHERE, PROBLEM = "_row", "_where", "_problem"


@dataclass
class Example:
    """A chat (messages and, for each, whether it is learnt), or a prompt and its completion; a text has no prompt.

    `is_excluded` tells the turns that their author forbids to learn from those that are no answer: where whole chats
    are learnt, the former still are not. `template_options` are the row's own variables for the chat template.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    is_learnt: list[bool] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    prompt: str = ""
    completion: str = ""
    is_excluded: list[bool] = field(default_factory=list)
    template_options: dict[str, Any] = field(default_factory=dict)


def row_of(record: dict[str, Any], index: int, columns: dict[str, str]) -> tuple[dict[str, Any], str, str]:
    """(row, where it stands, problem) of one record, with the user's column names changed to ours."""
    if record.get(ROW) is not None:
        row, where, problem = json.loads(record[ROW] or "{}"), record[WHERE], record[PROBLEM]
    else:
        row, where, problem = without_filled_in(record), f"row {index + 1}", ""
    if isinstance(row, dict):  # pandas writes a missing value as NaN
        row = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
    return {**row, **{ours: row[theirs] for ours, theirs in columns.items() if theirs in row}}, where, problem


def as_columns(records: list[dict[str, Any]]) -> dict[str, list]:
    """Records as columns; a column that only some have is null in the others."""
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


def find_format(row: dict[str, Any], mapped: dict[str, str] | None = None) -> str:
    """Return which of FORMATS a row is: the one of the --dataset_columns that it has, else the first of its columns.

    Raises:
        ValueError: none; or a column of it that is missing or null, which is never a reason to read another format.
    """
    mapped = mapped or {}
    for name, needed in FORMATS.items():
        if any(mapped.get(ours) in row for ours in needed if ours in mapped):
            missing = [mapped.get(ours, ours) for ours in needed if mapped.get(ours, ours) not in row]
            if missing:
                raise ValueError(
                    f"--dataset_columns ask for {name}, but there is no column {missing[0]!r} {beside(row)}"
                )
            return check_filled(row, name, mapped)
    for name, needed in FORMATS.items():
        if all(ours in row for ours in needed):
            return check_filled(row, name, mapped)
    allowed = "; ".join(" + ".join(needed) for needed in FORMATS.values())
    raise ValueError(
        f"the columns with values are {sorted(name for name, value in row.items() if value is not None)}; needed: "
        f"{allowed}. Name the columns of a pair yourself, for example "
        "--dataset_columns prompt=question,completion=answer"
    )


def check_filled(row: dict[str, Any], row_format: str, mapped: dict[str, str]) -> str:
    """Return the format. Raises ValueError if a column that it needs is null."""
    empty = [mapped.get(ours, ours) for ours in FORMATS[row_format] if row[ours] is None]
    if empty:
        raise ValueError(
            f"the column {empty[0]!r} is null: this row of {row_format} cannot be read {beside(row)}. Fill the column "
            "or drop it, or choose another format by --dataset_columns, as in text=text"
        )
    return row_format


def beside(row: dict[str, Any]) -> str:
    """The columns of a row, for an error message."""
    return f"(its columns: {', '.join(sorted(row))})"


def read_example(row: dict[str, Any], row_format: str, has_chat_template: bool) -> Example:
    """Return what a row means, with what its chat_template_kwargs ask of the template (as in TRL).

    Raises:
        ValueError: a row that cannot be read; says which column or turn.
    """
    example = read_columns_of(row, row_format, has_chat_template)
    example.template_options = read_template_options(row)
    return example


def read_columns_of(row: dict[str, Any], row_format: str, has_chat_template: bool) -> Example:
    """A row by its format. Instructions become a chat where the tokenizer has a template, else a pair.

    Raises:
        ValueError: a column or turn that is missing, empty, of another type or of an unknown role; says which.
    """
    if row_format in ("messages", "conversations"):
        turns = row[row_format]
        if isinstance(turns, str) and turns.lstrip().startswith("["):
            turns = as_json(turns, row_format)
        flags = flags_of_turns(row, len(turns) if isinstance(turns, list) else None)
        return read_chat(after_system(row, turns), read_tools(row), row_format, flags=flags)
    flags_of_turns(row, None)
    if row_format == "prompt/completion":
        check_unused(row, ("input",))
        if isinstance(row["prompt"], list):
            return read_chat_pair(row)
        check_unused(row, ("system",))
    given = [name for name in (*FORMATS[row_format], *OPTIONAL.get(row_format, ())) if row.get(name) is not None]
    wrong = [f"{name} is {kind_of(row[name])}" for name in given if not isinstance(row[name], str)]
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


def check_unused(row: dict[str, Any], names: tuple[str, ...]) -> None:
    """Raise ValueError for a column that belongs to the question and that a prompt has no place for."""
    for name in names:
        if row.get(name):
            raise ValueError(
                f"the column {name!r} beside prompt and completion would be left out: put it into the prompt, drop it, "
                "or read the row as an instruction (--dataset_columns instruction=prompt,output=completion)"
            )


def read_chat_pair(row: dict[str, Any]) -> Example:
    """A prompt of messages, whose answers are given and not learnt, and its completion."""
    prompt = read_chat(after_system(row, row["prompt"]), None, "prompt", needs_answer=False)
    completion = row["completion"]  # messages too, or the text of one answer
    completion = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    answer = read_chat(completion, read_tools(row), "completion")
    is_learnt = [False] * len(prompt.messages) + answer.is_learnt
    is_excluded = prompt.is_excluded + answer.is_excluded
    return Example(prompt.messages + answer.messages, is_learnt, answer.tools, is_excluded=is_excluded)


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
    turns = []
    for asked, answered in history:
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    turns += [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
    return read_chat(after_system(row, turns), read_tools(row), "instruction")


def after_system(row: dict[str, Any], turns: Any) -> Any:
    """The turns behind the text of the column `system`, unless one of them is a system turn."""
    if not row.get("system") or not isinstance(turns, list) or any(role_of(turn) == "system" for turn in turns):
        return turns
    if not isinstance(row["system"], str):
        raise ValueError(f"system is {kind_of(row['system'])}; expected text")
    return [{"role": "system", "content": row["system"]}, *turns]


def read_chat(
    turns: Any,
    tools: list[dict[str, Any]] | None,
    column: str,
    needs_answer: bool = True,
    flags: list[bool] | None = None,
) -> Example:
    """Return the turns with the roles that templates know; `flags` say which of the last turns may be learnt.

    Raises:
        ValueError: a turn that cannot be read, naming it, or none that is learnt.
    """
    if not isinstance(turns, list):
        raise ValueError(f"{column} is {kind_of(turns)}; expected a list of turns")
    if not turns:
        raise ValueError(f"{column} is empty")
    messages, is_learnt, is_excluded = [], [], []
    allowed = [True] * (len(turns) - len(flags)) + flags if flags else [True] * len(turns)
    for number, (turn, is_allowed) in enumerate(zip(turns, allowed), start=1):
        try:
            message, may_be_learnt = read_turn(turn)
        except ValueError as error:
            raise ValueError(f"{column}, turn {number}: {error}") from error
        messages.append(message)
        is_excluded.append(not (may_be_learnt and is_allowed))
        is_learnt.append(message["role"] == "assistant" and not is_excluded[-1])
    if needs_answer and not any(is_learnt):
        roles = [message["role"] for message in messages]
        raise ValueError(f"no answer to learn: roles are {roles}, none is an assistant with weight")
    return Example(messages, is_learnt, tools, is_excluded=is_excluded)


def without_filled_in(row: dict[str, Any]) -> dict[str, Any]:
    """A row of Arrow without the null fields that its objects have because other rows' have them; null columns stay."""
    return {name: without_nulls(value) for name, value in row.items() if name not in (ROW, WHERE, PROBLEM)}


def without_nulls(value: Any) -> Any:
    """Drop null fields at any depth."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
