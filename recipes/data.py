"""Rows of text to token ids and labels: formats, chat template, label mask.

Labels are the input ids, unshifted, with IGNORE_INDEX where nothing is learnt. Only answers are learnt: assistant turns
of `messages`, the `completion` of a pair, everything of a `text`. The end of a turn is learnt too.
"""

import json
from pathlib import Path

from datasets import Dataset, DatasetDict, load_dataset
from jinja2 import TemplateError
from losses import IGNORE_INDEX
from transformers import PreTrainedTokenizerBase

FORMATS = {"messages": ("messages",), "prompt/completion": ("prompt", "completion"), "text": ("text",)}
DATA_FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}


def load_rows(name: str, train_split: str, test_split: str) -> tuple[Dataset, Dataset | None]:
    """Load a file, a folder of files named after their split, or a hub data set; return (train, test or None).

    Raises:
        ValueError: no such data set or split, or a line that is not JSON, with file and line.
    """
    path = Path(name)
    if path.is_file() and path.suffix not in DATA_FILES:
        raise ValueError(
            f"--dataset_name {name}: found a {path.suffix or 'nameless'} file, allowed: {', '.join(DATA_FILES)}"
        )
    try:
        if path.is_file():
            loaded = load_dataset(DATA_FILES[path.suffix], data_files={train_split: str(path)})
        else:
            loaded = load_dataset(name)
    except Exception as error:  # datasets raises many kinds; all of them mean that nothing was loaded
        cause = first_bad_line(path) or f"{type(error).__name__}: {error}"
        raise ValueError(f"--dataset_name {name} could not be loaded. {cause}") from error
    assert isinstance(loaded, DatasetDict), type(loaded)
    if train_split not in loaded:
        raise ValueError(f"--dataset_name {name} has no split {train_split!r}; it has: {', '.join(loaded)}.")
    return loaded[train_split], loaded.get(test_split)


def first_bad_line(path: Path) -> str | None:
    """Name the first line of a JSONL file (or of a folder's files) that is not a JSON object."""
    files = [path] if path.is_file() else sorted(path.glob("*.jsonl")) if path.is_dir() else []
    for file in files:
        if file.stat().st_size == 0:
            return f"{file} is empty."
        if file.suffix != ".jsonl":
            continue
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    row = json.loads(line.decode("utf-8-sig")) if line.strip() else {}
                except ValueError as error:
                    return f"{file}, line {number}: {error}."
                if not isinstance(row, dict):
                    return f"{file}, line {number}: found {type(row).__name__}, expected an object per line."
    return None


def find_format(rows: Dataset) -> str:
    """Return which of FORMATS the columns are. Raises ValueError if none."""
    for name, columns in FORMATS.items():
        if set(columns) <= set(rows.column_names):
            return name
    allowed = "; ".join(" + ".join(columns) for columns in FORMATS.values())
    raise ValueError(f"The data has columns {rows.column_names}; needed: {allowed}. Rename the columns of your file.")


def tokenize_rows(
    rows: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, which: str
) -> tuple[list[dict[str, list[int]]], str]:
    """Return ([{input_ids, labels}], one line on what happened). Rows over max_length are cut at the end; rows with no
    label left (a prompt as long as the limit) are left out. Both are counted in the line.

    Raises:
        ValueError: a row that cannot be read, naming it, or no row left.
    """
    row_format = find_format(rows)
    kept, cut, unlabelled = [], 0, 0
    for index, row in enumerate(rows):
        try:
            text, spans = render_row(row, row_format, tokenizer)
        except (ValueError, KeyError, TypeError, TemplateError) as error:
            raise ValueError(f"{which} data, row {index + 1} ({row_format}): {error}") from error
        ids, labels = label_tokens(text, spans, tokenizer)
        cut += len(ids) > max_length
        ids, labels = ids[:max_length], labels[:max_length]
        if all(label == IGNORE_INDEX for label in labels[1:]):
            unlabelled += 1
            continue
        kept.append({"input_ids": ids, "labels": labels})
    line = f"{which} data: {len(kept):,} rows ({row_format}), {sum(len(row['input_ids']) for row in kept):,} tokens, "
    line += f"{sum(label != IGNORE_INDEX for row in kept for label in row['labels'][1:]):,} of them labels; "
    line += f"{cut:,} row(s) cut at max_length {max_length}, {unlabelled:,} left out without a label"
    if not kept:
        raise ValueError(f"{line}. No row is left to learn from: raise --max_length or check the data.")
    return kept, line


def render_row(row: dict, row_format: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[tuple[int, int]]]:
    """Return (text, character spans that are learnt)."""
    if row_format == "messages":
        return render_chat(row["messages"], tokenizer)
    columns = FORMATS[row_format]
    wrong = [f"{name} is {type(row[name]).__name__}" for name in columns if not isinstance(row[name], str)]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}; expected text")
    if not row[columns[-1]]:
        raise ValueError(f"{columns[-1]} is empty")
    prompt = row["prompt"] if row_format == "prompt/completion" else ""
    end = tokenizer.eos_token or ""
    text = prompt + row[columns[-1]].removesuffix(end) + end
    return text, [(len(prompt), len(text))]


def render_chat(messages: list[dict], tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[tuple[int, int]]]:
    """Render a chat; the spans are what the template adds for each assistant turn after its generation prompt.

    Raises:
        ValueError: no chat template, no answer, or a template that writes earlier turns differently later on.
    """
    if tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template; use prompt/completion or text columns, or another model")
    wrong = [type(turn["content"]).__name__ for turn in messages if not isinstance(turn["content"], str)]
    if wrong:
        raise ValueError(f"the content of a turn is {wrong[0]}; expected text")
    turns = [{"role": turn["role"], "content": turn["content"]} for turn in messages]
    if not any(turn["role"] == "assistant" and turn["content"] for turn in turns):
        raise ValueError(f"no answer: roles are {[turn['role'] for turn in turns]}, none is an assistant with content")
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    spans = []
    for i, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(turns[:i], tokenize=False, add_generation_prompt=True)
        after = tokenizer.apply_chat_template(turns[: i + 1], tokenize=False)
        if not (text.startswith(before) and after.startswith(before) and text.startswith(after.rstrip())):
            raise ValueError(
                f"the chat template writes turn {i + 1} differently when later turns follow; cannot mask it"
            )
        spans.append((len(before), len(after.rstrip())))
    return text, spans


def label_tokens(
    text: str, spans: list[tuple[int, int]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[int]]:
    """Tokenize once and label every token that reaches into a span, so that a merge across the seam cannot shift it.

    Exactly one begin token for a tokenizer that uses one: its own, unless the text (a chat template's) starts with it.
    An end token that the tokenizer appends is dropped: the text ends as its format says.
    """
    has_begin = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    encoded = tokenizer(text, add_special_tokens=not has_begin, return_offsets_mapping=True, verbose=False)
    ids, labels = [], []
    for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"]):
        if ids and start == end and token in tokenizer.all_special_ids:  # appended: it covers no character
            continue
        ids.append(token)
        is_learnt = any(start < span_end and end > span_start for span_start, span_end in spans)
        labels.append(token if is_learnt else IGNORE_INDEX)
    return ids, labels


def prompts_and_answers(rows: Dataset | None, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[str], bool]:
    """Return (prompt texts, expected answers, whether the prompts already hold their begin token).

    Raises:
        ValueError: the rows have no answer to compare with (plain text, or a chat that does not end in one).
    """
    if rows is None:
        raise ValueError("--predict_with_generate needs a test split, and this data set has none.")
    row_format = find_format(rows)
    if row_format == "prompt/completion":
        return rows["prompt"], rows["completion"], False
    if row_format != "messages" or any(chat[-1]["role"] != "assistant" for chat in rows["messages"]):
        raise ValueError(
            "--predict_with_generate needs test rows that end in an answer (messages or prompt/completion)."
        )
    chats = rows["messages"]
    prompts = [tokenizer.apply_chat_template(chat[:-1], tokenize=False, add_generation_prompt=True) for chat in chats]
    return prompts, [chat[-1]["content"] for chat in chats], True
