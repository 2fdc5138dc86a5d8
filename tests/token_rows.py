"""Rows, tokenizers and what is learnt of them, for the tests of rows/."""

import functools
import itertools
from pathlib import Path

import pytest
from datasets import Dataset
from rows.formats import row_of
from rows.sources import load_rows
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from training.losses import IGNORE_INDEX
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

REPO = Path(__file__).parents[1]


SAMPLE_MODEL = REPO / "recipes" / "sample" / "model"


CASES = REPO.parent / "shared" / "cases"


@functools.cache
def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    path = {"sample": SAMPLE_MODEL, "stories260K": CASES / "models" / name}.get(name, CASES / "tokenizers" / name)
    if not path.is_dir():
        pytest.skip(f"{path} is not part of a clone")
    return AutoTokenizer.from_pretrained(path)


def toy_tokenizer(
    chat_template: str | None = None, adds_bos: bool = False, adds_eos: bool = False
) -> PreTrainedTokenizerFast:
    """Letters, `ow` as a merge, and a tokenizer that writes its own begin or end token where asked."""
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz :.", "ow"])}
    core = Tokenizer(models.BPE(vocabulary, [("o", "w")]))
    core.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    core.decoder = decoders.Fuse()
    core.pre_tokenizer = pre_tokenizers.Split(".", "isolated")
    if adds_bos or adds_eos:
        single = " ".join(["<s>"] * adds_bos + ["$A"] + ["</s>"] * adds_eos)
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = chat_template
    return tokenizer


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def learnt(ids: list[int], labels: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each unbroken run of labels."""
    assert len(ids) == len(labels)
    assert all(label in (IGNORE_INDEX, token) for token, label in zip(ids, labels)), "labels are ids, unshifted"
    runs = itertools.groupby(labels, key=lambda label: label != IGNORE_INDEX)
    kept = [list(run) for is_learnt, run in runs if is_learnt]
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in kept]


def read(path: Path, train_split: str = "train") -> tuple[list[dict], list[dict] | None]:
    """The rows of a file or folder as they are read, (train, test)."""
    train, test = load_rows([str(path)], train_split, "test")
    return rows_of(train), None if test is None else rows_of(test)


def rows_of(rows: Dataset) -> list[dict]:
    found = [row_of(record, index, {}) for index, record in enumerate(rows)]
    problems = [f"{where}: {problem}" for _, where, problem in found if problem]
    if problems:
        raise ValueError("; ".join(problems))
    return [row for row, _, _ in found]


def write(folder: Path, name: str, data: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path
