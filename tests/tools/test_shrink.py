"""Tiny models of many families: every kind of layer twice, every rule kept, every parameter trained."""

import copy
from collections import Counter

import pytest
import torch
from tools.proof.shrink import build_tiny_model, shrink_config
from torch import nn
from torch.nn import functional
from transformers import CONFIG_MAPPING, PreTrainedConfig

MOE = {"MixtralSparseMoeBlock", "DeepseekV3MoE", "GptOssMLP", "JambaSparseMoeBlock"}
# What each kind of layer is: entries of these per-layer lists, together.
KIND_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers", "attention_layers", "layers_num_experts")
FAMILIES = (
    "llama",
    "mixtral",
    "gemma2",
    "gemma3n_text",
    "deepseek_v3",
    "gpt_oss",
    "smollm3",
    "jamba",
    "nemotron_h",
    "zamba2",
    "gpt_neo",
    "falcon",
    "bert",
    "mamba2",
)


def kinds(config: PreTrainedConfig) -> list[tuple]:
    """The kind of each layer, as the config says it."""
    lists = [getattr(config, name) for name in KIND_LISTS if getattr(config, name, None)]
    moe_starts = getattr(config, "first_k_dense_replace", 0)
    layers = range(config.num_hidden_layers)
    experts = getattr(config, "num_experts", None)
    return [(i < moe_starts, *(entries[i] == experts or str(entries[i]) for entries in lists)) for i in layers]


def train_step(model: nn.Module) -> float:
    """Loss on random tokens, its gradients left in the model."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(67, 96, (2, 24), generator=generator)  # (B, T)
    logits = model(input_ids=input_ids, use_cache=False).logits  # (B, T, V)
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), input_ids[:, 1:].flatten())
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("model_type", ["gemma3n_text", "jamba"])
def test_all_layers_are_kept_on_demand(model_type):
    given = CONFIG_MAPPING[model_type]()
    tiny = shrink_config(given, keeps_layers=True)
    assert tiny.num_hidden_layers == given.num_hidden_layers > 13
    assert kinds(tiny) == kinds(given) and tiny.hidden_size == 64


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_kind_of_layer_occurs_twice_in_a_small_model(model_type):
    given = CONFIG_MAPPING[model_type]()
    tiny = shrink_config(given)
    counts = Counter(kinds(tiny))
    assert set(counts) == set(kinds(given))
    assert min(counts.values()) >= 2, counts
    assert 4 <= tiny.num_hidden_layers <= 13


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_parameter_gets_a_gradient_from_a_sane_loss(model_type):
    model = build_tiny_model(CONFIG_MAPPING[model_type]())
    assert model.training
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    loss = train_step(model)
    assert 4.4 < loss < 6.0, loss  # ln(128) is 4.85; logits of standard deviation near one add about half
    # a bias on the keys adds the same to all scores of a query, so softmax without rope cancels it: pure rounding
    expected = [name for name, p in model.named_parameters() if p.requires_grad and not name.endswith("key.bias")]
    without = [name for name in expected if (gradient := model.get_parameter(name).grad) is None or not gradient.any()]
    assert not without
    assert all(model.get_parameter(name).grad.isfinite().all() for name in expected)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_given_config_stays_as_it_was(model_type):
    given = CONFIG_MAPPING[model_type]()
    before = copy.deepcopy(given.to_dict())
    shrink_config(given)
    assert given.to_dict() == before


def test_rules_that_are_no_sizes_are_kept():
    sized, compared = {"use_cache", "is_decoder", "layer_types", "rope_parameters"}, Counter()
    for model_type in FAMILIES:
        given, tiny = (
            config.to_dict() for config in (CONFIG_MAPPING[model_type](), shrink_config(CONFIG_MAPPING[model_type]()))
        )
        for name, value in given.items():
            is_size = isinstance(value, (int, list, dict, tuple)) and not isinstance(value, bool)
            if not is_size and name not in sized and "drop" not in name and value is not None:
                assert tiny[name] == value, (model_type, name)
                compared[model_type] += 1
    assert set(compared) == set(FAMILIES) and min(compared.values()) >= 5


def test_windows_caps_ties_and_head_ratios_are_kept():
    gemma = shrink_config(CONFIG_MAPPING["gemma2"](num_attention_heads=8, num_key_value_heads=4))
    assert gemma.sliding_window == 8
    assert gemma.attn_logit_softcapping == 50.0 and gemma.final_logit_softcapping == 30.0
    assert gemma.num_key_value_heads < gemma.num_attention_heads
    assert gemma.tie_word_embeddings
    for tied in (True, False):
        assert shrink_config(CONFIG_MAPPING["llama"](tie_word_embeddings=tied)).tie_word_embeddings is tied
    assert shrink_config(CONFIG_MAPPING["gemma"](num_attention_heads=8, num_key_value_heads=1)).num_key_value_heads == 1
    mha = shrink_config(CONFIG_MAPPING["llama"](num_attention_heads=32, num_key_value_heads=32))
    assert mha.num_key_value_heads == mha.num_attention_heads


def test_a_mixture_of_experts_stays_one():
    deepseek = shrink_config(CONFIG_MAPPING["deepseek_v3"]())
    assert deepseek.n_routed_experts // deepseek.n_group >= 2 and deepseek.topk_group < deepseek.n_group
    assert deepseek.num_experts_per_tok == 2 and deepseek.n_shared_experts == 1
    assert deepseek.qk_head_dim == deepseek.qk_nope_head_dim + deepseek.qk_rope_head_dim
    for model_type in ("mixtral", "deepseek_v3", "gpt_oss", "jamba"):
        model = build_tiny_model(CONFIG_MAPPING[model_type]())
        assert sum(type(module).__name__ in MOE for module in model.modules()) >= 2, model_type


def test_special_tokens_lie_in_the_vocabulary_and_stay_distinct():
    given = CONFIG_MAPPING["llama"](
        bos_token_id=128000, eos_token_id=[128001, 128009], pad_token_id=7, vocab_size=128256
    )
    tiny = shrink_config(given)
    assert tiny.pad_token_id == 7
    ids = [tiny.bos_token_id, *tiny.eos_token_id]
    assert ids == sorted(set(ids)) and ids[0] >= 96 and ids[-1] < tiny.vocab_size


def test_scaled_rope_fits_the_short_position_table():
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "rope_type": "longrope", "rope_theta": 10000.0}
    given = CONFIG_MAPPING["phi3"](
        max_position_embeddings=131072, original_max_position_embeddings=4096, rope_parameters=factors
    )
    assert 4.0 < train_step(build_tiny_model(given)) < 6.0
    assert len(shrink_config(given).rope_parameters["long_factor"]) == 8


def test_weights_depend_on_the_seed_only():
    config = CONFIG_MAPPING["mixtral"]()
    state = torch.random.get_rng_state()
    first, again, other = (build_tiny_model(config, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(state, torch.random.get_rng_state())  # the caller's random state is left alone
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
