"""Rows that a model cannot take are refused before the first step; a tokenizer is saved as it was loaded."""

import json

import pytest
from datasets import Dataset
from launching import RECIPES
from tiny_models import tiny_llama
from training.arguments import FinetuneArguments
from training.model import check_rows, load_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel


def rows(*ids):
    return Dataset.from_dict({"input_ids": list(ids)})


def test_token_that_the_embedding_lacks_is_refused_with_both_numbers():
    check_rows(tiny_llama(), rows([1, 95]))
    with pytest.raises(ValueError, match="token 96, but the model's embedding has 96 rows"):
        check_rows(tiny_llama(), rows([1, 95]), rows([96]))


def test_row_beyond_a_learned_position_table_is_refused_and_beyond_rotary_ones_is_not():
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=8))
    check_rows(model, rows([1] * 8))
    with pytest.raises(ValueError, match="9 tokens, but this model has 8 positions: --max_length 8"):
        check_rows(model, rows([1] * 9))
    check_rows(tiny_llama(), rows([1] * 65))


@pytest.mark.parametrize("is_offline", [False, True])
def test_tokenizer_does_not_say_how_it_was_loaded(tmp_path, monkeypatch, is_offline):
    monkeypatch.setattr("transformers.tokenization_utils_base.is_offline_mode", lambda: is_offline)
    model = RECIPES / "sample" / "model"
    load_tokenizer(FinetuneArguments(model_name_or_path=str(model))).save_pretrained(tmp_path)
    expected, saved = (json.loads((path / "tokenizer_config.json").read_text()) for path in (model, tmp_path))
    assert saved == expected
