"""One turn of a chat as templates expect it, and whether its author wants it learnt."""

import json
from inspect import signature
from typing import Any

from transformers import PreTrainedTokenizerBase

# Foreign names of the four roles that chat templates know; upper and lower case are the same.
ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "bot", "chatgpt", "model", "ai", "function_call", "tool_call"),
    "tool": ("tool", "function", "observation", "ipython", "function_response", "tool_response"),
}
TOOL_CALLERS = ("function_call", "tool_call")
TEXT_PARTS = ("text", "input_text", "output_text")
REASONING = ("reasoning_content", "thinking", "reasoning")  # as templates call it, and by two other names

# Names under which a turn, or a column with a value per turn, says what is learnt (OpenAI, axolotl, ms-swift, ...).
LEARNT_IF_TRUE = (
    *("weight", "weights", "train", "loss", "loss_mask", "loss_weight", "train_on_turn", "training", "train_mask"),
    *("learn", "trainable"),
)
LEARNT_IF_FALSE = ("masked",)
UNCLEAR = "mask"
PER_TURN_COLUMNS = ("loss_mask", "train_mask", "weights", *LEARNT_IF_FALSE)
# What the template's caller sets itself: no row may.
OWN_OPTIONS = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "conversations", "messages"}
FOREIGN = "_no_json"  # the one key of what stands for a value that JSON cannot hold: the name of its type


def kind_of(value: Any) -> str:
    """The type of a value as an error message names it."""
    return value[FOREIGN] if isinstance(value, dict) and set(value) == {FOREIGN} else type(value).__name__


def role_named(given: Any) -> str | None:
    """The role that templates know, None for a name that is none."""
    name = given.strip().lower() if isinstance(given, str) else given
    return next((known for known, names in ROLES.items() if name in names), None)


def role_of(turn: Any) -> str | None:
    """The role of a turn, None if it has none that is known."""
    return role_named(turn.get("role", turn.get("from"))) if isinstance(turn, dict) else None


def read_turn(turn: Any) -> tuple[dict[str, Any], bool]:
    """Return (message, whether its author lets it be learnt). Raises ValueError for what cannot be meant."""
    if not isinstance(turn, dict):
        raise ValueError(f"found {kind_of(turn)}; expected an object")
    given, role = turn.get("role", turn.get("from")), role_of(turn)
    if role is None:
        known = ", ".join(name for names in ROLES.values() for name in names)
        raise ValueError(f"unknown role {str(given)[:40]!r}; known: {known}")
    content = turn.get("content", turn.get("value"))
    if content is None and role != "assistant":
        raise ValueError(f"a {role} turn has no content")
    message: dict[str, Any] = {"role": role, "content": join_parts(content)}
    calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else None)
    calls = as_json(calls, "tool_calls") if isinstance(calls, str) else calls
    if given.strip().lower() in TOOL_CALLERS:
        calls, message["content"] = as_json(message["content"], "a function call"), ""
        calls = calls if isinstance(calls, list) else [calls]
    if calls and not isinstance(calls, list):
        raise ValueError(f"tool_calls is {kind_of(calls)}; expected a list of calls")
    if calls:
        message["tool_calls"] = [read_tool_call(call) for call in calls]
    message |= {name: turn[name] for name in ("name", "tool_call_id") if turn.get(name) is not None}
    message |= read_reasoning(turn)
    if role == "assistant" and not message["content"].strip() and not calls:
        raise ValueError("an assistant turn is empty")
    return message, may_be_learnt(turn)


def read_reasoning(turn: dict[str, Any]) -> dict[str, str]:
    """What a turn thinks, under the name that templates read; `thinking` stays beside it, as gpt-oss reads that."""
    given = [name for name in REASONING if turn.get(name) is not None]
    wrong = [f"{name} is {kind_of(turn[name])}; expected text" for name in given if not isinstance(turn[name], str)]
    if wrong:
        raise ValueError(wrong[0])
    kept = {"thinking": turn["thinking"]} if "thinking" in given else {}
    return {"reasoning_content": turn[given[0]], **kept} if given else {}


def may_be_learnt(turn: dict[str, Any]) -> bool:
    """Whether no flag of a turn excludes it. Raises ValueError for a flag that cannot be told."""
    if turn.get(UNCLEAR) is not None:
        raise ValueError(unclear(f"{UNCLEAR} {turn[UNCLEAR]!r}"))
    flags = {name: turn[name] for name in (*LEARNT_IF_TRUE, *LEARNT_IF_FALSE) if turn.get(name) is not None}
    return all([read_flag(name, flag) for name, flag in flags.items()])  # a list: every flag is checked


def read_flag(name: str, flag: Any) -> bool:
    """Whether a flag of this name lets a turn be learnt. Raises ValueError for one that is neither 0 nor 1."""
    if not isinstance(flag, (bool, int, float)) or flag not in (0, 1):
        raise ValueError(f"{name} {flag!r}; allowed: 0, 1, true, false")
    return bool(flag) != (name in LEARNT_IF_FALSE)


def flags_of_turns(row: dict[str, Any], num_turns: int | None) -> list[bool] | None:
    """Whether each turn may be learnt by the row's columns with a flag per turn; None without such a column.

    Raises:
        ValueError: a column that is no list of a flag per turn, or beside what has no turns to flag (None of them).
    """
    names = [name for name in PER_TURN_COLUMNS if row.get(name) is not None]
    mask = row.get(UNCLEAR)
    if mask is not None and role_named(mask) != "user" and not names:  # NeMo writes "mask": "User", as is done here
        raise ValueError(unclear(f"the column {UNCLEAR}"))
    allowed = [True] * (num_turns or 0)
    for name in names:
        flags = row[name]
        if num_turns is None or not isinstance(flags, list) or len(flags) != num_turns:
            found = f"a list of {len(flags)}" if isinstance(flags, list) else kind_of(flags)
            turns = "the turns of messages or conversations" if num_turns is None else f"the {num_turns} turns"
            raise ValueError(f"the column {name} is {found}; it should hold one flag for each of {turns}")
        allowed = [is_allowed and read_flag(name, flag) for is_allowed, flag in zip(allowed, flags)]
    return allowed if names else None


def unclear(found: str) -> str:
    """Why a `mask` is refused."""
    return (
        f"{found} may mean learnt or left out. Name it loss_mask (1: learnt) or masked (1: left out); a column by "
        "--dataset_columns loss_mask=mask"
    )


def join_parts(content: Any) -> str:
    """The text of a turn: a string, nothing (beside tool calls), or parts of text. Raises ValueError for others."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"content is {kind_of(content)}; expected text or a list of text parts")
    texts = []
    for part in content:
        kind = "text" if isinstance(part, str) else part.get("type") if isinstance(part, dict) else kind_of(part)
        if kind not in TEXT_PARTS:
            raise ValueError(f"content holds a part of type {kind}; only text parts can be learnt here")
        text = part if isinstance(part, str) else part.get("text")
        if not isinstance(text, str):
            raise ValueError(f"content holds a text part whose text is {kind_of(text)}")
        texts.append(text)
    return "".join(texts)


def read_tool_call(call: Any) -> dict[str, Any]:
    """A call as templates expect it: {"type": "function", "function": {"name", "arguments" as an object}}."""
    call = as_json(call, "a tool call") if isinstance(call, str) else call
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise ValueError(f"a tool call needs a name, found {str(call)[:80]}")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = as_json(arguments, "tool call arguments") if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of the call {function['name']!r} are {kind_of(arguments)}, no object")
    kept = {"id": call["id"]} if "id" in call else {}
    return {**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def read_tools(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The functions a chat may call: a list, or a JSON string of one; plain ones get the envelope templates expect."""
    tools = row.get("tools") or row.get("functions") or None
    tools = as_json(tools, "tools") if isinstance(tools, str) else tools
    if not tools:
        return None
    if isinstance(tools, list):
        tools = [as_json(tool, "a tool") if isinstance(tool, str) else tool for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"tools is {kind_of(tools)}; expected a list of objects")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def read_template_options(row: dict[str, Any]) -> dict[str, Any]:
    """Variables of the chat template that a row sets, such as enable_thinking: an object, or a JSON string of one."""
    options = row.get("chat_template_kwargs") or {}
    options = as_json(options, "chat_template_kwargs") if isinstance(options, str) else options
    if not isinstance(options, dict):
        raise ValueError(f"chat_template_kwargs is {kind_of(options)}; expected an object")
    own = sorted(OWN_OPTIONS & options.keys())
    if own:
        raise ValueError(f"chat_template_kwargs holds {own[0]!r}, which the row's other columns and the masks decide")
    return options


def as_json(text: str, what: str) -> Any:
    """Parse JSON inside a row. Raises ValueError naming what it should have been."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} is not JSON ({error}): {text[:80]!r}") from error
