"""The planner beside numbers that others published for code of their own (a section of bench.py).

torchtitan's Llama differs from transformers' (complex rotary embeddings, repeated keys and values, fp32 logits), its
selective recompute keeps every other matrix product, and its rows of 2024-10-22 and later ran with expandable segments:
the errors say how far a plan carries over to other code, not how right it is for this.
"""

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hooks.config import read_hook_config
from launching import CONFIGS
from tools.planner.planned_step import Request, plan_step
from training.arguments import FinetuneArguments
from transformers import LlamaConfig

GIB = 2**30
LLAMA2_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000}
LLAMA3_8B = {**LLAMA2_7B, "intermediate_size": 14336, "vocab_size": 128256, "num_key_value_heads": 8}
# Name, model, rows, tokens, recompute, published live and reserved GiB (None: not stated)
PUBLISHED = (
    ("torchtitan PR 165: Llama 2 7B, 8 GPUs, full recompute", LLAMA2_7B, 8, 2048, "full", 22.73, 31.02),
    ("torchtitan 2024-12: Llama 3.1 8B, 8 GPUs, selective", LLAMA3_8B, 2, 8192, "selective", None, 82.4),
    ("torchtitan PR 996: Llama 3 8B, 8 GPUs assumed, selective", LLAMA3_8B, 1, 8192, "selective", None, 49.58),
)


def planner() -> Iterator[str]:
    """Predicted and published, and the seconds and memory that planning took."""
    yield f"{'published':58} {'live':>6} {'plan':>6} {'error':>7} {'reserved':>9} {'plan':>6} {'error':>7} {'took':>7}"
    keys = dataclasses.asdict(read_hook_config(str(CONFIGS / "default.yaml")))
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, sizes, rows, tokens, recompute, live, reserved) in enumerate(PUBLISHED):
            path = Path(folder, str(number))
            LlamaConfig(**sizes, num_attention_heads=32, dtype="float32").save_pretrained(path)
            arguments = FinetuneArguments(model_name_or_path=str(path), max_length=tokens)
            arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps = rows, 1
            arguments.per_device_eval_batch_size = 1
            config = {**keys, "hook_checkpoint_mode": recompute}
            found = plan_step(Request("finetune.py", "finetune.py", dataclasses.asdict(arguments), config, 8))
            line = f"{name:58} {beside(live, found.peak)} {beside(reserved, found.reserved, 9)}"
            yield f"{line} {found.seconds:5.1f} s"


def beside(published: float | None, planned: int, width: int = 6) -> str:
    """Published GiB, planned GiB and the error."""
    if published is None:
        return f"{'-':>{width}} {planned / GIB:6.2f} {'-':>7}"
    return f"{published:{width}.2f} {planned / GIB:6.2f} {planned / GIB / published - 1:+7.1%}"
