"""Rows to batches and the loss: what is learnt, which rows each rank takes, and how loss is counted."""

import copy
import itertools
import json
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset
from datasets.formatting import formatting
from rows.batches import (
    FIRST_ROW,
    RankSteps,
    Share,
    Step,
    collate,
    count_steps,
    evaluation_batches,
    make_loader,
    shuffled_order,
    training_steps,
)
from rows.formats import read_chat
from rows.labels import encode_all
from rows.packing import list_lengths
from rows.tokenizing import tokenize_rows, tokenizer_key
from saving.state import data_hash
from token_rows import CASES, HEADERS, PROMPT, TEMPLATE, learnt, llama3_like, read, tokenizer_of, toy_tokenizer, write
from tokenizers import processors
from training.losses import IGNORE_INDEX, micro_batch_loss, num_label_tokens, token_loss_sum
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "Hi there, you assistant."},
    {"role": "assistant", "content": "Hello!\nTwo lines; naïve café 你好 🙂."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Good bye."},
]


THINKS = pytest.mark.parametrize("name", ["qwen3 like", "qwen3"])


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def tokenize_chat(messages: list[dict], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    (result,) = encode_all([read_chat(messages, None, "messages")], tokenizer, True, True)
    if isinstance(result, Exception):
        raise result
    return result[:2]


def tokenize(rows: list[dict], tokenizer: PreTrainedTokenizerBase, max_length: int = 64) -> tuple[list[dict], str]:
    kept, line = tokenize_rows(Dataset.from_list(rows), tokenizer, max_length, "train", allow_lost_rows=True)
    return kept.to_list(), line


# --- the label mask of a chat


@pytest.mark.parametrize(
    ("name", "end"), [("sample", "<|im_end|>"), ("llama3 like", "<|eot_id|>"), ("llama3_1", "<|eot_id|>")]
)
@pytest.mark.parametrize("head", [[], [SYSTEM]])
def test_exactly_the_assistant_turns_and_their_ends_are_learnt(name: str, end: str, head: list[dict]) -> None:
    tokenizer = tokenizer_of(name)
    ids, labels = tokenize_chat([*head, *TURNS], tokenizer)
    assert learnt(ids, labels, tokenizer) == [TURNS[1]["content"] + end, TURNS[3]["content"] + end]


@pytest.mark.parametrize("name", ["sample", "llama3 like", "qwen3 like", "llama3_1", "qwen3"])
def test_chat_has_the_ids_that_the_templates_own_call_gives(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for messages in (TURNS[:2], [SYSTEM, *TURNS[:2]]):
        ids, _ = tokenize_chat(messages, tokenizer)
        expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        assert ids == expected


def test_labels_agree_with_the_samples_own_generation_markers() -> None:
    tokenizer = tokenizer_of("sample")
    encoded = tokenizer.apply_chat_template(TURNS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    _, labels = tokenize_chat(TURNS, tokenizer)
    assert sum(encoded["assistant_masks"]) > 5
    assert [int(label != IGNORE_INDEX) for label in labels] == encoded["assistant_masks"]


@THINKS
def test_single_turn_of_a_thinking_template_learns_what_follows_the_generation_prompt(name: str) -> None:
    tokenizer = tokenizer_of(name)
    ids, labels = tokenize_chat(TURNS[:2], tokenizer)
    (text,) = learnt(ids, labels, tokenizer)
    assert text.endswith(TURNS[1]["content"] + "<|im_end|>")
    prompt = tokenizer.apply_chat_template(TURNS[:1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids).startswith(prompt + text)


def test_template_that_rewrites_an_earlier_turn_is_never_masked_silently() -> None:
    rewrites = (
        "{% for m in messages %}{{ m['role'] + ':' }}"
        "{% if m['role'] == 'assistant' and not loop.last %}{{ 'old' }}{% endif %}{{ m['content'] + '</s>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    with pytest.raises(ValueError, match="turn 2 differently"):
        tokenize_chat(TURNS, toy_tokenizer(rewrites))
    letters = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenize_chat(letters, toy_tokenizer(rewrites))[1]
    last_only = [dict(letters[0]), {**letters[1], "weight": 0}, dict(letters[0]), dict(letters[1])]
    tokenizer = toy_tokenizer(rewrites)
    assert learnt(*tokenize_chat(last_only, tokenizer), tokenizer) == ["b</s>"]


@THINKS
def test_multi_turn_chat_of_a_thinking_template_is_refused_unless_the_last_answer_alone_is_learnt(name: str) -> None:
    tokenizer = tokenizer_of(name)
    with pytest.raises(ValueError, match=r"turn 2 differently .*<think>.* alone.*--mask_history"):
        tokenize_chat(TURNS, tokenizer)
    ids, labels = tokenize_chat([TURNS[0], {**TURNS[1], "weight": 0}, *TURNS[2:]], tokenizer)
    (text,) = learnt(ids, labels, tokenizer)
    assert text.endswith("Good bye.<|im_end|>")


def test_template_without_generation_markers_still_learns_the_answers() -> None:
    tokenizer = toy_tokenizer(TEMPLATE)
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    ids, labels = tokenize_chat(messages, tokenizer)
    assert learnt(ids, labels, tokenizer) == ["cd</s>"]
    assert labels.count(tokenizer.eos_token_id) == 1
    assert ids.count(tokenizer.eos_token_id) == 2


MOOD = "{% if mood is defined %}{{ mood + '</s>' }}{% endif %}"
MARKED_TEMPLATE = TEMPLATE.replace(
    "{{ m['role'] + ':' + m['content'] + '</s>' }}",
    "{{ m['role'] + ':' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '</s>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] + '</s>' }}{% endif %}",
)


@pytest.mark.parametrize("template", [TEMPLATE, MARKED_TEMPLATE])
@pytest.mark.parametrize("options", [{"mood": "calm"}, '{"mood": "calm"}'])
def test_row_sets_variables_of_the_template(template: str, options: dict | str) -> None:
    tokenizer = toy_tokenizer(MOOD + template)
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    plain, _ = tokenize([{"messages": messages}], tokenizer)
    (row,), _ = tokenize([{"messages": messages, "chat_template_kwargs": options}], tokenizer)
    assert tokenizer.decode(row["input_ids"]) == "calm</s>" + tokenizer.decode(plain[0]["input_ids"])
    assert learnt(row["input_ids"], row["labels"], tokenizer) == ["cd</s>"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [(["a"], "is list; expected an object"), ({"add_generation_prompt": True}, "holds 'add_generation_prompt'")],
)
def test_variables_that_are_no_object_or_are_ours_to_set_name_their_row(options: Any, problem: str) -> None:
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    with pytest.raises(ValueError, match=f"row 1: chat_template_kwargs {problem}"):
        tokenize([{"messages": messages, "chat_template_kwargs": options}], toy_tokenizer(TEMPLATE))


# --- the end of a turn

MARKED = (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}"
    "{% endif %}"
)
SHORT = [{"role": "user", "content": "q!"}, {"role": "assistant", "content": "a!"}] * 2


WithTemplate = Callable[..., PreTrainedTokenizerBase]


@pytest.fixture(params=["llama3 like", "llama3_1"])
def llama3_with(request: pytest.FixtureRequest) -> WithTemplate:
    def made(chat_template: str | dict[str, str], **roles: str) -> PreTrainedTokenizerBase:
        tokenizer = copy.copy(tokenizer_of(request.param))
        if roles and request.param == "llama3_1":
            tokenizer = AutoTokenizer.from_pretrained(CASES / "tokenizers" / "llama3_1", **roles)
        elif roles:
            tokenizer = llama3_like(**roles)
        tokenizer.chat_template = chat_template
        return tokenizer

    return made


@pytest.mark.parametrize("blank", ["", "\n", " "])
def test_end_of_turn_after_a_newline_is_trained(llama3_with: WithTemplate, blank: str) -> None:
    tokenizer = llama3_with(HEADERS + MARKED + "{{ " + repr(blank) + " }}<|eot_id|>" + PROMPT)
    assert learnt(*tokenize_chat(SHORT, tokenizer), tokenizer) == [f"a!{blank}<|eot_id|>"] * 2


def test_end_of_turn_that_is_neither_eos_nor_pad_is_trained(llama3_with: WithTemplate) -> None:
    end = "<|end_of_text|>"
    tokenizer = llama3_with(HEADERS + MARKED + "<|eot_id|>" + PROMPT, eos_token=end, pad_token=end)
    assert "<|eot_id|>" not in tokenizer.all_special_tokens
    assert learnt(*tokenize_chat(SHORT, tokenizer), tokenizer) == ["a!<|eot_id|>"] * 2


def test_end_of_turn_that_is_plain_text_after_the_marked_answer_is_trained(llama3_with: WithTemplate) -> None:
    tokenizer = llama3_with(HEADERS + MARKED + "[END]" + PROMPT)
    assert learnt(*tokenize_chat(SHORT, tokenizer), tokenizer) == ["a![END]"] * 2


@pytest.mark.parametrize("start", ["<|begin_of_text|>", "<|start_header_id|>"])
@pytest.mark.parametrize("middle", [MARKED, "{{ m.content }}"], ids=["marked", "unmarked"])
def test_start_of_the_next_turn_is_not_learnt_as_an_end_and_the_missing_end_is_said(
    llama3_with: WithTemplate, start: str, middle: str
) -> None:
    tokenizer = llama3_with((HEADERS + middle + PROMPT).replace("<|start_header_id|>", start))
    (row,), line = tokenize([{"messages": SHORT}], tokenizer)
    assert learnt(row["input_ids"], row["labels"], tokenizer) == ["a!", "a!"]
    assert "note: 1 rows hold an answer without an end-of-turn token: the model will not learn to stop" in line
    (row,), line = tokenize([{"messages": SHORT}], llama3_with(HEADERS + middle + "<|eot_id|>" + PROMPT))
    assert "end-of-turn" not in line


def test_end_token_in_a_user_turn_stays_and_is_counted() -> None:
    chat = [{"role": "user", "content": "what is </s>"}, {"role": "assistant", "content": "end"}]
    tokenizer = toy_tokenizer(TEMPLATE)
    (row,), line = tokenize([{"messages": chat}], tokenizer)
    assert row["input_ids"].count(tokenizer.eos_token_id) == 3
    assert learnt(row["input_ids"], row["labels"], tokenizer) == ["end</s>"]
    assert "1 with the text of a control token" in line


def test_end_token_of_an_answer_stays_where_the_template_writes_none() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b</s>"}]
    tokenizer = toy_tokenizer(TEMPLATE.replace(" + '</s>'", " + '.'"))
    assert learnt(*tokenize_chat(chat, tokenizer), tokenizer) == ["b</s>."]
    bare = toy_tokenizer(TEMPLATE.replace(" + '</s>'", ""))
    (row,), line = tokenize([{"messages": chat}], bare)
    assert learnt(row["input_ids"], row["labels"], bare) == ["b</s>"] and "end-of-turn" not in line
    twice = toy_tokenizer(TEMPLATE)
    assert learnt(*tokenize_chat(chat, twice), twice) == ["b</s>"]


def test_generation_markers_of_the_template_in_use_of_several_are_read(llama3_with: WithTemplate) -> None:
    marked = HEADERS + MARKED.replace("{% generation %}", "x\n{% generation %}") + "<|eot_id|>" + PROMPT
    tokenizer = llama3_with({"default": marked, "tool_use": HEADERS + "{{ m.content }}" + PROMPT})
    assert learnt(*tokenize_chat(SHORT, tokenizer), tokenizer) == ["a!<|eot_id|>"] * 2  # without markers: x too


def test_template_that_works_on_what_a_marked_block_writes_is_refused() -> None:
    """The stand-ins of the block's borders would keep what it trims: text that no inference writes."""
    block = "{% set a %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}{{ a | trim }}"
    turn = (
        "{{ m.role + ':' }}{% if m.role == 'assistant' %}" + block + "{% else %}{{ m.content }}{% endif %}{{ '</s>' }}"
    )
    template = "{% for m in messages %}" + turn + "{% endfor %}"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " yo "}]
    tokenizer = toy_tokenizer(template)
    assert "assistant:yo</s>" in tokenizer.apply_chat_template(chat, tokenize=False)
    with pytest.raises(ValueError, match="changes the text of its"):
        tokenize_chat(chat, tokenizer)
    tokenize_chat([chat[0], {**chat[1], "content": "yo"}], tokenizer)


def test_header_of_an_answer_is_not_learnt_where_the_template_has_no_generation_prompt() -> None:
    tokenizer = toy_tokenizer(TEMPLATE.split("{% if")[0])
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "assistant: b"}]
    assert learnt(*tokenize_chat(chat * 2, tokenizer), tokenizer) == ["assistant: b</s>"] * 2


# --- parts of a chat that a template leaves out

CALLS = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
WRITES = "{{ m.role + ':' + m.content }}"
ASKED = {"role": "user", "content": "is it 1 or 42"}


@pytest.mark.parametrize(
    ("writes", "messages", "missing"),
    [
        (
            WRITES + "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}",
            [ASKED, {"role": "assistant", "content": "", "tool_calls": CALLS}],
            r"the tool call 'g' of turn 2",
        ),
        (
            WRITES + "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}",
            [ASKED, {"role": "assistant", "content": "", "tool_calls": CALLS}],
            r"the tool call 'f' of turn 2",
        ),
        (
            "{% if m.role != 'system' %}" + WRITES + "{% endif %}",
            [{"role": "system", "content": "1"}, ASKED, {"role": "assistant", "content": "42"}],
            r"or changes turn 1 \(system\)",
        ),
        (
            "{% if m.role != 'tool' %}" + WRITES + "{% endif %}",
            [ASKED, {"role": "tool", "content": "42"}, {"role": "assistant", "content": "42"}],
            r"or changes turn 2 \(tool\)",
        ),
        (
            WRITES,
            [ASKED, {"role": "assistant", "content": "42", "reasoning_content": "4"}],
            r"the reasoning of turn 2",
        ),
        (
            "{{ m.role + ':' + m.content.split('.')[-1] }}",
            [ASKED, {"role": "assistant", "content": "because. it is"}],
            r"or changes turn 2 \(assistant\)",
        ),
    ],
    ids=["second call", "arguments", "system", "tool result", "reasoning", "half an answer"],
)
def test_part_that_the_template_leaves_out_is_named(writes: str, messages: list[dict], missing: str) -> None:
    template = "{% for m in messages %}" + writes + "</s>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    with pytest.raises(ValueError, match=f"the chat template leaves out {missing}"):
        tokenize_chat(messages, toy_tokenizer(template))


def test_tool_result_that_the_template_writes_as_json_is_read() -> None:
    writes = "{{ m.role }}:{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}</s>"
    template = "{% for m in messages %}" + writes + "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    result, answer = {"role": "tool", "content": '{"t": "warm"}'}, {"role": "assistant", "content": "warm"}
    tokenizer = toy_tokenizer(template)
    assert learnt(*tokenize_chat([ASKED, result, answer], tokenizer), tokenizer) == ["warm</s>"]


@THINKS
def test_reasoning_that_the_template_lays_out_anew_is_learnt(name: str) -> None:
    tokenizer = tokenizer_of(name)
    chat = [ASKED, {"role": "assistant", "content": "<think>Odd.</think>It is 1."}]
    expected = "<think>\nOdd.\n</think>\n\nIt is 1.<|im_end|>"
    assert learnt(*tokenize_chat(chat, tokenizer), tokenizer) == [expected]


@THINKS
def test_calls_in_an_earlier_turn_after_results_in_user_turns_are_read(name: str) -> None:
    """What Qwen writes of earlier turns depends on the text of later ones: all pieces at once would mislead."""
    tokenizer = tokenizer_of(name)
    call = {"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": CALLS}
    result = {"role": "user", "content": "<tool_response>\n1\n</tool_response>"}
    ids, labels = tokenize_chat([ASKED, call, result, {"role": "assistant", "content": "1"}], tokenizer)
    first, last = learnt(ids, labels, tokenizer)
    assert "Look." in first and '"name": "g"' in first and last.endswith("1<|im_end|>")


# --- the seam, begin and end tokens


def test_pair_whose_seam_a_token_would_cross_is_tokenised_apart_and_counted() -> None:
    tokenizer = toy_tokenizer(adds_bos=True)
    assert len(tokenizer("ow", add_special_tokens=False).input_ids) == 1
    (row,), line = tokenize([{"prompt": "ho", "completion": "w a"}], tokenizer)
    assert tokenizer.convert_ids_to_tokens(row["input_ids"]) == ["<s>", "h", "o", "w", " ", "a", "</s>"]
    assert row["labels"] == [IGNORE_INDEX] * 3 + row["input_ids"][3:]
    assert "1 tokenised as prompt and completion apart" in line


@pytest.mark.parametrize(("name", "completion"), [("sample", "there"), ("qwen3", "Yes")])
def test_seam_is_seen_where_the_tokenizer_trims_blanks_from_offsets(name: str, completion: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of(name).name_or_path)  # one of its own, to change
    assert len(tokenizer(" " + completion)["input_ids"]) == 1
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    assert tokenizer(" a", return_offsets_mapping=True)["offset_mapping"] == [(1, 2)]
    (row,), line = tokenize([{"prompt": "Answer: ", "completion": completion}], tokenizer)
    apart = [tokenizer(text)["input_ids"] for text in ("Answer: ", completion + "<|im_end|>")]
    assert row["input_ids"] == apart[0] + apart[1] and row["labels"] == [IGNORE_INDEX] * len(apart[0]) + apart[1]
    assert "1 tokenised as prompt and completion apart" in line
    (row,), _ = tokenize([{"prompt": "Answer:", "completion": "\n\nYes"}], tokenizer)
    assert learnt(row["input_ids"], row["labels"], tokenizer) == ["\n\nYes<|im_end|>"]
    assert tokenizer(" a", return_offsets_mapping=True)["offset_mapping"] == [(1, 2)]


@pytest.mark.parametrize(
    ("name", "prompt", "completion"),
    [
        ("llama2 like", "ho", "w"),
        ("llama2 like", "ho: ", "a"),
        ("llama2", "Hello", "world"),
        ("llama2", "Answer: ", "Yes"),
    ],
)
def test_completion_after_a_seam_gets_no_blank_from_a_sentencepiece_tokenizer(
    name: str, prompt: str, completion: str
) -> None:
    tokenizer = tokenizer_of(name)
    (row,), line = tokenize([{"prompt": prompt, "completion": completion}], tokenizer)
    assert row["input_ids"][: row["labels"].index(row["labels"][-2])] == tokenizer(prompt)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(row["labels"][-2:]) == [completion, "</s>"]
    assert tokenizer.decode(row["input_ids"]) == "<s>" + " " * (tokenizer.decode(row["input_ids"])[3] == " ") + (
        prompt + completion + "</s>"
    )
    assert "1 tokenised as prompt and completion apart" in line


def test_chat_whose_answer_starts_inside_a_token_is_an_error_that_shows_the_tokens() -> None:
    merging = TEMPLATE.replace("assistant:", "assistant:o").replace("m['role'] + ':'", "m['role'] + ':o'")
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "wa"}]
    with pytest.raises(ValueError, match=r"starts inside the token 'ow' \(around it: .*':', 'ow', 'a'"):
        tokenize_chat(chat, toy_tokenizer(merging))
    with pytest.raises(ValueError, match="train data: 1 bad row"):
        tokenize([{"messages": chat}], toy_tokenizer(merging))


def test_pad_equal_to_eos_does_not_mask_the_real_eos() -> None:
    rows = [
        {"input_ids": [0, 2, 1], "labels": [0, 2, 1]},
        {"input_ids": [0, 2, 3, 1], "labels": [0, 2, 3, 1]},
    ]
    batch = collate(rows, pad_token_id=1)
    assert batch["labels"].tolist() == [[0, 2, 1, IGNORE_INDEX], [0, 2, 3, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch["input_ids"].tolist() == [[0, 2, 1, 1], [0, 2, 3, 1]]


@pytest.mark.parametrize("name", ["llama2 like", "llama3 like", "stories260K", "llama2", "llama3_1"])
@pytest.mark.parametrize(
    "row", [{"prompt": "once upon", "completion": " a time é 🙂"}, {"text": "once upon a time"}], ids=["pair", "text"]
)
def test_row_has_exactly_one_begin_token_and_one_end_token(name: str, row: dict[str, str]) -> None:
    tokenizer = tokenizer_of(name)
    (kept,), _ = tokenize([row], tokenizer)
    ids, labels = kept["input_ids"], kept["labels"]
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids.count(tokenizer.eos_token_id) == 1
    assert labels[-1] == ids[-1] == tokenizer.eos_token_id
    if "prompt" in row:
        (text,) = learnt(ids, labels, tokenizer)
        assert text.strip() == row["completion"].strip() + tokenizer.eos_token
    else:
        assert labels[1:] == ids[1:]


@pytest.mark.parametrize("name", ["sample", "llama3 like", "llama3_1"])
def test_chat_has_no_second_begin_token_before_the_templates_own(name: str) -> None:
    tokenizer = tokenizer_of(name)
    ids, _ = tokenize_chat(TURNS, tokenizer)
    rendered = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert ids.count(tokenizer.bos_token_id) == rendered.count(tokenizer.bos_token)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == rendered


@pytest.mark.parametrize("writes_bos", [True, False])
def test_chat_has_exactly_one_begin_token_where_the_tokenizer_adds_one(writes_bos: bool) -> None:
    tokenizer = toy_tokenizer(("<s>" if writes_bos else "") + TEMPLATE, adds_bos=True)
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]
    (row,), _ = tokenize([{"messages": messages}], tokenizer)
    assert row["input_ids"].count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("adds_eos", [False, True])
def test_text_that_writes_its_own_end_token_gets_no_second_one(adds_eos: bool) -> None:
    tokenizer = toy_tokenizer(adds_bos=True, adds_eos=adds_eos)
    kept, _ = tokenize([{"text": "ab"}, {"text": "ab</s>"}], tokenizer)
    expected = tokenizer.convert_tokens_to_ids(["<s>", "a", "b", "</s>"])
    assert [row["input_ids"] for row in kept] == [expected] * 2
    assert all(row["labels"][1:] == expected[1:] for row in kept)


def test_text_that_writes_its_own_begin_token_gets_no_second_one() -> None:
    kept, _ = tokenize([{"text": "<s>ab"}], toy_tokenizer(adds_bos=True))
    pair, _ = tokenize([{"prompt": "<s>a", "completion": "b"}], toy_tokenizer(adds_bos=True))
    assert [row["input_ids"].count(0) for row in [*kept, *pair]] == [1, 1]


def test_begin_token_after_blanks_gets_no_second_one() -> None:
    kept, line = tokenize([{"text": " <s>ab"}], toy_tokenizer(adds_bos=True))
    assert [row["input_ids"].count(0) for row in kept] == [1]
    assert "1 with the text of a control token" in line
    tokenizer = toy_tokenizer(" <s>" + TEMPLATE, adds_bos=True)
    assert tokenize_chat([{"role": "user", "content": "a"}, CHAT], tokenizer)[0].count(0) == 1


def test_another_role_of_a_special_token_makes_the_cached_rows_anew() -> None:
    tokenizer = toy_tokenizer()
    first = tokenizer_key(tokenizer)
    tokenizer.pad_token = "<s>"
    second = tokenizer_key(tokenizer)
    tokenizer.add_special_tokens({"unk_token": "a"})
    assert len({first, second, tokenizer_key(tokenizer)}) == 3


# --- counting and refusing rows


def test_over_long_rows_are_cut_and_counted() -> None:
    tokenizer = toy_tokenizer()
    kept, line = tokenize([{"text": "a" * n} for n in (3, 9, 10, 11, 30)], tokenizer, max_length=10)
    assert [len(row["input_ids"]) for row in kept] == [4, 10, 10, 10, 10]
    assert "3 cut to 10 tokens" in line
    assert "left out" not in line


def test_prompt_as_long_as_the_limit_is_left_out_and_counted() -> None:
    tokenizer = toy_tokenizer()
    rows = [{"prompt": "a" * n, "completion": "b"} for n in (3, 9, 10, 11)]
    kept, line = tokenize(rows, tokenizer, max_length=10)
    assert [len(row["input_ids"]) for row in kept] == [5]  # of the second, only the end of the answer was cut off
    assert all(num_label_tokens(torch.tensor([row["labels"]])) > 0 for row in kept)
    assert "3 without a label left" in line and "keep_end" in line
    assert "1 rows" in line


def test_many_dropped_rows_stop_the_run_unless_allowed() -> None:
    rows = Dataset.from_list([{"text": "a" * n} for n in (20, 20, *[3] * 8)])
    with pytest.raises(ValueError, match=r"More than 10% of the rows would not be learnt \(--allow_lost_rows\)"):
        tokenize_rows(rows, toy_tokenizer(), 10, "train", "drop")
    kept, line = tokenize_rows(rows, toy_tokenizer(), 10, "train", "drop", allow_lost_rows=True)
    assert len(kept) == 8 and "2 longer than 10 and dropped" in line
    one_of_ten = rows.select(range(1, 10)).add_item({"text": "a"})
    assert len(tokenize_rows(one_of_ten, toy_tokenizer(), 10, "train", "drop")[0]) == 9


def test_many_bad_rows_that_are_skipped_are_said_loudly() -> None:
    good, bad = {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}
    for rows, is_loud in (([good] * 8 + [bad] * 2, True), ([good] * 9 + [bad], False)):
        _, line = tokenize_rows(Dataset.from_list(rows), toy_tokenizer(), 10, "train", skip_bad_rows=True)
        assert ("note: 2 of 10 rows are bad and left out" in line) == is_loud


def test_line_counts_tokens_and_labels_that_are_trained() -> None:
    tokenizer = toy_tokenizer()
    kept, line = tokenize([{"prompt": "aaa", "completion": "bb"}, {"prompt": "", "completion": "c"}], tokenizer)
    trained = sum(num_label_tokens(torch.tensor([row["labels"]])) for row in kept)
    assert trained == 3 + 1  # b b </s>; </s> (the first token of a row is never predicted)
    assert f"8 tokens, {trained} of them labels" in line


def test_every_row_masked_is_an_error_not_a_loss_of_zero() -> None:
    with pytest.raises(ValueError, match="raise --max_length"):
        tokenize([{"prompt": "a" * 20, "completion": "b"}] * 3, toy_tokenizer(), max_length=10)


CHAT = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    "bad",
    [
        {"messages": None},
        {"messages": []},
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "narrator", "content": "a"}, {"role": "gpt", "content": "b"}]},
        {"messages": [{"role": "user", "content": None}, CHAT]},
        {
            "messages": [
                {"role": "user", "content": "a"},
                CHAT,
                {"role": "user", "content": "a"},
                {**CHAT, "content": None},
            ]
        },
    ],
)
@pytest.mark.parametrize("name", ["sample", "llama3_1"])
def test_bad_chat_names_its_row(name: str, bad: dict[str, Any]) -> None:
    good = {"messages": [{"role": "user", "content": "a"}, CHAT]}
    with pytest.raises(ValueError, match=r"1 bad row\(s\) of 3:\n- row 2: "):
        tokenize([good, bad, good], tokenizer_of(name))


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt": None, "completion": "b"},
        {"prompt": "a", "completion": None},
        {"prompt": "a", "completion": ""},
    ],
)
def test_bad_pair_names_its_row(bad: dict[str, Any]) -> None:
    good = {"prompt": "a", "completion": "b"}
    with pytest.raises(ValueError, match=r"1 bad row\(s\) of 3:\n- row 3: "):
        tokenize([good, good, bad], toy_tokenizer())


def test_chat_that_the_template_itself_refuses_names_its_row() -> None:
    alternating = (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['role'] + ':' + m['content'] + '</s>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    good = {"messages": [{"role": "user", "content": "a"}, CHAT]}
    with pytest.raises(ValueError, match=r"row 2: roles must alternate"):
        tokenize([good, {"messages": [CHAT, CHAT]}], toy_tokenizer(alternating))


def test_chat_without_a_template_is_refused_with_the_ways_out() -> None:
    with pytest.raises(ValueError, match="no chat template; use prompt/completion"):
        tokenize([{"messages": TURNS}], toy_tokenizer())


def test_unknown_columns_are_refused_with_the_formats() -> None:
    with pytest.raises(ValueError) as caught:
        tokenize([{"query": "a", "reply": "b"}], toy_tokenizer())
    for word in ("query", "messages", "prompt + completion", "text"):
        assert word in str(caught.value)


# --- files


GOOD = '{"text": "a"}\n'


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (GOOD + '{"text": "b"\n', 2),
        (GOOD + "\n" + GOOD + "[1]\n", 4),
        (GOOD + GOOD + "nonsense\n" + GOOD, 3),
        (GOOD + '{"text": "cut off', 2),
    ],
)
def test_bad_json_names_file_and_line(tmp_path: Path, content: bytes | str, line: int) -> None:
    path = write(tmp_path, "rows.jsonl", content)
    with pytest.raises(ValueError) as caught:
        read(path)
    assert f"{path}, line {line}:" in str(caught.value)


def test_bad_line_in_a_folder_names_the_file(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", GOOD)
    bad = write(tmp_path, "test.jsonl", GOOD + "{\n")
    with pytest.raises(ValueError) as caught:
        read(tmp_path)
    assert f"{bad}, line 2:" in str(caught.value)


def test_bom_blank_lines_crlf_and_no_final_newline_read_like_the_clean_file(tmp_path: Path) -> None:
    lines = ['{"text": "a"}', '{"text": "b\u2028c"}', '{"text": "d"}']
    forms = {
        "clean": "\n".join(lines) + "\n",
        "bom": "\ufeff" + "\n".join(lines) + "\n",
        "crlf": "\r\n".join(lines) + "\r\n",
        "blank": "\n\n".join(lines) + "\n\n",
        "open": "\n".join(lines),
    }
    for form, text in forms.items():
        path = write(tmp_path, f"{form}.jsonl", text)
        assert [row["text"] for row in read(path)[0]] == ["a", "b\u2028c", "d"], form


def test_empty_file_is_named(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.json"):
        path = write(tmp_path, name, "")
        with pytest.raises(ValueError) as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert "is empty" in str(caught.value)


def test_unknown_file_kind_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = write(tmp_path, "rows.docx", "x")
    with pytest.raises(ValueError, match=r"\.docx file, allowed: \.jsonl"):
        read(path)


def test_json_array_and_jsonl_and_folder_give_the_same_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder, "train.jsonl", lines)
    write(folder, "test.jsonl", json.dumps(rows[0]) + "\n")
    for path in (write(tmp_path, "a.jsonl", lines), write(tmp_path, "a.json", json.dumps(rows)), folder):
        train, test = read(path)
        assert train == rows
        assert (test is None) == (path != folder)
    assert test == rows[:1]


def test_missing_split_is_refused_with_those_there_are(tmp_path: Path) -> None:
    write(tmp_path, "test.jsonl", GOOD)
    with pytest.raises(ValueError, match="no split 'train'; it has: test"):
        read(tmp_path)


@pytest.mark.parametrize("is_whole", [True, False])
def test_second_start_keeps_and_makes_nothing_per_row_in_python(
    monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    """Counted: at most two numpy integers a row at a time (a Python list of rows has 8 bytes for a place alone); every
    column of tokens is read off the disk as it lies there, also where rows that are too long were left out."""
    looked_up: list[Any] = []
    from_indices = formatting._query_table_with_indices_mapping
    monkeypatch.setattr(
        formatting, "_query_table_with_indices_mapping", lambda *args: looked_up.append(args) or from_indices(*args)
    )

    def second_start(count: int) -> int:
        texts = ["a" * 20 if not is_whole and number % 50 == 7 else f"ab {number % 9}" for number in range(count)]
        rows = Dataset.from_dict({"text": texts})
        expected, line = tokenize_rows(rows, toy_tokenizer(), 16, "train", "drop")
        tracemalloc.start()
        kept, again = tokenize_rows(rows, toy_tokenizer(), 16, "train", "drop")
        digest, lengths = data_hash(kept), list_lengths(kept, "labels")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert line == again and digest == data_hash(Dataset.from_list(expected.to_list()))
        assert lengths.tolist() == [len(row["labels"]) for row in kept] and len(kept) == count - texts.count("a" * 20)
        return peak

    few, many = second_start(2000), second_start(42_000)
    assert many - few < 16 * 40_000 and not looked_up


# --- which rows each rank takes

SIZES = [
    (n, micro, accumulation, world)
    for n in (*range(1, 20), 31, 32, 33, 64, 97)
    for micro in (1, 2, 3)
    for accumulation in (1, 2, 3)
    for world in (1, 2, 3, 4)
]


def test_every_row_is_taken_once_and_every_rank_runs_as_many_micro_batches() -> None:
    for n, micro, accumulation, world in SIZES:
        ranks = [RankSteps(range(n), Share(micro, accumulation, rank, world)) for rank in range(world)]
        taken = [row for steps in ranks for step in steps for batch in step for row in batch]
        assert sorted(taken) == list(range(n)), (n, micro, accumulation, world)
        for steps in zip(*ranks, strict=True):
            assert len({len(step) for step in steps}) == 1
            assert 1 <= len(steps[0]) <= accumulation
        assert all(len(batch) <= micro for steps in ranks for step in steps for batch in step)
        assert len(ranks[0]) == count_steps(n, Share(micro, accumulation, 0, world), 1.0)


def test_a_step_takes_the_same_rows_on_any_number_of_ranks() -> None:
    for n in (*range(1, 40), 64, 97):
        order = shuffled_order(n, seed=3, epoch=1)
        by_split = []
        for micro, accumulation, world in [(1, 8, 1), (8, 1, 1), (2, 2, 2), (4, 1, 2), (1, 2, 4), (2, 1, 4), (1, 1, 8)]:
            ranks = [RankSteps(order, Share(micro, accumulation, rank, world)) for rank in range(world)]
            by_split.append([sorted(itertools.chain(*itertools.chain(*steps))) for steps in zip(*ranks, strict=True)])
        assert all(steps == by_split[0] for steps in by_split), n


def test_no_micro_step_is_empty_on_every_rank() -> None:
    for n, micro, accumulation, world in SIZES:
        ranks = [RankSteps(range(n), Share(micro, accumulation, rank, world)) for rank in range(world)]
        for steps in zip(*ranks, strict=True):
            assert all(any(batches) for batches in zip(*steps, strict=True))


def test_order_is_a_permutation_that_differs_between_epochs_and_seeds() -> None:
    orders = [shuffled_order(50, seed, epoch).tolist() for seed, epoch in [(0, 0), (0, 1), (7, 0), (7, 1)]]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert all(first != second for first, second in itertools.combinations(orders, 2))
    assert shuffled_order(50, 7, 1).tolist() == orders[3]


def test_order_does_not_touch_or_read_the_global_random_state() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = shuffled_order(50, 0, 0)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert np.array_equal(shuffled_order(50, 0, 0), first)


def make_rows(n: int) -> list[dict[str, list[int]]]:
    """Rows that can be told apart by their second token."""
    return [{"input_ids": [1, 100 + i, 2], "labels": [IGNORE_INDEX, 100 + i, 2]} for i in range(n)]


def rows_in(batches: list[dict[str, torch.Tensor]]) -> list[int]:
    labelled = [labels for batch in batches for labels in batch["labels"].tolist() if set(labels) != {IGNORE_INDEX}]
    return [labels[1] - 100 for labels in labelled]


def run(n: int, steps: int, micro: int, accumulation: int, world: int, **position: int) -> tuple[list, list]:
    """(sorted rows of each step over all ranks, position after each step)."""
    ranks = [
        training_steps(
            make_rows(n), Share(micro, accumulation, rank, world), position or FIRST_ROW, seed=5, pad_token_id=0
        )
        for rank in range(world)
    ]
    taken, positions = [], []
    for _ in range(steps):
        results = [next(rank) for rank in ranks]
        assert len({len(batches) for batches, _, _ in results}) == 1
        assert len({tuple(after.items()) for _, after, _ in results}) == 1
        assert [rows_in(batches) for batches, _, _ in results] == [
            list(itertools.chain(*numbers)) for _, _, numbers in results
        ]
        taken.append(sorted(row for batches, _, _ in results for row in rows_in(batches)))
        positions.append(results[0][1])
    return taken, positions


@pytest.mark.parametrize("n", [1, 7, 16, 17])
def test_training_continues_at_any_position_also_on_another_number_of_ranks(n: int) -> None:
    whole, positions = run(n, 8, micro=2, accumulation=2, world=1)
    assert Counter(itertools.chain(*whole[: -(-n // 4)])) == Counter(range(n))
    for done in range(1, 7):
        for micro, accumulation, world in [(2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4)]:
            rest, after = run(n, 8 - done, micro, accumulation, world, **positions[done - 1])
            assert rest == whole[done:], (n, done, world)
            assert after == positions[done:]


def test_training_reads_every_row_once_per_epoch_in_another_order_each_time() -> None:
    taken, positions = run(10, 9, micro=1, accumulation=2, world=2)
    epochs = [list(itertools.chain(*taken[i : i + 3])) for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(map(tuple, taken[i : i + 3])) for i in (0, 3, 6)}) == 3
    assert [position["epoch"] for position in positions] == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert positions[2] == {"epoch": 1, "rows_seen": 0}


def lengths_in_step(steps: Iterator[Step]) -> list[int]:
    return [int(size) for batch in next(steps).micro_batches for size in batch["attention_mask"].sum(1)]


def test_rows_grouped_by_length_are_those_of_one_step_and_none_is_read_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 lengths, each 16 times: the rows of a step of 16 differ less than any 16 of a group of 64 in random order."""
    rows = [{"input_ids": [1] * (1 + i % 64), "labels": [1] * (1 + i % 64)} for i in range(1024)]
    data, reads, read = Dataset.from_list(rows), [], Dataset.__getitem__
    monkeypatch.setattr(Dataset, "__getitem__", lambda self, key: (reads.append(key), read(self, key))[1])
    options = {"seed": 0, "pad_token_id": 0, "group_by_length": True}
    ranks = [training_steps(data, Share(2, 2, rank, 4), **options) for rank in range(4)]
    alone = training_steps(data, Share(16, 1, 0, 1), **options)
    spread = []
    for _ in range(64):
        sizes = [size for rank in ranks for size in lengths_in_step(rank)]
        assert sorted(sizes) == sorted(lengths_in_step(alone))
        spread.append(max(sizes) - min(sizes))
    assert np.mean(spread) < 6
    assert len(reads) == 2 * 1024 + 5  # each row once per epoch, and of each loader the first: is it packed?


@pytest.mark.parametrize("after_steps", [1, 3, 4])
def test_an_epoch_grouped_by_length_goes_on_in_its_order_under_another_global_batch(after_steps: int) -> None:
    rows = [{"input_ids": [1] * length, "labels": [1] * length} for length in range(1, 38)]
    data, options = Dataset.from_list(rows), {"seed": 0, "pad_token_id": 0, "group_by_length": True}

    def taken(steps: Iterator[Step], until: dict[str, int]) -> tuple[list[int], dict[str, int]]:
        seen: list[int] = []
        for step in steps:
            seen += itertools.chain(*step.rows)
            if step.position == until:
                return seen, step.position
        raise AssertionError

    whole, end = taken(training_steps(data, Share(8, 1, 0, 1), **options), {"epoch": 1, "rows_seen": 0})
    assert sorted(whole) == list(range(37))
    stop = {"epoch": 0, "rows_seen": 8 * after_steps, "rows_per_group": 8}
    first, position = taken(training_steps(data, Share(8, 1, 0, 1), **options), stop)
    position = {"epoch": 0, "rows_seen": len(first) + 3, "rows_per_group": 8}
    middle, position = taken(training_steps(data, Share(3, 1, 0, 1), stop, **options), position)
    rest, position = taken(training_steps(data, Share(5, 1, 0, 1), position, **options), end)
    assert first + middle + rest == whole
    after = [list(next(training_steps(data, Share(5, 1, 0, 1), at, **options)).rows[0]) for at in (position, end)]
    assert after[0] == after[1] and len(after[0]) == 5


def test_steps_of_an_epoch_are_cut_from_one_array_when_they_are_asked_for() -> None:
    """Counted in bytes of Python's, beside the array of the order: as good as none, whatever was seen before."""
    tracemalloc.start()
    order = shuffled_order(1_000_000, seed=0, epoch=0)
    for rows_seen in (0, 900_000):
        steps = RankSteps(order[rows_seen:], Share(2, 2, 1, 4))
        assert np.shares_memory(steps.order, order) and len(steps) == -(-(1_000_000 - rows_seen) // 16)
        assert steps[1] == [order[rows_seen + at : rows_seen + at + 2].tolist() for at in (18, 26)]
    loader = make_loader(Dataset.from_list(make_rows(1)), steps, pad_token_id=0)
    assert len(loader) == 2 * 6250
    assert tracemalloc.get_traced_memory()[1] < 300_000
    tracemalloc.stop()


def test_loader_workers_give_the_same_batches() -> None:
    def ids(num_workers: int) -> list[list[int]]:
        steps = training_steps(make_rows(7), Share(2, 2, 0, 1), seed=0, pad_token_id=0, num_workers=num_workers)
        return [batch["input_ids"].tolist() for _ in range(2) for batch in next(steps)[0]]

    assert ids(0) == ids(1)


def test_evaluation_covers_every_row_once_and_fillers_have_no_label() -> None:
    for n, batch_size, world in itertools.product((1, 2, 5, 8, 9, 17), (1, 2, 4), (1, 2, 3, 4)):
        rows = make_rows(n)
        shares = [Share(1, 1, rank, world) for rank in range(world)]
        ranks = [list(evaluation_batches(rows, batch_size, share, pad_token_id=0)) for share in shares]
        assert len({len(batches) for batches in ranks}) == 1
        assert sorted(row for batches in ranks for row in rows_in(batches)) == list(range(n))
        labels = sum(num_label_tokens(batch["labels"]) for batches in ranks for batch in batches)
        assert labels == 2 * n  # two per row, so fillers add none


# --- the loss


def by_hand(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Next-token cross-entropy written out with plain loops in float64."""
    total = 0.0
    for b, t in itertools.product(range(labels.shape[0]), range(labels.shape[1] - 1)):
        target = int(labels[b, t + 1])
        if target != IGNORE_INDEX:
            scores = logits[b, t].double()
            total += float(scores.exp().sum().log() - scores[target])
    return total


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config)


def batch_of(lengths: list[int], prompt: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = []
    for length in lengths:
        ids = torch.randint(0, 64, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [IGNORE_INDEX] * prompt + ids[prompt:]})
    return collate(rows, pad_token_id=0)


def test_loss_is_the_next_tokens_and_not_the_one_after() -> None:
    model, batch = tiny_llama(), batch_of([5, 9, 3])
    assert batch["labels"].shape == batch["input_ids"].shape
    with torch.no_grad():
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        expected = by_hand(logits, batch["labels"])
        assert float(token_loss_sum(logits, batch["labels"])) == pytest.approx(expected, rel=1e-6)
        mean_of_the_library = model(**batch).loss
    tokens = num_label_tokens(batch["labels"])
    assert tokens == (5 - 2) + (9 - 2) + (3 - 2)
    assert float(mean_of_the_library) == pytest.approx(expected / tokens, rel=1e-6)


def test_loss_is_fp32_and_summed_in_fp32_from_bf16_logits() -> None:
    labels = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    logits = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    loss = token_loss_sum(logits, labels)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(by_hand(logits, labels), rel=1e-6)


def test_row_without_labels_gives_a_loss_of_zero_with_a_graph() -> None:
    logits = torch.randn(1, 4, 8, requires_grad=True)
    loss = token_loss_sum(logits, torch.full((1, 4), IGNORE_INDEX))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def gradients(model: LlamaForCausalLM, batches: list[dict[str, torch.Tensor]], world: int) -> list[torch.Tensor]:
    """What the ranks' averaged gradients are, with each batch on its own rank where world > 1."""
    model.zero_grad()
    tokens = sum(num_label_tokens(batch["labels"]) for batch in batches)
    for batch in batches:
        loss, _ = micro_batch_loss(model, batch, tokens, world)
        (loss / world).backward()  # FSDP2 averages over ranks
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_accumulated_micro_batches_of_unequal_length_equal_one_batch(world: int) -> None:
    model, rows = tiny_llama(), [[5], [9], [3], [12]]
    together = batch_of([length for (length,) in rows])
    one_by_one = [
        {name: value[i : i + 1, :length] for name, value in together.items()} for i, (length,) in enumerate(rows)
    ]
    expected = gradients(model, [together], 1)
    found = gradients(model, one_by_one, world)
    scale = max(float(gradient.abs().max()) for gradient in expected)
    for one, other in zip(found, expected):
        assert float((one - other).abs().max()) <= 1e-5 * scale  # fp32 sums in another order


def test_balancing_loss_is_weighted_by_the_share_of_label_tokens() -> None:
    class Experts(torch.nn.Module):
        config = LlamaConfig(router_aux_loss_coef=0.5)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            logits = torch.zeros(*input_ids.shape, 64)
            return type("Output", (), {"logits": logits, "aux_loss": torch.tensor(3.0)})()

    batch = batch_of([6])
    tokens = num_label_tokens(batch["labels"])
    loss, loss_sum = micro_batch_loss(Experts(), batch, step_label_tokens=10, world_size=2)
    assert float(loss_sum) == pytest.approx(tokens * float(torch.log(torch.tensor(64.0))), rel=1e-6)
    assert float(loss) == pytest.approx((float(loss_sum) + 0.5 * 3.0 * tokens) * 2 / 10, rel=1e-6)


def test_steps_of_a_run_are_counted_over_whole_epochs_unless_given() -> None:
    share = Share(2, 2, 0, 1)
    assert count_steps(10, share, num_train_epochs=2.0) == 6
    assert count_steps(10, share, num_train_epochs=0.5) == 2
    assert count_steps(10, share, num_train_epochs=2.0, max_steps=5) == 5


def test_starting_a_loader_leaves_the_random_state_alone() -> None:
    """A loader draws a seed for its workers when it starts; from the global state that would shift dropout masks."""
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(evaluation_batches(rows, 2, Share(1, 1, 0, 1), 0))
    next(training_steps(rows, Share(1, 2, 0, 1), seed=0, pad_token_id=0))
    assert torch.equal(torch.get_rng_state(), before)


def test_turn_that_its_author_excludes_is_not_learnt_even_where_whole_chats_are() -> None:
    tokenizer = toy_tokenizer(TEMPLATE)
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "secret", "weight": 0},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "fine"},
    ]
    (result,) = encode_all([read_chat(chat, None, "messages")], tokenizer, False, True)
    assert learnt(*result[:2], tokenizer) == ["user:a</s>assistant:", "user:b</s>assistant:fine</s>"]
