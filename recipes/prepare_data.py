"""From the data arguments to token rows: load the sources, tokenise the splits, pick the questions to answer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data import prompts_and_answers, tokenize_rows
from data_sources import load_rows
from datasets import Dataset
from transformers import PreTrainedTokenizerBase


@dataclass
class Data:
    """What a run trains and evaluates on; the lines say what became of the rows."""

    train: Dataset
    test: Dataset | None
    lines: list[str]
    prompts: list[str]
    answers: list[str]
    prompts_hold_begin: bool


def prepare_data(arguments: Any, tokenizer: PreTrainedTokenizerBase) -> Data:
    """Load and tokenise what the arguments name.

    Raises:
        ValueError: data that cannot be loaded, read, masked or learnt from; names file and line.
    """
    name = arguments.dataset_name
    names = [name] if Path(name).exists() else [part.strip() for part in name.split(",")]
    columns = read_columns(arguments.dataset_columns)
    train_set, test_set = load_rows(
        names,
        arguments.dataset_train_split,
        arguments.dataset_test_split,
        arguments.dataset_weights,
        arguments.validation_split_percentage,
        arguments.seed,
    )
    options = {
        "max_length": arguments.max_length,
        "assistant_only_loss": arguments.assistant_only_loss,
        "completion_only_loss": arguments.completion_only_loss,
        "columns": columns,
        "skip_bad_rows": arguments.skip_bad_rows,
        "allow_lost_rows": arguments.allow_lost_rows,
        "num_proc": arguments.dataset_num_proc,
        "truncation_mode": arguments.truncation_mode,
    }
    train, train_line = tokenize_rows(train_set, tokenizer, which="train", **options)
    test, test_line = None, "no test split: no evaluation"
    if test_set is not None:
        test, test_line = tokenize_rows(test_set, tokenizer, which="test", **options)
    questions = [], [], False
    if arguments.predict_with_generate:
        questions = prompts_and_answers(test_set, tokenizer, columns)
    return Data(train, test, [train_line, test_line], *questions)


def read_columns(given: str | None) -> dict[str, str]:
    """`prompt=question,completion=answer` as {"prompt": "question", "completion": "answer"}."""
    pairs = [pair.split("=") for pair in given.split(",")] if given else []
    if any(len(pair) != 2 or not all(part.strip() for part in pair) for pair in pairs):
        raise ValueError(
            f"--dataset_columns {given}: expected OURS=THEIRS,..., as in prompt=question,completion=answer"
        )
    return {ours.strip(): theirs.strip() for ours, theirs in pairs}
