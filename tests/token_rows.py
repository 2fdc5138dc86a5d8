"""Rows, tokenizers and what is learnt of them, for the tests of rows/."""

import functools
import itertools
from pathlib import Path

import pytest
from datasets import Dataset
from rows.formats import row_of
from rows.sources import load_rows
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from training.losses import IGNORE_INDEX
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

REPO = Path(__file__).parents[1]


SAMPLE_MODEL = REPO / "recipes" / "sample" / "model"


CASES = REPO.parent / "shared" / "cases"


@functools.cache
def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    """The sample's; a stand-in for a well-known one (`... like`); or the real one, which is not part of a clone."""
    if name in LIKE:
        return LIKE[name]()
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


HEADERS = "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
PROMPT = "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
# As Qwen3's: thoughts are written behind the last question alone, an empty one too; tools, calls and results.
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' and not m.content.startswith('<tool_response>') %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% if tools %}{{ '<|im_start|>system\n<tools>' }}"
    "{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}"
    "{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}"
    "{% set parts = m.content.split('</think>') %}{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{% set thought = m.reasoning_content or (parts[0] | replace('<think>', '') if parts | length > 1 else '') %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{% if m.role == 'tool' %}{{ '<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% else %}{{ parts[-1].lstrip('\n') if m.role == 'assistant' else m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def llama3_like(**roles: str) -> PreTrainedTokenizerBase:
    """The sample's bytes with Llama 3's control tokens, of which the tokenizer writes the first."""
    tokenizer = AutoTokenizer.from_pretrained(SAMPLE_MODEL)
    names = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id")
    tokenizer.add_tokens([AddedToken(f"<|{name}|>", special=True) for name in names])
    for role, token in {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", **roles}.items():
        setattr(tokenizer, role, token)
    begin = [("<|begin_of_text|>", tokenizer.bos_token_id)]
    core = tokenizer.backend_tokenizer
    core.post_processor = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=begin)
    tokenizer.chat_template = HEADERS + "{{ m.content | trim }}<|eot_id|>" + PROMPT
    return tokenizer


def qwen3_like() -> PreTrainedTokenizerBase:
    """The sample's tokenizer, which has no begin token either, and a template that thinks."""
    tokenizer = AutoTokenizer.from_pretrained(SAMPLE_MODEL)
    tokenizer.chat_template = THINKING
    return tokenizer


def llama2_like() -> PreTrainedTokenizerBase:
    """SentencePiece's manner: a blank before every text, blanks inside of tokens, bytes for what is in none."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz:."]
    vocabulary = {token: i for i, token in enumerate([*pieces, "▁a", "ow"])}
    core = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("o", "w")], unk_token="<unk>", byte_fallback=True))
    core.add_special_tokens([AddedToken(token, special=True) for token in pieces[:3]])
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    blanks = decoders.Replace("▁", " ")
    core.decoder = decoders.Sequence([blanks, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>")


LIKE = {"llama3 like": llama3_like, "qwen3 like": qwen3_like, "llama2 like": llama2_like}
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
