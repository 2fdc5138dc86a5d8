"""Tiny random models, made where they are needed."""

from transformers import LlamaConfig, LlamaForCausalLM


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
