"""Every format and source a fine-tuner brings: read as its author meant it, or one clear error; no silent loss."""

import datetime
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from rows import files
from rows.files import digest_of, kept_digest
from rows.formats import find_format, read_example, row_of
from rows.labels import IGNORE_INDEX
from rows.prepare import prepare_data, read_columns
from rows.sources import files_by_split, load_rows, open_stream, source_notes
from rows.tokenizing import LISTED, MAX_LOST, tokenize_rows
from token_rows import CASES, SAMPLE_MODEL, TEMPLATE, learnt, read, rows_of, tokenizer_of, toy_tokenizer, write
from training.arguments import parse_arguments
from training.start_lines import preview

ANSWER = {"role": "assistant", "content": "b"}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path.parent / f"{tmp_path.name}-cache")


def chat_of(row: dict[str, Any], has_template: bool = True) -> list[tuple[str, str, bool]]:
    example = read_example(row, find_format(row), has_template)
    return [(m["role"], m["content"], learnt) for m, learnt in zip(example.messages, example.is_learnt, strict=True)]


# --- formats


@pytest.mark.parametrize(
    ("human", "bot"), [("human", "gpt"), ("user", "assistant"), ("prompter", "bot"), ("human", "chatgpt")]
)
def test_foreign_role_names_become_those_the_template_knows(human: str, bot: str) -> None:
    turns = [{"from": human, "value": "a"}, {"from": bot, "value": "b"}]
    assert chat_of({"conversations": turns}) == [("user", "a", False), ("assistant", "b", True)]
    turns = [{"role": human, "content": "a"}, {"role": bot, "content": "b"}]
    assert chat_of({"messages": turns}) == [("user", "a", False), ("assistant", "b", True)]


def test_instruction_with_input_and_history_is_a_chat_or_a_pair_without_a_template() -> None:
    row = {"instruction": "do", "input": "it", "output": "done", "system": "s", "history": [["q", "r"]]}
    asked = [("system", "s", False), ("user", "q", False), ("assistant", "r", True), ("user", "do\n\nit", False)]
    assert chat_of(row) == [*asked, ("assistant", "done", True)]
    pair = read_example({"instruction": "do", "input": "", "output": "done"}, "instruction/output", False)
    assert (pair.prompt, pair.completion, pair.messages) == ("do\n\n", "done", [])


def test_pair_of_message_lists_learns_the_completion_only() -> None:
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "c"}]
    chat = chat_of({"prompt": prompt, "completion": [ANSWER]})
    assert [learnt for _, _, learnt in chat] == [False, False, False, True]


def flags_of(row: dict[str, Any]) -> tuple[list[bool], list[bool]]:
    """(what is learnt, what its author excludes), turn by turn."""
    example = read_example(row, find_format(row), True)
    assert len(example.messages) == len(example.is_excluded)
    return example.is_learnt, example.is_excluded


QUESTION = {"role": "user", "content": "a"}
LEARNT = ["weight", "train", "loss", "loss_mask", "train_on_turn", "training", "train_mask", "learn", "loss_weight"]


@pytest.mark.parametrize(
    ("name", "excluded", "kept"), [*((name, 0, 1) for name in (*LEARNT, "trainable")), ("masked", True, False)]
)
def test_turn_that_its_author_excludes_is_not_learnt(name: str, excluded: Any, kept: Any) -> None:
    turns = [QUESTION, {**ANSWER, name: excluded}, {**QUESTION, name: excluded}, {**ANSWER, name: kept}]
    assert flags_of({"messages": turns}) == ([False, False, False, True], [False, True, True, False])
    pair = {
        "prompt": [{**QUESTION, name: excluded}],
        "completion": [{**ANSWER, name: excluded}, {**ANSWER, name: kept}],
    }
    assert flags_of(pair) == ([False, False, True], [True, True, False])


@pytest.mark.parametrize(
    ("column", "flags"), [("loss_mask", [0, 0, 0, 1]), ("weights", [1.0, 0.0, 1, 1]), ("masked", [1, 1, 1, 0])]
)
def test_column_with_a_flag_per_turn_excludes_turns(column: str, flags: list) -> None:
    chat = {"messages": [QUESTION, ANSWER, QUESTION, ANSWER], column: flags}
    assert flags_of(chat)[0] == [False, False, False, True]
    assert flags_of({**chat, "system": "s"})[0] == [False, False, False, False, True]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [QUESTION, {**ANSWER, "mask": 1}]}, "turn 2: mask 1 may mean learnt or left out.*loss_mask"),
        (
            {"messages": [QUESTION, ANSWER], "mask": [0, 1]},
            "the column mask may mean.*columns loss_mask=mask",
        ),
        ({"messages": [QUESTION, ANSWER], "loss_mask": [1]}, "column loss_mask is a list of 1; .* each of the 2 turns"),
        ({"messages": [QUESTION, ANSWER], "weights": "0 1"}, "column weights is str; .* each of the 2 turns"),
        ({"messages": [QUESTION, ANSWER], "loss_mask": [0, 0.5]}, "loss_mask 0.5; allowed: 0, 1, true, false"),
        ({"messages": [QUESTION, ANSWER], "loss_mask": [0, None]}, "loss_mask None; allowed: 0, 1, true, false"),
        ({"text": "a", "loss_mask": [1, 0]}, "column loss_mask is a list of 2; .* messages or conversations"),
        ({"messages": [QUESTION, {**ANSWER, "masked": "no"}]}, "turn 2: masked 'no'; allowed: 0, 1, true, false"),
    ],
)
def test_flags_that_cannot_be_told_are_refused_by_name(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flags_of(row)


def test_mask_is_read_where_its_meaning_is_clear() -> None:
    chat = {"messages": [QUESTION, ANSWER, QUESTION, ANSWER], "mask": [0, 0, 0, 1]}
    row, _, _ = row_of(chat, 0, read_columns("loss_mask=mask"))
    assert flags_of(row)[0] == [False, False, False, True]
    assert flags_of({**chat, "mask": "User"})[0] == [False, True, False, True]


def test_system_column_stands_before_a_prompt_of_messages_and_is_refused_beside_text() -> None:
    pair = {"prompt": [QUESTION], "completion": [ANSWER], "system": "s"}
    assert chat_of(pair) == [("system", "s", False), ("user", "a", False), ("assistant", "b", True)]
    for name in ("system", "input"):
        with pytest.raises(ValueError, match=f"column '{name}' beside prompt and completion would be left out"):
            chat_of({"prompt": "a", "completion": "b", name: "c"})
        assert read_example({"prompt": "a", "completion": "b", name: ""}, "prompt/completion", True).prompt == "a"


def test_only_columns_that_a_format_reads_are_checked() -> None:
    row = {"text": "hello", "input": 5, "system": ["x"]}
    assert read_example(row, find_format(row), True).completion == "hello"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": None, "text": "a"},
            r"'messages' is null: this row of messages .*: messages, text\)",
        ),
        ({"prompt": "a", "completion": None, "text": "a"}, "'completion' is null: this row of prompt/completion"),
        ({"prompt": "a", "completion": float("nan"), "text": "a"}, "'completion' is null"),
    ],
)
def test_null_column_is_an_error_of_its_row_and_not_another_format(row: dict[str, Any], message: str) -> None:
    row, _, _ = row_of(row, 0, {})
    with pytest.raises(ValueError, match=message):
        find_format(row)


def test_any_mapped_column_selects_its_format_and_a_missing_one_is_named(tmp_path: Path) -> None:
    row = {"messages": [QUESTION, ANSWER], "completion": "b", "question": "a", "prompt": "not this"}
    columns = read_columns("prompt=question")
    assert find_format(row_of(row, 0, columns)[0], columns) == "prompt/completion"
    columns = read_columns("prompt=question,completion=anwser")
    with pytest.raises(ValueError, match="ask for prompt/completion, but there is no column 'anwser'"):
        find_format(row_of(row, 0, columns)[0], columns)
    path = write(tmp_path, "a.jsonl", json.dumps(row) + "\n")
    for given, missing in (("prompt=question,completion=anwser", "anwser"), ("system=sytem", "sytem")):
        given = ["--model_name_or_path", "x", "--dataset_name", str(path), "--dataset_columns", given]
        with pytest.raises(ValueError, match=f"no row has the column '{missing}'"):
            prepare_data(parse_arguments(given), toy_tokenizer(TEMPLATE), 0, 1)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_name_that_templates_read(name: str) -> None:
    example = read_example({"messages": [QUESTION, {**ANSWER, name: "hm"}]}, "messages", True)
    assert example.messages[1]["reasoning_content"] == "hm" and "reasoning" not in example.messages[1]
    with pytest.raises(ValueError, match=f"turn 2: {name} is list; expected text"):
        read_example({"messages": [QUESTION, {**ANSWER, name: ["hm"]}]}, "messages", True)


def test_json_strings_upper_case_roles_and_typed_parts_are_read() -> None:
    call = {"name": "f", "arguments": ""}
    parts = [{"type": "output_text", "text": "b"}]
    turns = [
        {"role": "User", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "ASSISTANT", "content": "", "tool_calls": json.dumps([call])},
        {"role": "Tool", "content": "1"},
        {"role": "Assistant", "content": parts},
    ]
    row = {"messages": json.dumps(turns), "tools": [json.dumps({"name": "f", "parameters": {}})]}
    example = read_example(row, find_format(row), True)
    assert [(m["role"], m["content"]) for m in example.messages] == [
        ("user", "a"),
        ("assistant", ""),
        ("tool", "1"),
        ("assistant", "b"),
    ]
    called = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert example.messages[1]["tool_calls"] == [called]
    assert example.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_missing_value_of_pandas_is_null() -> None:
    row, _, _ = row_of({"instruction": "a", "output": "b", "input": float("nan")}, 0, {})
    assert chat_of(row) == [("user", "a", False), ("assistant", "b", True)]


def test_text_parts_are_joined_and_others_are_refused_by_name() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat_of({"messages": [{"role": "user", "content": parts}, ANSWER]})[0] == ("user", "ab", False)
    with pytest.raises(ValueError, match="turn 1: content holds a part of type image"):
        chat_of({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]})


def test_function_calls_and_tools_as_json_strings_are_read_as_calls() -> None:
    turns = [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "b"},
    ]
    row = {"conversations": turns, "tools": '[{"name": "f", "parameters": {}}]'}
    example = read_example(row, "conversations", True)
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert example.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert [m["role"] for m in example.messages] == ["user", "assistant", "tool", "assistant"]
    assert example.tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    as_openai = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]}
    as_openai["tool_calls"][0]["function"] = {"name": "f", "arguments": '{"x": 1}'}
    found = read_example({"messages": [{"role": "user", "content": "a"}, as_openai]}, "messages", True)
    assert found.messages[1]["tool_calls"] == [{"id": "1", **call}]


def test_template_that_leaves_out_tools_is_an_error_not_a_guess() -> None:
    row = {"messages": [{"role": "user", "content": "a"}, ANSWER], "tools": [{"name": "zz", "parameters": {}}]}
    with pytest.raises(ValueError, match="leaves out the tool 'zz'"):
        tokenize_rows(
            Dataset.from_list([{"messages": row["messages"], "tools": json.dumps(row["tools"])}]),
            toy_tokenizer(TEMPLATE),
            64,
            "train",
        )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "narrator", "content": "a"}, ANSWER]}, "unknown role 'narrator'; known: system"),
        ({"messages": [{"role": "user", "content": "a"}, {**ANSWER, "content": "  "}]}, "turn 2: .*empty"),
        ({"messages": "a"}, "messages is str; expected a list"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": 3}, ANSWER]}, "content is int"),
        ({"messages": [None, ANSWER]}, "turn 1: found NoneType"),
        ({"messages": [{"role": "user", "content": "a"}, {**ANSWER, "weight": "0"}]}, "weight '0'; allowed: 0, 1"),
        ({"messages": [{"role": "user", "content": "a"}, {**ANSWER, "weight": 0.5}]}, "weight 0.5; allowed: 0, 1"),
        ({"instruction": "a", "output": "b", "history": [{"role": "user", "content": "q"}]}, "history is no list"),
        ({"instruction": "a", "output": "b", "history": ["Hi", "Yo"]}, "history is no list"),
        ({"instruction": "a", "output": "b", "input": 5}, "input is int"),
        ({"prompt": "a", "completion": 3}, "completion is int; expected text"),
        ({"text": ""}, "text is empty"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "f("}]}, "not JSON"),
        ({"messages": [{"role": "user", "content": "a"}, {**ANSWER, "weight": 0}]}, "no answer to learn"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chat_of(row)


# --- sources


def test_array_of_rows_is_read_as_a_whole_parse_reads_it(tmp_path: Path) -> None:
    rows = [{"text": "[],{}\\" * i, "a": [i, {"b": None}], "c": 1.5e3, "d": "é\U0001f642"} for i in range(50)]
    for indent, ascii_only in ((None, True), (2, False), ("\t", True)):
        path = write(tmp_path, "a.json", " \n" + json.dumps(rows, indent=indent, ensure_ascii=ascii_only) + " \n")
        assert read(path)[0] == rows


def test_dates_numbers_and_nulls_stay_as_written(tmp_path: Path) -> None:
    rows = [{"text": "2024-01-31", "id": "007"}, {"text": "3.10", "id": None}, {"text": "b", "extra": {"a": [1]}}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    assert read(write(tmp_path, "a.jsonl", lines))[0] == rows
    csv = write(tmp_path, "a.csv", 'text,id\n2024-01-31,007\n"3.10\nand on",NA\n')
    assert read(csv)[0] == [{"text": "2024-01-31", "id": "007"}, {"text": "3.10\nand on", "id": "NA"}]


@pytest.mark.parametrize(
    ("name", "content", "message", "count"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"line 2: is not UTF-8", 2),
        ("a.jsonl", b'{"text": "\xff"}\n{"text": "a"}\n', r"line 1: is not UTF-8", 2),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud83d"}\n', r"line 2: .*holds half of a surrogate pair", 2),
        ("a.jsonl", b'[{"text": "a"}]\n', r"line 1: .*a JSON array needs the ending \.json", 1),
        ("a.jsonl", b'[\n{"text": "a"}]\n', r"line 1: .*a JSON array needs the ending \.json", 2),
        ("a.json", b'[{"text": "a"}, 3]', r"row 2: is int, expected an object", 2),
        ("a.json", b'[{"text": "a"},\n{"b": {"c": 1, "c": 2}} ]\n', r"row 2: is not JSON: the key 'c' stands twice", 2),
        ("a.jsonl", b'{"text": "a", "text": "b"}\n', r"line 1: is not JSON: the key 'text' stands twice", 1),
        ("a.csv", b"text,b\na,\xff\n", r"line 2: is not UTF-8", 1),
        ("a.csv", b"text,b\na,1,2\n", r"line 2: has another number of fields", 1),
    ],
)
def test_bad_file_names_line_and_finding_or_is_skipped_and_listed(
    tmp_path: Path, name: str, content: bytes, message: str, count: int
) -> None:
    path = write(tmp_path, name, content)
    rows, _ = load_rows([str(path)], "train", "test")
    assert len(rows) == count
    with pytest.raises(ValueError, match=message):
        rows_of(rows)
    good = write(tmp_path, "good.jsonl", '{"text": "abc"}\n' * 3)
    both, _ = load_rows([str(path), str(good)], "train", "test")
    with pytest.raises(ValueError, match=rf"bad row\(s\) of \d+:\n- {path}, " + message):
        tokenize_rows(both, toy_tokenizer(), 64, "train")
    kept, line = tokenize_rows(both, toy_tokenizer(), 64, "train", skip_bad_rows=True)
    bad = 2 if content.startswith(b"[\n") else 1  # an array over two lines is two
    assert len(kept) == count + 3 - bad
    assert line.count(f"- {path}, ") == bad and f"; {bad} bad row(s) left out:\n- {path}, " in line


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"text": "a"}', "cannot be read: after row 1: "),
        ("a.json", b'[{"text": "a"} {"text": "b"}]', "cannot be read: after row 1: found '{"),
        ("a.json", b'[{"text": "a"}, {"text": "b', "cannot be read: row 2: Unterminated string"),
        ("a.json", b'[{"text": "a"},]', "cannot be read: row 2: Expecting value"),
        ("a.json", b'[{"text": "a"}] x', "cannot be read: after row 1: "),
        ("a.json", b"[" * 100_000, "cannot be read: row 1: "),
        ("a.json", b'[{"text": "\xff"}]', "cannot be read: .*utf-8"),
        ("a.json", b'{\n  "data": []\n}', "one object over several lines; expected an array"),
        ("a.csv", b'q,a\nQ1,A1\nQ2,"A2\nQ3,A3\n', "after line 2: cannot be read: unexpected end of data"),
        ("a.csv", b"text,text\na,b\n", "a column name stands twice"),
        ("a.jsonl", b"\n\n", "is empty"),
        ("a.parquet", b"PAR1", "cannot be read as Parquet"),
    ],
)
def test_file_whose_rows_cannot_be_told_apart_is_refused_as_a_whole(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(ValueError, match=message) as caught:
        load_rows([str(path)], "train", "test")
    assert str(path) in str(caught.value)


def test_sources_of_any_kind_and_format_mix(tmp_path: Path) -> None:
    chats = [{"messages": [{"role": "user", "content": "a"}, ANSWER]}]
    Dataset.from_list(chats).to_parquet(tmp_path / "chats.parquet")
    Dataset.from_list([{"text": "abc"}]).save_to_disk(tmp_path / "saved")
    pairs = write(tmp_path, "pairs.jsonl", '{"prompt": "a", "completion": "b"}\n{"note": "header"}\n')
    names = [str(tmp_path / "chats.parquet"), str(tmp_path / "saved"), str(pairs)]
    rows, _ = load_rows(names, "train", "test")
    tokenizer = toy_tokenizer(TEMPLATE)
    with pytest.raises(ValueError, match=rf"1 bad row\(s\) of 4:\n- {pairs}, line 2: the columns with values"):
        tokenize_rows(rows, tokenizer, 64, "train")
    kept, line = tokenize_rows(rows, tokenizer, 64, "train", skip_bad_rows=True)
    assert len(kept) == 3 and "messages: 1, prompt/completion: 1, text: 1" in line


def test_parquet_objects_lose_the_fields_that_other_rows_filled_in_and_json_keeps_its_nulls(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {**ANSWER, "weight": 1}]}]
    rows += [{"messages": [{"role": "user", "content": "a", "weight": None}, ANSWER]}]
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet")[0][1] == {"messages": [{"role": "user", "content": "a"}, ANSWER]}
    call = {"name": "f", "arguments": {"x": None, "y": 1}}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call]}]
    path = write(tmp_path, "a.jsonl", json.dumps({"messages": turns}) + "\n")
    message = read_example(read(path)[0][0], "messages", True).messages[1]
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": None, "y": 1}


def test_joined_parquet_and_saved_rows_are_those_that_were_written(tmp_path: Path) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": {"city": "Paris"}}}
    other = {"id": "2", "function": {"name": "f", "arguments": {"zip": "75"}}}
    rows = [{"messages": [{"role": "assistant", "content": "", "tool_calls": [made]}]} for made in (call, other)]
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    text = write(tmp_path, "b.jsonl", '{"text": "a"}\n')
    names = [str(tmp_path / "a.parquet"), str(tmp_path / "saved"), str(text)]
    assert rows_of(load_rows(names, "train", "test")[0]) == [*rows, *rows, {"text": "a"}]
    assert rows_of(list(open_stream(names, "train", "train"))) == [*rows, *rows, {"text": "a"}]


def test_bad_row_is_named_by_its_own_file_and_number_after_splitting_and_repeating(tmp_path: Path) -> None:
    good, bad = [{"prompt": "a", "completion": "b"}] * 9, [{"prompt": "a", "completion": ""}]
    Dataset.from_list(good).to_parquet(tmp_path / "a.parquet")
    Dataset.from_list([*good, *bad]).to_parquet(tmp_path / "b.parquet")
    Dataset.from_list([*good, *bad]).save_to_disk(tmp_path / "saved")
    for name in (tmp_path / "b.parquet", tmp_path / "saved"):
        train, test = load_rows(
            [str(tmp_path / "a.parquet"), str(name)],
            "train",
            "test",
            weights=[0.5, 3.0],
            validation_percentage=30.0,
            seed=1,
        )
        for part in (train, test):
            found = [row["_where"] for row in part if json.loads(row["_row"])["completion"] == ""]
            assert set(found) <= {f"{name}, row 10"}
        wheres = {row["_where"] for part in (train, test) for row in part}
        assert f"{name}, row 10" in wheres


@pytest.mark.parametrize("is_joined", [False, True])
def test_value_that_is_no_text_is_an_error_of_its_row_only_in_a_column_in_use(tmp_path: Path, is_joined: bool) -> None:
    date, seen = datetime.date(2024, 1, 31), b"\xff"
    Dataset.from_list([{"text": "a", "seen": seen, "day": date}] * 2).to_parquet(tmp_path / "a.parquet")
    names = [str(tmp_path / "a.parquet")] + [str(write(tmp_path, "b.jsonl", '{"text": "b"}\n'))] * is_joined
    rows, _ = load_rows(names, "train", "test")
    assert len(tokenize_rows(rows, toy_tokenizer(), 64, "train")[0]) == 2 + is_joined
    for theirs, kind in (("day", "date"), ("seen", "bytes")):
        with pytest.raises(ValueError, match=rf"a\.parquet, row 1: text is {kind}; expected text"):
            tokenize_rows(rows, toy_tokenizer(), 64, "train", columns={"text": theirs})


def test_empty_file_is_named_wherever_it_stands(tmp_path: Path) -> None:
    write(tmp_path, "good.jsonl", '{"text": "a"}\n')
    for name, content in (("empty.jsonl", ""), ("header.csv", "text,other\n"), ("none.json", "[]")):
        path = write(tmp_path, name, content)
        for source in (path, tmp_path):
            with pytest.raises(ValueError, match=f"{name} is empty: no row was found"):
                load_rows([str(source)], "train", "test")
            with pytest.raises(ValueError, match=f"{name} is empty: no row was found"):
                list(open_stream([str(source)], "train", "train"))
        path.unlink()
    Dataset.from_dict({"text": []}).to_parquet(tmp_path / "zero.parquet")
    with pytest.raises(ValueError, match=r"zero\.parquet is empty"):
        load_rows([str(tmp_path)], "train", "test")


def test_column_that_stands_twice_in_parquet_is_named(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read as Parquet: the column 'text' stands twice"):
        load_rows([str(tmp_path / "a.parquet")], "train", "test")


def test_linked_files_and_folders_are_read_by_their_own_name(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "blobs").mkdir()
    write(tmp_path, "blobs/0123", "text,b\nx,y\n")
    (tmp_path / "data" / "a.csv").symlink_to(tmp_path / "blobs" / "0123")
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path, "elsewhere/test.jsonl", '{"text": "t"}\n')
    (tmp_path / "data" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "loop").symlink_to(tmp_path / "data")
    assert read(tmp_path / "data") == ([{"text": "x", "b": "y"}], [{"text": "t"}])


def test_what_a_folder_holds_and_a_run_does_not_read_is_named(tmp_path: Path) -> None:
    for name in ("train.jsonl", "valid.jsonl", "test.jsonl", "train.jsonl.1", "run.py", "README.md", ".git"):
        write(tmp_path, name, '{"text": "a"}\n')
    notes = source_notes([str(tmp_path)], "train", "test")
    assert notes[0].startswith("note: the split 'validation' of ") and "(valid.jsonl) is not used" in notes[0]
    assert notes[1].endswith(": run.py, train.jsonl.1") and len(notes) == 2


@pytest.mark.parametrize(("percentage", "count"), [(20.0, 1), (99.0, 3), (10.0, 2)])
def test_percentage_that_leaves_nothing_to_train_or_test_on_is_refused(
    tmp_path: Path, percentage: float, count: int
) -> None:
    path = write(tmp_path, "a.jsonl", '{"text": "a"}\n' * count)
    with pytest.raises(ValueError, match=rf"--validation_split_percentage {percentage}: of the {count} rows of "):
        load_rows([str(path)], "train", "test", validation_percentage=percentage)


def test_cache_follows_the_content_and_not_the_time_stamp(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '{"text": "a yes"}\n')
    stamp = path.stat()
    assert read(path)[0] == [{"text": "a yes"}]
    write(tmp_path, "a.jsonl", '{"text": "a nay"}\n')
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert read(path)[0] == [{"text": "a nay"}]


def test_system_column_stands_before_a_chat_that_has_none() -> None:
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert chat_of({"conversations": turns, "system": "s"})[0] == ("system", "s", False)


def test_columns_that_the_user_names_come_first() -> None:
    row = {"messages": [{"role": "user", "content": "a"}, ANSWER], "question": "q", "answer": "r"}
    (kept,), _ = fitted("keep_start", [row], 100, columns=read_columns("prompt=question,completion=answer"))
    assert learnt(kept["input_ids"], kept["labels"], toy_tokenizer()) == ["r</s>"]
    with pytest.raises(ValueError, match=r"with ours one of: completion"):
        read_columns("foo=bar")


@pytest.mark.parametrize("name", ["qwen3 like", "qwen3"])
def test_mask_history_learns_the_last_answer_of_a_template_that_rewrites_earlier_ones(name: str) -> None:
    tokenizer = tokenizer_of(name)
    turns = [{"role": "user", "content": "Hi"}, {**ANSWER, "content": "Yo"}] * 2
    with pytest.raises(ValueError, match="turn 2 differently"):
        tokenize_rows(Dataset.from_list([{"messages": turns}]), tokenizer, 100, "train")
    (row,), _ = tokenize_rows(Dataset.from_list([{"messages": turns}]), tokenizer, 100, "train", mask_history=True)
    (text,) = learnt(row["input_ids"], row["labels"], tokenizer)
    assert text.endswith("Yo<|im_end|>")


def test_template_that_leaves_out_a_turn_is_an_error() -> None:
    no_system = TEMPLATE.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")
    rows = [{"messages": [{"role": "system", "content": "zz"}, {"role": "user", "content": "a"}, ANSWER]}]
    with pytest.raises(ValueError, match=r"leaves out or changes turn 1 \(system\)"):
        tokenize_rows(Dataset.from_list(rows), toy_tokenizer(no_system), 64, "train")


def test_end_token_that_an_answer_writes_itself_is_learnt_once() -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, {**ANSWER, "content": "b</s>"}]}]
    rows += [{"prompt": "a", "completion": "b</s>\n"}]
    for row in rows:
        (kept,), _ = fitted("keep_start", [row], 100)
        assert learnt(kept["input_ids"], kept["labels"], toy_tokenizer()) == ["b</s>"]


def test_control_token_in_the_text_of_a_row_is_counted() -> None:
    _, line = fitted("keep_start", [{"messages": [{"role": "user", "content": "a</s>b"}, ANSWER]}], 100)
    assert "1 with the text of a control token" in line


def test_held_out_rows_are_never_trained_whatever_the_weights(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", "".join(json.dumps({"text": str(i)}) + "\n" for i in range(20)))
    train, test = load_rows([str(path)], "train", "test", weights=[3.0], validation_percentage=20.0)
    assert (len(train), len(test)) == (48, 4)
    assert not {row["text"] for row in rows_of(train)} & {row["text"] for row in rows_of(test)}


@pytest.mark.parametrize("weight", [0.001, 1e9, float("inf")])
def test_weight_that_leaves_no_row_or_far_too_many_is_refused(tmp_path: Path, weight: float) -> None:
    path = write(tmp_path, "a.jsonl", '{"text": "a"}\n' * 3)
    with pytest.raises(ValueError, match="--dataset_weights"):
        load_rows([str(path)], "train", "test", weights=[weight])


def test_line_of_25_megabytes_is_one_row(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", json.dumps({"text": "a" * 25_000_000}) + '\n{"text": "b"}\n')
    assert [len(row["text"]) for row in read(path)[0]] == [25_000_000, 1]


def test_digest_of_a_file_is_made_once_and_anew_after_any_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, hashed = write(tmp_path, "a.jsonl", "one\n"), []
    monkeypatch.setattr(files, "digest_of", lambda name: hashed.append(name) or digest_of(name))
    fresh = [kept_digest(str(file), tmp_path) for _ in range(2)]
    assert hashed == [str(file)] * 2 and fresh == [digest_of(str(file))] * 2  # just written: not yet to be trusted
    monkeypatch.setattr(files, "SETTLED_S", 0.0)
    kept = [kept_digest(str(file), tmp_path) for _ in range(3)]
    assert len(hashed) == 3 and kept == [fresh[0]] * 3
    before = file.stat()
    file.write_text("two\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # its size and time say nothing
    assert kept_digest(str(file), tmp_path) == digest_of(str(file)) != fresh[0] and len(hashed) == 4


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '{"text": "a"}\n')
    assert read(path)[0] == [{"text": "a"}]
    write(tmp_path, "a.jsonl", '{"text": "changed"}\n')
    assert read(path)[0] == [{"text": "changed"}]


def test_folder_files_go_to_the_split_of_their_name(tmp_path: Path) -> None:
    for name in ("train-00.jsonl", "train-01.jsonl", "chats_validation.jsonl"):
        write(tmp_path, name, json.dumps({"text": name}) + "\n")
    train, test = read(tmp_path)
    assert [row["text"] for row in train] == ["train-00.jsonl", "train-01.jsonl"]
    assert [row["text"] for row in test] == ["chats_validation.jsonl"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"should hold data files .* found none"):
        read(tmp_path / "empty")


@pytest.mark.parametrize(
    ("file", "split"),
    [
        ("train-00.jsonl", "train"),
        ("chats_dev.jsonl", "validation"),
        ("latest.jsonl", "train"),
        ("dev_tools/train.jsonl", "train"),
        ("train_test_questions.jsonl", "train"),
        ("test/rows.jsonl", "test"),
    ],
)
def test_file_goes_to_the_split_that_its_own_name_says_first(tmp_path: Path, file: str, split: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    write(tmp_path, file, '{"text": "a"}\n')
    assert list(files_by_split(tmp_path)) == [split]


def test_split_is_the_one_asked_for(tmp_path: Path) -> None:
    for name, count in (("train", 3), ("valid", 2), ("test", 4)):
        write(tmp_path, f"{name}.jsonl", "".join(json.dumps({"text": f"{name}{i}"}) + "\n" for i in range(count)))
    sizes = {wanted: len(load_rows([str(tmp_path)], wanted, "test")[0]) for wanted in ("train", "validation")}
    assert sizes == {"train": 3, "validation": 2}
    assert [len(load_rows([str(tmp_path)], "train", wanted)[1]) for wanted in ("test", "validation", "dev")] == [
        4,
        2,
        2,
    ]
    with pytest.raises(ValueError, match="no split 'nosuch'; it has: test, train, validation"):
        load_rows([str(tmp_path)], "nosuch", "test")


@pytest.mark.parametrize("other", ["more.jsonl.gz", "LICENSE.txt", "part.arrow", "b.tgz", "c.jsonl.zstd", "d.pq"])
def test_folder_with_what_would_be_left_out_or_misread_is_refused(tmp_path: Path, other: str) -> None:
    write(tmp_path, "train.jsonl", '{"text": "a"}\n')
    write(tmp_path, ".hidden.jsonl", "no rows")
    write(tmp_path, "dataset_info.json", "{}")
    write(tmp_path, "PART2.JSONL", '{"text": "b"}\n')
    assert len(read(tmp_path)[0]) == 2
    write(tmp_path, other, "x")
    with pytest.raises(ValueError, match="the folder should hold data files"):
        read(tmp_path)


def test_saved_data_set_and_parquet_are_read(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"text": "a"}, {"text": "b"}])
    DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(tmp_path / "saved")
    assert [len(part) for part in read(tmp_path / "saved")] == [2, 1]
    rows.to_parquet(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet")[0] == [{"text": "a"}, {"text": "b"}]


def test_weights_say_how_often_each_sources_rows_are_seen(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path, f"{name}.jsonl", "".join(json.dumps({"text": f"{name}{i}"}) + "\n" for i in range(10)))
    names = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    train, _ = load_rows(names, "train", "test", weights=[2.5, 0.3])
    texts = [row["text"] for row in rows_of(train)]
    counts = {text: texts.count(text) for text in texts}
    assert sum(count for text, count in counts.items() if text[0] == "a") == 25
    assert {count for text, count in counts.items() if text[0] == "a"} == {2, 3}
    assert [count for text, count in counts.items() if text[0] == "b"] == [1, 1, 1]
    with pytest.raises(ValueError, match="found 1 for 2 data sets"):
        load_rows(names, "train", "test", weights=[1.0])


def test_validation_split_percentage_holds_out_rows_once(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", "".join(json.dumps({"text": str(i)}) + "\n" for i in range(50)))
    train, test = load_rows([str(path)], "train", "test", validation_percentage=20.0)
    assert (len(train), len(test)) == (40, 10)
    assert {row["text"] for row in rows_of(train)} | {row["text"] for row in rows_of(test)} == set(map(str, range(50)))


def test_columns_may_have_other_names() -> None:
    assert read_columns("prompt=question, completion=answer") == {"prompt": "question", "completion": "answer"}
    rows = Dataset.from_list([{"question": "ab", "answer": "cd"}])
    kept, line = tokenize_rows(
        rows, toy_tokenizer(), 64, "train", columns=read_columns("prompt=question,completion=answer")
    )
    assert "prompt/completion" in line and len(kept) == 1
    with pytest.raises(ValueError, match="prompt=question,completion=answer"):
        tokenize_rows(rows, toy_tokenizer(), 64, "train")
    with pytest.raises(ValueError, match="--dataset_columns prompt"):
        read_columns("prompt")


# --- rows that are too long

LONG = [{"text": "abcdefghij" * 3}, {"text": "ab"}]


def fitted(mode: str, rows: list[dict], max_length: int = 8, **options: Any) -> tuple[list[dict], str]:
    tokenizer = toy_tokenizer(TEMPLATE, adds_bos=True)
    kept, line = tokenize_rows(Dataset.from_list(rows), tokenizer, max_length, "train", mode, **options)
    return kept.to_list(), line


def test_split_loses_no_token_and_drop_loses_whole_rows() -> None:
    whole, _ = fitted("keep_start", LONG, max_length=100)
    pieces, line = fitted("split", LONG)
    first, *rest = [row for row in pieces if len(pieces) > 1][: len(pieces) - 1]
    together = first["input_ids"] + [i for row in rest for i in row["input_ids"][1:]]  # pieces share a token
    assert together == whole[0]["input_ids"]

    def num_labels(rows: list[dict]) -> int:
        return sum(label != IGNORE_INDEX for row in rows for label in row["labels"][1:])

    assert num_labels(pieces) == num_labels(whole)  # each is predicted once
    assert max(len(row["input_ids"]) for row in pieces) <= 8 and "5 pieces of split rows" in line
    kept, line = fitted("drop", LONG, allow_lost_rows=True)
    assert len(kept) == 1 and "1 longer than 8 and dropped" in line


def test_keep_end_keeps_the_begin_token_and_the_whole_answer() -> None:
    rows = [{"prompt": "a" * 30, "completion": "xyz"}]
    (row,), line = fitted("keep_end", rows)
    assert len(row["input_ids"]) == 8 and row["input_ids"][0] == 0
    assert learnt(row["input_ids"], row["labels"], toy_tokenizer()) == ["xyz</s>"]
    assert "1 cut to 8 tokens" in line


def test_answer_that_is_cut_off_is_not_learnt_and_counted() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": [*chat, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d" * 60}]}]
    whole, _ = fitted("keep_start", rows, 200)
    length = len(whole[0]["input_ids"]) - 10
    (row,), line = fitted("keep_start", rows, length)
    assert learnt(row["input_ids"], row["labels"], toy_tokenizer()) == ["b</s>"]
    assert "1 answers cut off and therefore not learnt" in line


def test_many_rows_that_lose_their_answer_stop_the_run_unless_allowed() -> None:
    rows = [{"prompt": "a" * 30, "completion": "b"}] * 2 + [{"prompt": "a", "completion": "b"}] * 8
    with pytest.raises(ValueError, match=rf"More than {MAX_LOST:.0%} .*--allow_lost_rows"):
        fitted("keep_start", rows)
    kept, line = fitted("keep_start", rows, allow_lost_rows=True)
    assert len(kept) == 8 and "2 of 10 rows lost their whole answer" in line and "--truncation_mode keep_end" in line


def test_whole_chat_or_pair_is_learnt_if_asked() -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}, ANSWER]}]
    (row,), _ = fitted("keep_start", rows, 100, assistant_only_loss=False)
    assert row["labels"][1:] == row["input_ids"][1:]
    (row,), _ = fitted("keep_start", [{"prompt": "ab", "completion": "cd"}], 100, completion_only_loss=False)
    assert row["labels"][1:] == row["input_ids"][1:]


# --- caching, preview, real files


def test_second_run_reads_what_the_first_tokenised(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '{"text": "abc"}\n' * 20)
    tokenizer = toy_tokenizer()
    first, _ = tokenize_rows(load_rows([str(path)], "train", "test")[0], tokenizer, 64, "train")
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    files = {file: file.stat().st_mtime_ns for file in cache.rglob("*.arrow")}
    tokenizer("x", truncation=True, padding=True, max_length=2)  # use changes a fast tokenizer's state
    second, _ = tokenize_rows(load_rows([str(path)], "train", "test")[0], tokenizer, 64, "train")
    assert files and {file: file.stat().st_mtime_ns for file in cache.rglob("*.arrow")} == files
    assert second.to_list() == first.to_list()
    third, _ = tokenize_rows(load_rows([str(path)], "train", "test")[0], tokenizer, 2, "train")
    assert {len(row["input_ids"]) for row in third} == {2}


def test_preview_marks_what_is_learnt() -> None:
    tokenizer = tokenizer_of("sample")
    rows = Dataset.from_list(
        [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]}]
    )
    kept, _ = tokenize_rows(rows, tokenizer, 64, "train")
    assert ">>>Yo<|im_end|><<<" in preview(kept, tokenizer, 1).replace("\n", "")


SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]
CALL = {"name": "search", "arguments": {"what": "rice"}}
CALLING = [
    SHAREGPT[0],
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": '{"found": 3}'},
    {"from": "gpt", "value": "Three."},
]
TOOLS = json.dumps([{"name": "search", "description": "Finds.", "parameters": {"type": "object", "properties": {}}}])
FILES = {  # as their authors lay them out: file -> (its text, format, what is learnt of each row)
    "alpaca.json": (
        json.dumps([{"instruction": "Add", "input": "1, 2", "output": "3"}, {"instruction": "Hi", "output": "Yo"}]),
        "instruction/output",
        [["3<|im_end|>"], ["Yo<|im_end|>"]],
    ),
    "sharegpt.json": (
        json.dumps([{"id": "a_0", "conversations": SHAREGPT * 2}], indent=2),
        "conversations",
        [["Yo<|im_end|>", "Yo<|im_end|>"]],
    ),
    "swift.jsonl": (
        '{"conversations": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Yo"}]}\n',
        "conversations",
        [["Yo<|im_end|>"]],
    ),
    "openai.jsonl": (
        '{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, '
        '{"role": "assistant", "content": "Yo"}]}\n',
        "messages",
        [["Yo<|im_end|>"]],
    ),
    "pairs.jsonl": ('{"prompt": "Hi", "completion": " Yo"}\n', "prompt/completion", [[" Yo<|im_end|>"]]),
    "questions.jsonl": ('{"question": "Hi", "answer": " Yo"}\n', "prompt/completion", [[" Yo<|im_end|>"]]),
    "pairs.tsv": ("prompt\tcompletion\nHi\t Yo\n", "prompt/completion", [[" Yo<|im_end|>"]]),
    "lines.txt": ("Hi there\n\nYo\n", "text", [["Hi there<|im_end|>"], ["Yo<|im_end|>"]]),
}


@pytest.mark.parametrize("name", FILES)
def test_file_of_each_common_layout_is_read_whole_and_its_answers_learnt(tmp_path: Path, name: str) -> None:
    text, row_format, answers = FILES[name]
    columns = {"prompt": "question", "completion": "answer"} if name.startswith("questions") else {}
    rows, _ = load_rows([str(write(tmp_path, name, text))], "train", "test")
    tokenizer = tokenizer_of("sample")
    kept, line = tokenize_rows(rows, tokenizer, 100, "train", columns=columns)
    assert f"{len(answers)} rows ({row_format})" in line
    assert [learnt(row["input_ids"], row["labels"], tokenizer) for row in kept] == answers


def test_tool_calls_reach_a_template_that_knows_tools_and_stop_at_one_that_does_not(tmp_path: Path) -> None:
    path = write(tmp_path, "calls.json", json.dumps([{"conversations": CALLING, "tools": TOOLS}]))
    rows, _ = load_rows([str(path)], "train", "test")
    tokenizer = tokenizer_of("qwen3 like")
    (row,), _ = tokenize_rows(rows, tokenizer, 1000, "train")
    call, answer = learnt(row["input_ids"], row["labels"], tokenizer)
    assert '<tool_call>\n{"name": "search", "arguments": {"what": "rice"}}\n</tool_call><|im_end|>' in call
    assert answer.endswith("Three.<|im_end|>")
    text = tokenizer.decode(row["input_ids"])
    assert '"description": "Finds."' in text.partition("\n</tools>")[0] and '{"found": 3}' in text
    with pytest.raises(ValueError, match="the chat template leaves out the tool 'search'"):
        tokenize_rows(rows, tokenizer_of("llama3 like"), 1000, "train")


REAL = {  # file -> (format, rows that are kept with the sample's template)
    "alpaca_zh_demo.json": ("instruction/output", 1000),
    "fastchat_dummy_conversation.json": ("conversations", 500),
    "gsm8k_test.jsonl": ("prompt/completion", 1319),
    "identity.json": ("instruction/output", 91),
    "mlx_prompt_completion_valid.jsonl": ("prompt/completion", 144),
    "openai_toy_chat.jsonl": ("messages", 5),
    "swift_conversations.jsonl": ("conversations", 3),
    "torchtune_alpaca_tiny.json": ("instruction/output", 100),
    "torchtune_chat_tiny.json": ("conversations", 1),
    "wiki_demo.txt": ("text", 30),
}


@pytest.mark.parametrize("name", sorted(REAL))
def test_real_file_is_read_whole(name: str) -> None:
    path = CASES / "data" / name
    if not path.is_file():
        pytest.skip(f"{path} is not part of a clone")
    columns = {"prompt": "question", "completion": "answer"} if name.startswith("gsm8k") else {}
    rows, _ = load_rows([str(path)], "train", "test")
    kept, line = tokenize_rows(rows, tokenizer_of("sample"), 100_000, "train", columns=columns)
    assert (line.split("(")[1].split(")")[0], len(kept)) == REAL[name]
    assert all(np.any(np.array(row["labels"][1:]) != IGNORE_INDEX) for row in kept)


def test_real_tool_calls_reach_a_template_that_knows_tools_and_stop_at_one_that_does_not() -> None:
    """Of 300 chats 191 name tools, 153 call one. Qwen3's template writes earlier answers anew: all but the chats of one
    answer need --mask_history."""
    path = CASES / "data" / "glaive_toolcall_en_demo.json"
    if not path.is_file():
        pytest.skip(f"{path} is not part of a clone")
    rows, _ = load_rows([str(path)], "train", "test")
    tokenizer = tokenizer_of("qwen3")
    kept, line = tokenize_rows(rows, tokenizer, 100_000, "train", skip_bad_rows=True)
    first, *bad = line.splitlines()
    assert len(kept) == 39 and first.startswith("train data: 39 rows (conversations), ")
    assert first.endswith("; 261 bad row(s) left out:") and "261 of 300 rows are bad" in bad[-1]
    assert sum("turn 2 differently" in problem and "--mask_history" in problem for problem in bad) == LISTED
    kept, line = tokenize_rows(rows, tokenizer, 100_000, "train", mask_history=True)
    assert len(kept) == 300 and "left out" not in line
    found = Counter()
    for row, ids in zip(rows_of(rows), kept["input_ids"], strict=True):
        text, tools = tokenizer.decode(ids), json.loads(row["tools"] or "[]")
        calls = [json.loads(turn["value"]) for turn in row["conversations"] if turn["from"] == "function_call"]
        assert all(f'"name": "{tool["name"]}"' in text.partition("\n</tools>")[0] for tool in tools)
        assert all(f'<tool_call>\n{{"name": "{call["name"]}", "arguments": ' in text for call in calls)
        found.update(tools=bool(tools), calling=bool(calls))
    assert found == {"tools": 191, "calling": 153}
    with pytest.raises(ValueError, match=r"191 bad row\(s\) of 300:\n- .*the chat template leaves out the tool"):
        tokenize_rows(rows, tokenizer_of("llama3_1"), 100_000, "train")


def test_prepare_data_reads_the_shipped_sample() -> None:
    arguments = parse_arguments(
        ["--model_name_or_path", str(SAMPLE_MODEL), "--dataset_name", str(SAMPLE_MODEL.parent / "data")]
    )
    data = prepare_data(arguments, tokenizer_of("sample"), 0, 1)
    assert (len(data.train), len(data.test)) == (3600, 256) and data.questions is None
