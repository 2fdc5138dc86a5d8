"""Rows to batches: formats, chat template, label mask, and which rows each rank takes.

Labels are the input ids, unshifted, with IGNORE_INDEX where nothing is learnt. Only answers are learnt: assistant turns
of `messages`, the `completion` of a pair, everything of a `text`. The end of a turn is learnt too.
"""

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict, load_dataset
from jinja2 import TemplateError
from losses import IGNORE_INDEX
from torch.utils.data import DataLoader
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
    encoded = tokenizer(text, add_special_tokens=not has_begin, return_offsets_mapping=True)
    ids, labels = [], []
    for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"]):
        if ids and start == end and token in tokenizer.all_special_ids:  # appended: it covers no character
            continue
        ids.append(token)
        is_learnt = any(start < span_end and end > span_start for span_start, span_end in spans)
        labels.append(token if is_learnt else IGNORE_INDEX)
    return ids, labels


def collate(rows: list[dict[str, list[int]]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Pad on the right to the longest row; (B, T) each. Padding is told by length, never by id (pad may be eos)."""
    length = max(len(row["input_ids"]) for row in rows)
    batch: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        size = len(row["input_ids"])
        batch["input_ids"].append(row["input_ids"] + [pad_token_id] * (length - size))
        batch["attention_mask"].append([1] * size + [0] * (length - size))
        batch["labels"].append(row["labels"] + [IGNORE_INDEX] * (length - size))
    return {name: torch.tensor(values) for name, values in batch.items()}


def split_rows(
    order: list[int], micro_batch_size: int, accumulation: int, rank: int, world_size: int
) -> list[list[list[int]]]:
    """Return this rank's rows as steps of micro-batches, from one global order.

    Each step takes the next micro_batch_size * accumulation * world_size rows, whatever the number of ranks. In the
    last, shorter step every rank runs as many micro-batches as the others; one without rows is an empty list.
    """
    rows_per_step = micro_batch_size * accumulation * world_size
    steps = []
    for first in range(0, len(order), rows_per_step):
        rows = order[first : first + rows_per_step]
        rows_per_micro_step = micro_batch_size * world_size
        micro_batches = []
        for start in range(0, len(rows), rows_per_micro_step):
            mine = start + rank * micro_batch_size
            micro_batches.append(rows[mine : min(mine + micro_batch_size, start + rows_per_micro_step)])
        steps.append(micro_batches)
    return steps


def shuffled_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """The global row order of an epoch: the same on any number of ranks."""
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def count_steps(num_rows: int, rows_per_step: int, num_train_epochs: float, max_steps: int) -> int:
    """Optimizer steps of the run; the last step of an epoch may be shorter."""
    return max_steps if max_steps > 0 else math.ceil(num_train_epochs * math.ceil(num_rows / rows_per_step))


def training_steps(
    rows: list[dict[str, list[int]]],
    micro_batch_size: int,
    accumulation: int,
    rank: int,
    world_size: int,
    seed: int,
    pad_token_id: int,
    num_workers: int = 0,
    epoch: int = 0,
    rows_seen: int = 0,
) -> Iterator[tuple[list[dict[str, torch.Tensor]], dict[str, int]]]:
    """Yield (this rank's micro-batches of one optimizer step, the position after it), without end.

    Starts after `rows_seen` rows of `epoch`: the position continues the same global order on any number of ranks.
    """
    while True:
        order = shuffled_order(len(rows), seed, epoch)[rows_seen:]
        steps = split_rows(order, micro_batch_size, accumulation, rank, world_size)
        batches = iter(make_loader(rows, [batch for step in steps for batch in step], pad_token_id, num_workers))
        for step in steps:
            rows_seen = min(rows_seen + micro_batch_size * accumulation * world_size, len(rows))
            position = {"epoch": epoch, "rows_seen": rows_seen}
            if rows_seen == len(rows):
                position = {"epoch": epoch + 1, "rows_seen": 0}
            yield [next(batches) for _ in step], position
        epoch, rows_seen = epoch + 1, 0


def evaluation_batches(
    rows: list[dict[str, list[int]]], batch_size: int, rank: int, world_size: int, pad_token_id: int
) -> DataLoader:
    """This rank's share of the rows: over all ranks every row once, and the same number of batches on each."""
    steps = split_rows(list(range(len(rows))), batch_size, 1, rank, world_size)
    return make_loader(rows, [batch for step in steps for batch in step], pad_token_id)


def make_loader(
    rows: list[dict[str, list[int]]], micro_batches: list[list[int]], pad_token_id: int, num_workers: int = 0
) -> DataLoader:
    """A loader of these micro-batches, in order. An empty one becomes a filler: a row of two tokens without labels."""
    filler = {"input_ids": (rows[0]["input_ids"] * 2)[:2], "labels": [IGNORE_INDEX] * 2}
    sampler = [batch or [len(rows)] for batch in micro_batches]
    return DataLoader(
        [*rows, filler],
        batch_sampler=sampler,
        collate_fn=partial(collate, pad_token_id=pad_token_id),
        num_workers=num_workers,
        # Without its own generator every new iterator draws from the global one, so that an evaluation or a resume
        # would shift the dropout masks of the steps after it.
        generator=torch.Generator(),
    )
