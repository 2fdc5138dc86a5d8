"""The work that bench.py's loops do: one model, its rows, and how they are shared among processes."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))

import torch
from rows.batches import RankSteps, Share, collate
from rows.packing import collate_packed
from transformers import LlamaConfig, LlamaForCausalLM

LENGTHS = (8, 7, 5, 4)  # eighths of a full row; four rows in a row are always these, so every rank has as many labels
DOCUMENTS = ((5, 3), (4, 2, 2), (7, 1), (3, 3, 2))  # the same for packed rows: the documents of each
STEPS, SEED, LEARNING_RATE, IGNORE = 64, 0, 1e-3, -100
# A vocabulary of 32 times the hidden size, as in Llama 3 8B.
SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 8192}


@dataclass(frozen=True)
class Loop:
    """One contender. `keys` replace keys of the YAML's fsdp_config; `rows` are padded or packed."""

    runs: str  # bare, accelerate, trainer, sft_trainer, or the name of a recipe
    rows: str = "padded"
    processes: int = 1
    config: str = "default"
    keys: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=lambda: dict(SIZES))
    rows_per_step: int = 8
    accumulation: int = 1
    length: int = 256
    is_sharded: bool = False  # `fully_shard` on one process too: what FSDP2 costs by itself; of the bare loop only
    dtype: str = "fp32"  # what parameters are gathered and computed in; of a recipe's loop only
    compiles_blocks: bool = False  # of finetune_performance.py only

    @property
    def micro_batch_size(self) -> int:
        """Rows per process per forward."""
        return self.rows_per_step // self.processes // self.accumulation


def make_model(loop: Loop) -> LlamaForCausalLM:
    """The same weights for everyone."""
    torch.manual_seed(SEED)
    heads = loop.sizes["hidden_size"] // 64
    config = LlamaConfig(**loop.sizes, num_attention_heads=heads, num_key_value_heads=heads, pad_token_id=0)
    config.use_cache = False
    return LlamaForCausalLM(config).train()


def make_rows(loop: Loop) -> list[dict[str, list[int]]]:
    """Rows in the order in which they are trained; all tokens but a document's first are labels."""
    generator = torch.Generator().manual_seed(SEED)
    rows = []
    for index in range(STEPS * loop.rows_per_step):
        documents = DOCUMENTS[index % 4] if loop.rows == "packed" else (LENGTHS[index % 4],)
        row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
        for eighths in documents:
            size = eighths * loop.length // 8
            ids = torch.randint(1, loop.sizes["vocab_size"], (size,), generator=generator).tolist()
            row["input_ids"] += ids
            row["labels"] += [IGNORE, *ids[1:]]
            row["position_ids"] += range(size)
        if loop.rows == "padded":
            del row["position_ids"]
        rows.append(row)
    return rows


def my_batches(loop: Loop, rank: int) -> Iterator[list[dict[str, torch.Tensor]]]:
    """This rank's micro-batches of each step, collated as the recipes do."""
    rows = make_rows(loop)
    make_batch = partial(collate_packed if loop.rows == "packed" else collate, pad_token_id=0)
    share = Share(loop.micro_batch_size, loop.accumulation, rank, loop.processes)
    for step in RankSteps(range(len(rows)), share):
        yield [make_batch([rows[index] for index in micro_batch]) for micro_batch in step]
