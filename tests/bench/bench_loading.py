"""What a rank reads of a model's files and holds while it loads: by slices, as the scripts do, beside each rank loading
the whole model and cutting it.

Part of `make bench ARGS=scale`. Of a model whose experts are a tensor each on disk and one tensor in the model, and of
one without experts; 200 MiB each, random, fp32. Memory is what is no file's.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from in_process import Run
from launching import CONFIGS
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

SIZES = {"hidden_size": 1024, "num_hidden_layers": 4, "vocab_size": 4096}
RANKS = (2, 4, 8)


def loading() -> Iterator[str]:
    """A line for each model and number of ranks: the largest of its ranks' figures."""
    yield "loading | of the model's bytes: read of its files, and the rise of private memory; its shard is 1 / ranks"
    with tempfile.TemporaryDirectory() as folder:
        dense, experts = Path(folder, "llama"), Path(folder, "mixtral, 8 experts")
        LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=2816)).save_pretrained(dense)
        config = MixtralConfig(**SIZES, intermediate_size=448, num_local_experts=8, num_key_value_heads=8)
        MixtralForCausalLM(config).save_pretrained(experts)
        for ranks in RANKS:
            for model in (dense, experts):
                found = {}
                for how in ("whole", "slices"):
                    result = Path(folder, "found.json")
                    words = [result, model, *(["--whole"] if how == "whole" else [])]
                    run = Run(
                        words, Path(folder, "log"), ranks, config=CONFIGS / "default.yaml", script="loading_worker"
                    )
                    assert not any(run.wait().codes), run.output
                    found[how] = json.loads(result.read_text())[model.name]
                size = sum(rank["shards"] for rank in found["slices"])
                texts = [
                    f"{how}: {max(rank['read'] for rank in each) / size:.2f} read, "
                    f"{max(rank['rose'] for rank in each) / size:.2f} held"
                    for how, each in found.items()
                ]
                yield f"{model.name:>20}, {ranks} ranks | " + " | ".join(texts)


if __name__ == "__main__":
    for line in loading():
        print(line, flush=True)
