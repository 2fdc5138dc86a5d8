"""Runs of the three scripts from a copy of recipes/ that has no tools/; what they wrote, as JSON.

python tests/without_tools_worker.py COPY MODEL DATA FOLDER
"""

import json
import shutil
import sys
from pathlib import Path

import launching

SCENARIOS = {"finetune": "default", "finetune_performance": "performance", "finetune_mem_limit": "mem_limit"}


def words_of(model, data, folder):
    words = ["--model_name_or_path", model, "--dataset_name", data, "--output_dir", folder]
    words += ["--max_steps", 4, "--eval_steps", 2, "--save_steps", 2, "--logging_steps", 1, "--report_to", "none"]
    words += ["--max_length", 128, "--predict_with_generate", "--max_new_tokens", 4, "--async_save", "false"]
    words += ["--per_device_train_batch_size", 2]
    return [*words, "--gradient_accumulation_steps", 2, "--learning_rate", 1e-3]


def written(folder):
    """Losses, norms and scores of each step, and the hashes of what was saved and exported."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "grad_norm", "eval_loss", "exact_match_after")
    checkpoint = folder / "checkpoint-4"
    saved = sorted(path for path in checkpoint.rglob("*.safetensors"))
    return {
        "rows": [{name: row[name] for name in names if name in row} for row in rows],
        "checkpoint": {str(path.relative_to(checkpoint)): launching.content_hash(path) for path in saved},
        "model": {path.name: launching.content_hash(path) for path in sorted((folder / "model").iterdir())},
    }


def main():
    copy, model, data, folder = map(Path, sys.argv[1:])
    launching.RECIPES = copy  # before in_process starts its server from there
    from in_process import finetune_in_process

    found = {}
    for script, name in SCENARIOS.items():
        options = {"script": script, "config": launching.in_fp32(name), "reports": True}
        words, log = words_of(model, data, folder / script), folder / f"{script}.log"
        done = finetune_in_process(words, log, **options)
        assert not any(done.codes), done.output[-3000:]
        found[script] = {**written(folder / script), "output": done.output}
        shutil.rmtree(folder / script / "checkpoint-4")
        done = finetune_in_process([*words, "--resume_from_checkpoint", "latest"], log, **options)
        assert not any(done.codes), done.output[-3000:]
        found[script]["resumed"] = written(folder / script)
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
