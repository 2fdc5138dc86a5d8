"""The loop in recipes/hooks/README.md, with utils.py and hooks/ beside it and nothing else of ours."""

import json
import re
import shutil

import pytest
import torch
from launching import RECIPES, accelerate_launch, in_fp32
from tiny_models import tiny_llama
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

STEPS, ROWS_PER_STEP = 2, 4  # on two ranks two micro-batches each


def loop_of_the_page() -> str:
    """The code as the page has it, so that what is read is what runs."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (RECIPES / "hooks" / "README.md").read_text(), re.M | re.S)
    assert len(blocks) == 1 and len(blocks[0].splitlines()) <= 50
    return blocks[0]


def uneven_rows() -> list[list[dict[str, list[int]]]]:
    """Steps of rows of other lengths, and other shares of them learnt."""
    generator, steps = torch.Generator().manual_seed(0), []
    for step in range(STEPS):
        rows = [torch.randint(0, 96, (8 + 3 * n + step,), generator=generator).tolist() for n in range(ROWS_PER_STEP)]
        steps.append([{"input_ids": ids, "labels": [-100] * (2 * n) + ids[2 * n :]} for n, ids in enumerate(rows)])
    return steps


def one_process(folder) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step of a whole model in fp32: all rows of a step, one after another."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model").train()
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for rows in uneven_rows():
        num_label_tokens = sum(label != -100 for row in rows for label in row["labels"][1:])
        loss_sum = 0.0
        for row in rows:
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
            loss = cross_entropy(model(ids).logits[0, :-1], labels[1:], reduction="sum")
            (loss / num_label_tokens).backward()
            loss_sum += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss_sum / num_label_tokens, norm))
    return found


def test_own_loop_of_utils_and_hooks_alone_equals_one_unsharded_process(tmp_path):
    """Two blocks per unit, every 2nd recomputed, one reduction per step (performance.yaml, in fp32).

    1e-6 relative: the same fp32 numbers are added in another order, a few units in the last place (6e-8 each).
    """
    (tmp_path / "own_loop.py").write_text(loop_of_the_page())
    shutil.copy(RECIPES / "utils.py", tmp_path)
    shutil.copytree(RECIPES / "hooks", tmp_path / "hooks", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(in_fp32("performance"), tmp_path)
    torch.manual_seed(0)
    tiny_llama().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.json").write_text(json.dumps(uneven_rows()))
    names = {"own_loop.py", "utils.py", "hooks", "performance.yaml", "model", "rows.json"}
    assert {path.name for path in tmp_path.iterdir()} == names  # no rows/, training/, saving/, tools/
    done = accelerate_launch("own_loop.py", "model", "rows.json", config="performance.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    printed = re.findall(r"^loss (\S+) \| grad_norm (\S+)$", done.stdout, re.M)
    assert len(printed) == STEPS, done.stdout
    for found, expected in zip(printed, one_process(tmp_path)):
        assert list(map(float, found)) == pytest.approx(expected, rel=1e-6)
