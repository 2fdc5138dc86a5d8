"""How long a user waits for the first step: a recipe, and a minimal script on transformers' Trainer.

Run as a script it is the latter: the sample's chats through the chat template, then Trainer.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from launching import CONFIGS, RECIPES, clean_environment

LAUNCHES = 5
MODEL, ROWS = RECIPES / "sample" / "model", RECIPES / "sample" / "data" / "train.jsonl"
FIRST_STEP = "step 1/1"


def seconds_to_first_step() -> dict[str, list[float]]:
    """Seconds from starting Python until the line of the first step, launches in turn; one process each."""
    found: dict[str, list[float]] = {"finetune.py": [], "Trainer": []}
    for launch in range(1 + LAUNCHES):  # the first of each reads files that the others find in memory
        with tempfile.TemporaryDirectory() as folder:
            options = {"model_name_or_path": MODEL, "dataset_name": ROWS, "output_dir": folder, "report_to": "none"}
            options |= {"max_steps": 1, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
            options |= {"accelerate_config": CONFIGS / "default.yaml", "logging_steps": 1}
            words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
            commands = {"finetune.py": [str(RECIPES / "finetune.py"), *words], "Trainer": [__file__, folder]}
            for name, command in commands.items():
                seconds = seconds_to_line(command)
                if launch:
                    found[name].append(seconds)
    return found


def seconds_to_line(command: list[str]) -> float:
    """Seconds until a script prints FIRST_STEP; then it is left to end.

    Raises:
        RuntimeError: it ended without.
    """
    started, printed = time.perf_counter(), []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([sys.executable, *command], env=clean_environment(OMP_NUM_THREADS="2"), **pipes) as process:
        for line in process.stdout:
            printed.append(line)
            if FIRST_STEP in line:
                seconds = time.perf_counter() - started
                process.stdout.read()
                return seconds
    raise RuntimeError("No first step:\n" + "".join(printed[-30:]))


def main(folder: str) -> None:
    """Train one step with Trainer."""
    from datasets import load_dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class SayFirstStep(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            print(FIRST_STEP, flush=True)

    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def tokenize(row: dict) -> dict:
        ids = tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"]
        return {"input_ids": ids, "labels": ids}

    rows = load_dataset("json", data_files=str(ROWS), split="train", cache_dir=folder)
    rows = rows.map(tokenize, remove_columns=rows.column_names)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    options = {"max_steps": 1, "per_device_train_batch_size": 8, "use_cpu": True, "report_to": "none"}
    options |= {"save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "gradient_checkpointing": True}
    arguments = TrainingArguments(folder, **options)
    collator = DataCollatorForSeq2Seq(tokenizer)
    Trainer(model, arguments, collator, rows, callbacks=[SayFirstStep()]).train()


if __name__ == "__main__":
    main(sys.argv[1])
