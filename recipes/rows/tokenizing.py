"""Rows to token ids and labels: the chat template, the label mask, rows that are too long, rows that are bad.

Labels are the input ids, unshifted, with IGNORE_INDEX where nothing is learnt. Only answers are learnt unless asked
otherwise: assistant turns of a chat, the completion of a pair, everything of a text. The end of a turn is learnt too.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from datasets.fingerprint import Hasher
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from .formats import FORMATS, Example, as_columns, find_format, read_example, row_of
from .labels import IGNORE_INDEX, encode_all, fit, render_prompt
from .private_datasets import fingerprint

MAX_LOST = 0.1  # share of rows that may lose their whole answer to max_length without --allow_lost_rows
NO_END = "the model will not learn to stop; check the chat template and the tokenizer's eos_token"
SHOWN, LISTED = 5, 100  # bad rows that an error shows, and that --skip_bad_rows lists
BATCH, ROWS_AT_ONCE = 500, 10_000  # rows that become tokens, and rows of tokens, at a time
TOKENS = {name: datasets.List(datasets.Value("int32")) for name in ("input_ids", "labels")}
VERSION = 4  # raise when the same row would be tokenised in another way: cached results are then made again


def tokenize_rows(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    which: str,
    truncation_mode: str = "keep_start",
    *,
    assistant_only_loss: bool = True,
    completion_only_loss: bool = True,
    columns: dict[str, str] | None = None,
    skip_bad_rows: bool = False,
    allow_lost_rows: bool = False,
    num_proc: int | None = None,
    mask_history: bool = False,
) -> tuple[Dataset, str]:
    """Return (rows of input_ids and labels, what happened as text).

    The result is cached on disk beside the rows, made by one rank of a machine and read by the others, which wait at a
    file lock and in no collective.

    Raises:
        ValueError: bad rows, naming file and line of the first ones; or too many rows without a label left.
    """
    columns = columns or {}
    options = (max_length, truncation_mode, assistant_only_loss, completion_only_loss, mask_history)
    function = partial(tokenize_batch, tokenizer=tokenizer, columns=columns, options=options)
    key = Hasher.hash([VERSION, fingerprint(rows), tokenizer_key(tokenizer), sorted(columns.items()), options])
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"tokenize-{key}.lock"):
        made = rows.map(
            function,
            batched=True,
            batch_size=BATCH,
            with_indices=True,
            remove_columns=rows.column_names,
            num_proc=num_proc,
            new_fingerprint=key,
            cache_file_name=str(cache / f"tokenized-{key}.arrow"),
            features=datasets.Features(
                TOKENS | {"state": datasets.Value("string"), "problem": datasets.Value("large_string")}
            ),
            desc=f"tokenising {which} rows",
        )
        table = made.with_format("arrow")[:]  # as it lies on disk
        kept = made.remove_columns(["state", "problem"])
        if not pc.all(pc.starts_with(table["state"], "kept")).as_py():
            # Written once more without the others: a selection looks up each row in Python whenever rows are read.
            kept = made.with_format("arrow").map(
                kept_of,
                batched=True,
                batch_size=ROWS_AT_ONCE,
                remove_columns=made.column_names,
                new_fingerprint=f"{key}-kept",
                cache_file_name=str(cache / f"tokenized-{key}-kept.arrow"),
                features=datasets.Features(TOKENS),
                desc=f"keeping {which} rows",
            )
    line = judge(table, which, max_length, kept, skip_bad=skip_bad_rows, allow_lost=allow_lost_rows, num_rows=len(rows))
    return kept.with_format(None), line


def kept_of(table: pa.Table) -> pa.Table:
    """What can be learnt of some rows."""
    return table.filter(pc.starts_with(table["state"], "kept")).select(list(TOKENS))


def tokenize_window(
    records: list[Callable[[], dict[str, Any]]],
    first_index: int,
    *,
    tokenizer: PreTrainedTokenizerBase,
    columns: dict[str, str],
    options: tuple[int, str, bool, bool, bool],
) -> tuple[list[dict[str, list[int]]], Counter[str], list[str]]:
    """Return (token rows of stream records that are read now, how many became what, problems of the others)."""
    batch = as_columns([read() for read in records])
    indices = list(range(first_index, first_index + len(records)))
    made = tokenize_batch(batch, indices, tokenizer, columns, options)
    problems = [problem for problem in made["problem"] if problem]
    found = zip(made["input_ids"], made["labels"], made["state"])
    rows = [{"input_ids": ids, "labels": labels} for ids, labels, state in found if state.startswith("kept")]
    return rows, Counter(state for states in made["state"] for state in states.split()), problems


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """All of a tokenizer that decides about ids and masks."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state |= {"truncation": None, "padding": None}  # these change with use
    roles = tokenizer.special_tokens_map, tokenizer.all_special_tokens
    return json.dumps([state, tokenizer.chat_template, *roles], default=str)


def judge(
    table: pa.Table, which: str, max_length: int, kept: Dataset, *, skip_bad: bool, allow_lost: bool, num_rows: int
) -> str:
    """Say what is kept and what happened to the rest, and stop where it is too much."""
    counts: Counter[str] = Counter()
    for found in pc.value_counts(table["state"]).to_pylist():
        counts.update(dict.fromkeys(found["values"].split(), found["counts"]))
    problems = table["problem"].filter(pc.not_equal(table["problem"], ""))
    listed = LISTED if skip_bad else SHOWN
    shown = problems[:listed].to_pylist() + [f"and {len(problems) - listed:,} more"] * (len(problems) > listed)
    shown = "\n- ".join(shown)
    if problems and not skip_bad:
        fix = "Mend them, or leave them out with --skip_bad_rows."
        raise ValueError(f"{which} data: {len(problems):,} bad row(s) of {num_rows:,}:\n- {shown}\n{fix}")
    formats = {name: counts[name.replace("/", "+")] for name in FORMATS if counts[name.replace("/", "+")]}
    row_format = " and ".join(formats) if len(formats) < 2 else ", ".join(f"{n}: {c:,}" for n, c in formats.items())
    tokens, labels = count_tokens(kept)
    line = f"{which} data: {len(kept):,} rows ({row_format}), {tokens:,} tokens, {labels:,} of them labels"
    words = {
        "apart": "tokenised as prompt and completion apart, since a token would cross the seam",
        "cut": f"cut to {max_length} tokens",
        "unfinished": "answers cut off and therefore not learnt",
        "split": "pieces of split rows",
        "unlabelled": "pieces without a label left out",
        "dropped": f"longer than {max_length} and dropped",
        "headless": "answers whose beginning was cut off",
        "special": "with the text of a control token in their content",
        "lost": "without a label left",
    }
    line += "".join(f"; {counts[state]:,} {word}" for state, word in words.items() if counts[state])
    line += f"; {len(problems):,} bad row(s) left out:\n- {shown}" if problems else ""
    advice = "long prompts with short answers want --truncation_mode keep_end; else raise --max_length"
    lost = counts["lost"] + counts["dropped"]
    if lost:
        line += f"\nnote: {lost:,} of {num_rows:,} rows lost their whole answer to --max_length: {advice}"
    if counts["endless"]:
        line += f"\nnote: {counts['endless']:,} rows hold an answer without an end-of-turn token: {NO_END}"
    if len(problems) > MAX_LOST * num_rows:
        line += f"\nnote: {len(problems):,} of {num_rows:,} rows are bad and left out: is their format the one meant?"
    if not len(kept):
        raise ValueError(f"{line}.\nNo row is left to learn from: check the data; {advice}.")
    if lost > MAX_LOST * num_rows and not allow_lost:
        raise ValueError(f"{line}.\nMore than {MAX_LOST:.0%} of the rows would not be learnt (--allow_lost_rows).")
    return line


def count_tokens(rows: Dataset) -> tuple[int, int]:
    """(tokens, label tokens) of all rows; the first label of a row predicts nothing."""
    tokens = labels = 0
    for batch in rows.with_format("arrow").iter(10_000):
        offsets = batch["labels"].combine_chunks().offsets.to_numpy()
        values = batch["labels"].combine_chunks().values.to_numpy()
        is_label = values != IGNORE_INDEX
        is_label[offsets[:-1][offsets[:-1] < offsets[1:]]] = False
        tokens, labels = tokens + int(offsets[-1] - offsets[0]), labels + int(is_label[offsets[0] : offsets[-1]].sum())
    return tokens, labels


def tokenize_batch(
    batch: dict[str, list],
    indices: list[int],
    tokenizer: PreTrainedTokenizerBase,
    columns: dict[str, str],
    options: tuple[int, str, bool, bool, bool],
) -> dict[str, list]:
    """Turn some records into rows of tokens; a bad record becomes an empty row with its problem."""
    out: dict[str, list] = {"input_ids": [], "labels": [], "state": [], "problem": []}

    def add(ids: list[int], labels: list[int], state: str, problem: str = "") -> None:
        for name, value in (("input_ids", ids), ("labels", labels), ("state", state), ("problem", problem)):
            out[name].append(value)

    max_length, truncation_mode, assistant_only, completion_only, mask_history = options
    records = [{name: values[i] for name, values in batch.items()} for i in range(len(indices))]
    found = [read_record(*pair, columns, tokenizer, mask_history) for pair in zip(records, indices)]
    examples = [example for _, _, example in found if isinstance(example, Example)]
    encoded = iter(encode_all(examples, tokenizer, assistant_only, completion_only))
    for where, row_format, example in found:
        result = next(encoded) if isinstance(example, Example) else example
        if isinstance(result, Exception):
            add([], [], "bad", f"{where}: {result}")
            continue
        ids, labels, notes = result
        notes += f" {row_format.replace('/', '+')}"
        is_whole = row_format == "text" or not (assistant_only if example.messages else completion_only)
        begin = tokenizer.bos_token_id
        for *part, state in fit(ids, labels, max_length, truncation_mode, is_text=is_whole, bos_token_id=begin):
            add(*part, state + notes)
    return out


def read_record(
    record: dict[str, Any],
    index: int,
    columns: dict[str, str],
    tokenizer: PreTrainedTokenizerBase,
    mask_history: bool = False,
) -> tuple[str, str, Example | Exception]:
    """Return (where the row stands, its format, what it means or what is wrong with it)."""
    row, where, problem = row_of(record, index, columns)
    try:
        if problem:
            raise ValueError(problem)
        row_format = find_format(row, columns)
        example = read_example(row, row_format, tokenizer.chat_template is not None)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return where, "", error
    if mask_history and example.messages:
        last = max(i for i, is_learnt in enumerate(example.is_learnt) if is_learnt)
        example.is_learnt = [i == last for i in range(len(example.is_learnt))]
    return where, row_format, example


@dataclass
class Questions:
    """Held-out prompts to answer and compare; `is_rendered`: the prompts hold their begin token already."""

    prompts: list[str]
    answers: list[str]
    is_rendered: bool


def prompts_and_answers(
    rows: Dataset | None, tokenizer: PreTrainedTokenizerBase, columns: dict[str, str], skip_bad_rows: bool
) -> Questions | None:
    """The prompts of held-out rows, with the answers that are expected; None where none can be read.

    Raises:
        ValueError: a row without an answer to compare with (plain text, or a chat that does not end in one).
    """
    if rows is None:
        raise ValueError("--predict_with_generate needs a test split, and this data set has none.")
    prompts, answers, is_rendered = [], [], False
    for index, record in enumerate(rows):
        where, row_format, example = read_record(record, index, columns, tokenizer)
        if isinstance(example, Exception):
            if skip_bad_rows:
                continue
            raise ValueError(f"{where}: {example}") from example
        last = example.messages[-1] if example.messages else {"role": "assistant", "content": example.completion}
        if row_format == "text" or last["role"] != "assistant" or not last["content"]:
            raise ValueError(f"{where}: --predict_with_generate needs test rows that end in the text of an answer.")
        is_rendered = bool(example.messages)
        prompts.append(render_prompt(example, tokenizer) if is_rendered else example.prompt)
        answers.append(last["content"])
    return Questions(prompts, answers, is_rendered) if prompts else None
