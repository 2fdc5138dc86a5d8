"""Tiny random models, made where they are needed."""

from hooks import wrap
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM


def tiny_llama(tied: bool = False, num_hidden_layers: int = 4) -> LlamaForCausalLM:
    """A Llama of about 40 thousand parameters, fp32, from the current random state."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config)


def tiny_mixtral(experts: int, vocab_size: int = 96) -> MixtralForCausalLM:
    """A mixture of two layers, fp32, from the current random state. 3 and 4 ranks divide its widths."""
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": vocab_size}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=experts, initializer_range=0.1))


def count_all_padding() -> None:
    """That of tiny weights too, which is left alone otherwise: they are cut along another dim where it helps."""
    wrap.FEW_ELEMENTS = 0
