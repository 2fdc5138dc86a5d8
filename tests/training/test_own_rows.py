"""The page training/README.md on rows of one's own: a copy without rows/ and the file from the page train to the bits
of the script with rows/ on the same token rows."""

import json
import re
import shutil
import sys

import pytest
from in_process import finetune_in_process
from launching import RECIPES, accelerate_launch, content_hash, in_fp32, part_of_sample, run, small_model
from rows.prepare import prepare_data
from training.arguments import parse_arguments
from training.model import load_tokenizer

SCRIPTS = ("finetune", "finetune_performance", "finetune_mem_limit")
IMPORTS = "from rows.batches import Step\nfrom rows.prepare import Data, prepare_data\n"
# 30 rows, 8 a step: the last step of an epoch has 6, and rank 1 a filler; so has its second batch of the 12 test rows.
TRAIN_ROWS, TEST_ROWS, STEPS = 30, 12, 8
WORDS = "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --num_train_epochs 2 --learning_rate 1e-3 "
WORDS += (
    "--per_device_eval_batch_size 4 --eval_steps 3 --save_steps 3 --logging_steps 1 --max_length 64 --report_to none"
)


def code_of_the_page() -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", (RECIPES / "training" / "README.md").read_text(), re.M | re.S)
    assert len(blocks) == 1
    return blocks[0]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The scripts without rows/ and tools/, edited as the page says."""
    folder = tmp_path_factory.mktemp("copies") / "copy"
    shutil.copytree(RECIPES, folder, ignore=shutil.ignore_patterns("rows", "tools", "sample", "__pycache__"))
    (folder / "my_rows.py").write_text(code_of_the_page())
    for script in SCRIPTS:
        text = (folder / f"{script}.py").read_text()
        assert text.count(IMPORTS) == 1 and text.count("from rows") == 2
        (folder / f"{script}.py").write_text(text.replace(IMPORTS, "from my_rows import Data, Step, prepare_data\n"))
    return folder


def written(folder):
    """What a run measured, and what it saved of its last step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "label_tokens")
    saved = sorted((folder / f"checkpoint-{STEPS}").rglob("*.safetensors"))
    manifest = json.loads((folder / f"checkpoint-{STEPS}" / "manifest.json").read_text())
    return {
        "rows": [{name: row[name] for name in names if name in row} for row in rows],
        "saved": {str(path.relative_to(folder)): content_hash(path) for path in saved},
        "state": {name: manifest[name] for name in ("step", "epoch", "rows_seen", "tokens_seen", "data")},
        "model": {path.name: content_hash(path) for path in sorted((folder / "model").iterdir())},
    }


@pytest.mark.slow
def test_copy_without_rows_trains_to_the_same_bits_and_resumes_to_them(copy, tmp_path):
    data, words = part_of_sample(tmp_path / "data", TEST_ROWS), [*WORDS.split(), "--model_name_or_path", small_model()]
    train = (data / "train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (data / "train.jsonl").write_text("".join(train[:TRAIN_ROWS]), encoding="utf-8")
    words_with = [*words, "--dataset_name", data, "--output_dir", tmp_path / "with"]
    done = finetune_in_process(words_with, tmp_path / "log")
    assert not any(done.codes), done.output[-3000:]
    expected = written(tmp_path / "with")
    assert len(expected["rows"]) == STEPS + 4 and len(expected["saved"]) == 6

    arguments = parse_arguments([str(word) for word in words_with])
    rows = prepare_data(arguments, load_tokenizer(arguments), 0, 1)
    (tmp_path / "tokens").mkdir()
    for name, split in (("train", rows.train), ("test", rows.test)):
        lines = [json.dumps({"input_ids": row["input_ids"], "labels": row["labels"]}) + "\n" for row in split]
        (tmp_path / "tokens" / f"{name}.jsonl").write_text("".join(lines))
    words_own = [*words, "--dataset_name", tmp_path / "tokens", "--output_dir", tmp_path / "own"]
    own = copy / "finetune.py"
    done = accelerate_launch(own, *words_own, config=in_fp32(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "token rows of my own" in done.stdout and written(tmp_path / "own") == expected

    for step in (6, STEPS):  # back to the middle of the first epoch
        shutil.rmtree(tmp_path / "own" / f"checkpoint-{step}")
    done = accelerate_launch(own, *words_own, "--resume_from_checkpoint", "latest", config=in_fp32(), cwd=tmp_path)
    assert done.returncode == 0 and "checkpoint-3: step 3" in done.stdout, done.stdout[-3000:]
    assert written(tmp_path / "own") == expected


def test_no_script_needs_rows_for_anything_else(copy):
    found = "import sys, finetune, finetune_mem_limit, finetune_performance; print('rows' in sys.modules)"
    done = run([sys.executable, "-c", found], cwd=copy)
    assert done.stdout.splitlines()[-1] == "False", done.stdout
