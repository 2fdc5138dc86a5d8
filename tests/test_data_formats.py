"""Every format and source a fine-tuner brings: read as its author meant it, or one clear error; no silent loss."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from arguments import parse_arguments
from data import MAX_LOST, preview, tokenize_rows
from data_formats import find_format, read_example
from data_sources import load_rows
from datasets import Dataset, DatasetDict
from label_mask import IGNORE_INDEX
from prepare_data import prepare_data, read_columns
from test_data import CASES, SAMPLE_MODEL, TEMPLATE, learnt, read, rows_of, tokenizer_of, toy_tokenizer, write

ANSWER = {"role": "assistant", "content": "b"}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def chat_of(row: dict[str, Any], has_template: bool = True) -> list[tuple[str, str, bool]]:
    example = read_example(row, find_format(list(row)), has_template)
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


@pytest.mark.parametrize("name", ["weight", "train", "loss"])
def test_turn_without_weight_is_not_learnt(name: str) -> None:
    question = {"role": "user", "content": "a"}
    chat = chat_of({"messages": [question, {**ANSWER, name: 0}, question, {**ANSWER, name: 1}]})
    assert [learnt for _, _, learnt in chat] == [False, False, False, True]


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


def test_dates_numbers_and_nulls_stay_as_written(tmp_path: Path) -> None:
    rows = [{"text": "2024-01-31", "id": "007"}, {"text": "3.10", "id": None}, {"text": "b", "extra": {"a": [1]}}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    assert read(write(tmp_path, "a.jsonl", lines))[0] == rows
    csv = write(tmp_path, "a.csv", 'text,id\n2024-01-31,007\n"3.10\nand on",NA\n')
    assert read(csv)[0] == [{"text": "2024-01-31", "id": "007"}, {"text": "3.10\nand on", "id": "NA"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"line 2: is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\\ud83d"}\n', r"line 2: holds half of a surrogate pair"),
        ("a.jsonl", b'[{"text": "a"}]\n', r"line 1: .*a JSON array needs the ending \.json"),
        ("a.jsonl", b'[\n{"text": "a"}]\n', r"line 1: .*a JSON array needs the ending \.json"),
        ("a.json", b'[{"text": "a"}, 3]', r"row 2: is int, expected an object"),
        ("a.json", b'[{"text": "a"}', r"line 1: is not JSON"),
        ("a.csv", b"text,b\na,1,2\n", r"line 2: has another number of fields"),
    ],
)
def test_bad_file_names_line_and_finding_or_is_skipped_and_listed(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = write(tmp_path, name, content)
    rows, _ = load_rows([str(path)], "train", "test")
    with pytest.raises(ValueError, match=message):
        rows_of(rows)
    good = write(tmp_path, "good.jsonl", '{"text": "abc"}\n' * 3)
    both, _ = load_rows([str(path), str(good)], "train", "test")
    with pytest.raises(ValueError, match=rf"bad row\(s\) of \d+ \(text\):\n- {path}, " + message):
        tokenize_rows(both, toy_tokenizer(), 64, "train")
    kept, line = tokenize_rows(both, toy_tokenizer(), 64, "train", skip_bad_rows=True)
    assert len(kept) >= 3 and "bad row(s) left out" in line and str(path) in line


def test_line_of_25_megabytes_is_one_row(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", json.dumps({"text": "a" * 25_000_000}) + '\n{"text": "b"}\n')
    assert [len(row["text"]) for row in read(path)[0]] == [25_000_000, 1]


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
    with pytest.raises(ValueError, match="holds no data file"):
        (tmp_path / "empty").mkdir()
        read(tmp_path / "empty")


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
    train, _ = load_rows(names, "train", "test", [2.5, 0.3])
    texts = [row["text"] for row in rows_of(train)]
    counts = {text: texts.count(text) for text in texts}
    assert sum(count for text, count in counts.items() if text[0] == "a") == 25
    assert {count for text, count in counts.items() if text[0] == "a"} == {2, 3}
    assert [count for text, count in counts.items() if text[0] == "b"] == [1, 1, 1]
    with pytest.raises(ValueError, match="found 1 for 2 data sets"):
        load_rows(names, "train", "test", [1.0])


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
    assert [i for row in pieces for i in row["input_ids"]] == [i for row in whole for i in row["input_ids"]]
    assert [i for row in pieces for i in row["labels"]] == [i for row in whole for i in row["labels"]]
    assert max(len(row["input_ids"]) for row in pieces) <= 8 and "4 pieces of split rows" in line
    kept, line = fitted("drop", LONG)
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
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.arrow")}
    tokenizer("x", truncation=True, padding=True, max_length=2)  # use changes a fast tokenizer's state
    second, _ = tokenize_rows(load_rows([str(path)], "train", "test")[0], tokenizer, 64, "train")
    assert files and {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.arrow")} == files
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
    path = CASES / "data" / "glaive_toolcall_en_demo.json"
    if not path.is_file():
        pytest.skip(f"{path} is not part of a clone")
    rows, _ = load_rows([str(path)], "train", "test")
    _, line = tokenize_rows(rows, tokenizer_of("qwen3"), 100_000, "train", skip_bad_rows=True)
    assert "300 rows" in line or "bad row(s) left out" in line
    with pytest.raises(ValueError, match="the chat template leaves out the tool"):
        tokenize_rows(rows, tokenizer_of("llama3_1"), 100_000, "train")


def test_prepare_data_reads_the_shipped_sample() -> None:
    arguments = parse_arguments(
        ["--model_name_or_path", str(SAMPLE_MODEL), "--dataset_name", str(SAMPLE_MODEL.parent / "data")]
    )
    data = prepare_data(arguments, tokenizer_of("sample"))
    assert (len(data.train), len(data.test)) == (3600, 256) and not data.prompts
