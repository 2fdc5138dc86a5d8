"""From the data arguments to a rank's batches: load the sources, tokenise the splits, pick the questions to answer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from .batches import BatchSizes, Share, Step, count_steps, evaluation_batches, training_steps
from .formats import FORMATS, as_columns, row_of
from .packing import PackedRows, pack_rows
from .sources import load_rows, open_stream, source_notes, unread_stream
from .streaming import Gather, Stream, stream_steps
from .tokenizing import MAX_LOST, Questions, prompts_and_answers, tokenize_rows, tokenize_window

FIRST_ROWS = 100  # of a stream: read before the model is loaded, to see the format and what is learnt


class DataOptions(BatchSizes, Protocol):
    """What is read of the script's arguments."""

    dataset_name: str
    dataset_weights: list[float] | None
    dataset_columns: str | None
    dataset_train_split: str
    dataset_test_split: str
    validation_split_percentage: float
    streaming: bool
    dataset_num_proc: int | None
    dataloader_num_workers: int
    max_length: int
    truncation_mode: str
    packing: bool
    group_by_length: bool
    assistant_only_loss: bool
    completion_only_loss: bool
    mask_history: bool
    skip_bad_rows: bool
    allow_lost_rows: bool
    predict_with_generate: bool
    load_best_model_at_end: bool
    per_device_eval_batch_size: int
    num_train_epochs: float
    max_steps: int
    seed: int


@dataclass
class Data:
    """What a run trains and evaluates on, and this rank's way through it; the lines say what became of the rows."""

    train: Dataset  # of a stream its first rows
    test: Dataset | None
    lines: list[str]
    arguments: DataOptions
    share: Share
    pad_token_id: int
    questions: Questions | None = None
    stream: Stream | None = None
    packed: PackedRows | None = None

    @property
    def rows(self) -> Sequence[dict[str, Any]]:
        """What is trained on: the documents, or several of them in each row."""
        return self.train if self.packed is None else self.packed

    def pack(self) -> None:
        """Put several documents into one row, under --packing."""
        if self.arguments.packing:
            self.packed, line = pack_rows(self.train, self.arguments.max_length)
            self.lines.append(line)

    def count_steps(self, state: dict[str, Any]) -> int:
        """Optimizer steps of the run, those before this state included."""
        epochs, max_steps = self.arguments.num_train_epochs, self.arguments.max_steps
        return count_steps(len(self.rows), self.share, epochs, max_steps, state)

    def steps(self, position: dict[str, Any], gather: Gather | None = None) -> Iterator[Step]:
        """This rank's optimizer steps from a position on, without end. With `gather`, which gives every rank what each
        one holds, the ranks share the tokenising of a stream."""
        order = {"seed": self.arguments.seed, "pad_token_id": self.pad_token_id}
        if self.stream is not None:
            return stream_steps(self.stream, self.share, position, gather=gather, **order)
        order |= {"num_workers": self.arguments.dataloader_num_workers}
        return training_steps(self.rows, self.share, position, group_by_length=self.arguments.group_by_length, **order)

    def test_batches(self) -> DataLoader | list[dict[str, torch.Tensor]]:
        """This rank's batches of the held-out rows, as many as on every rank."""
        return evaluation_batches(self.test, self.arguments.per_device_eval_batch_size, self.share, self.pad_token_id)


def prepare_data(arguments: DataOptions, tokenizer: PreTrainedTokenizerBase, rank: int, world_size: int) -> Data:
    """Load and tokenise what the arguments name, for this rank.

    Raises:
        ValueError: data that cannot be loaded, read, masked or learnt from; names file and line.
    """
    name = arguments.dataset_name
    names = [name] if Path(name).exists() else [part.strip() for part in name.split(",")]
    columns = read_columns(arguments.dataset_columns)
    splits = arguments.dataset_train_split, arguments.dataset_test_split
    if arguments.streaming:
        train_set, test_set = (
            Dataset.from_dict(as_columns(list(islice(open_stream(names, split, splits[0]), limit))))
            for split, limit in zip(splits, (FIRST_ROWS, None))
        )
        test_set = test_set if len(test_set) else None
    else:
        weights, percentage = arguments.dataset_weights, arguments.validation_split_percentage
        train_set, test_set = load_rows(
            names, *splits, weights=weights, validation_percentage=percentage, seed=arguments.seed
        )
    missing = missing_columns(train_set, columns)
    if missing and not arguments.streaming:
        raise ValueError(f"--dataset_columns {arguments.dataset_columns}: no row has the column {missing}")
    options = {
        "max_length": arguments.max_length,
        "assistant_only_loss": arguments.assistant_only_loss,
        "completion_only_loss": arguments.completion_only_loss,
        "columns": columns,
        "skip_bad_rows": arguments.skip_bad_rows,
        "allow_lost_rows": arguments.allow_lost_rows,
        "num_proc": arguments.dataset_num_proc,
        "truncation_mode": arguments.truncation_mode,
        "mask_history": arguments.mask_history,
    }
    train, train_line = tokenize_rows(train_set, tokenizer, which="train", **options)
    test, test_line = None, "no test split: no evaluation"
    if test_set is not None:
        test, test_line = tokenize_rows(test_set, tokenizer, which="test", **options)
    elif arguments.load_best_model_at_end:
        raise ValueError("--load_best_model_at_end needs a test split (or --validation_split_percentage).")
    questions = None
    if arguments.predict_with_generate:
        questions = prompts_and_answers(test_set, tokenizer, columns, arguments.skip_bad_rows)
    stream = None
    if arguments.streaming:
        train_line = f"train data: a stream; of its first {len(train_set):,} rows: {train_line}"
        modes = options["max_length"], options["truncation_mode"]
        learns = [options[name] for name in ("assistant_only_loss", "completion_only_loss", "mask_history")]
        settings = {"tokenizer": tokenizer, "columns": columns, "options": (*modes, *learns)}
        stream = Stream(
            partial(unread_stream, names, splits[0], splits[0]),
            partial(tokenize_window, **settings),
            packed_length=arguments.max_length if arguments.packing else 0,
            max_lost=1.0 if arguments.allow_lost_rows else MAX_LOST,
            skips_bad=arguments.skip_bad_rows,
        )
    lines = [train_line, test_line, *source_notes(names, *splits)]
    if missing:
        lines.append(f"note: none of the first {len(train_set):,} rows has the column {missing} of --dataset_columns")
    share = Share.of(arguments, rank, world_size)
    return Data(train, test, lines, arguments, share, tokenizer.pad_token_id, questions, stream)


def missing_columns(rows: Dataset, columns: dict[str, str]) -> str:
    """Names of the mapped columns that none of the rows has; empty if all are there, which the first rows tell."""
    missing = set(columns.values())
    for index, record in enumerate(rows):
        if not missing:
            break
        missing -= row_of(record, index, {})[0].keys()
    return ", ".join(sorted(map(repr, missing)))


def read_columns(given: str | None) -> dict[str, str]:
    """`prompt=question,completion=answer` as {"prompt": "question", "completion": "answer"}."""
    pairs = [[part.strip() for part in pair.split("=")] for pair in given.split(",")] if given else []
    optional = {"input", "system", "history", "tools", "loss_mask", "masked"}
    known = sorted({name for needed in FORMATS.values() for name in needed} | optional)
    if any(len(pair) != 2 or not all(pair) or pair[0] not in known for pair in pairs):
        raise ValueError(
            f"--dataset_columns {given}: expected OURS=THEIRS,..., as in prompt=question,completion=answer, with ours "
            f"one of: {', '.join(known)}"
        )
    return dict(pairs)
