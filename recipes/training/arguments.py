"""The script's arguments, with the names of transformers' TrainingArguments and TRL's SFTConfig."""

import difflib
import importlib.util
import json
import os
import sys
from copy import copy
from dataclasses import Field, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import yaml
from transformers import HfArgumentParser

# Of transformers' schedules those that need warm-up and length alone; the others take arguments of their own.
SCHEDULES = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]
NOW_A_COMMAND = {  # what were flags of the scripts, for one release
    "dry_run": "plan.py with the same arguments",
    "profile_compare": "compare.py --steps N SCRIPT, then the same arguments",
    "replay_batch": "replay.py OUTPUT_DIR/non_finite",
}
IN_THE_YAML = {  # arguments of TrainingArguments whose place here is the Accelerate YAML
    "bf16": "mixed_precision: bf16",
    "fp16": "mixed_precision: fp16",
    "gradient_checkpointing": "fsdp_activation_checkpointing: true",
    "fsdp": "fsdp_config",
    "fsdp_config": "fsdp_config",
}
TRUNCATION_MODES = ("keep_start", "keep_end", "drop", "split")


@dataclass
class FileArguments:
    """files"""

    config: str | None = field(default=None, metadata={"help": "YAML or JSON file of these arguments (as in TRL)."})
    accelerate_config: str | None = field(default=None, metadata={"help": "The Accelerate YAML, under torchrun."})


@dataclass
class ModelArguments:
    """model"""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Local folder or hub name."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the hub."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that the model's repository brings."})
    attn_implementation: str | None = field(default=None, metadata={"help": "sdpa, eager, flash_attention_2, ..."})
    dtype: str = field(default="auto", metadata={"help": "Frozen weights and export; auto: as the YAML, as saved."})


@dataclass
class DataArguments:
    """data"""

    dataset_name: str | None = field(
        default=None, metadata={"help": "File, folder of files or hub name; several with commas between them."}
    )
    dataset_weights: list[float] | None = field(
        default=None, metadata={"help": "How often each data set's rows are seen per epoch; one number each."}
    )
    dataset_columns: str | None = field(
        default=None, metadata={"help": "Columns under other names, as in prompt=question,completion=answer."}
    )
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    validation_split_percentage: float = field(
        default=0.0, metadata={"help": "Share of the training rows held out where there is no test split."}
    )
    streaming: bool = field(default=False, metadata={"help": "Read the rows while training; keeps none on disk."})
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes that tokenise."})
    max_length: int = field(default=1024, metadata={"help": "Tokens per row."})
    truncation_mode: str = field(
        default="keep_start", metadata={"help": "Rows over max_length: keep_start, keep_end, drop or split."}
    )
    packing: bool = field(default=False, metadata={"help": "Several documents per row, each seeing only itself."})
    group_by_length: bool = field(
        default=False, metadata={"help": "Rows of similar length in the same step: less padding, ranks wait less."}
    )
    assistant_only_loss: bool = field(default=True, metadata={"help": "Of a chat, learn the assistant's turns only."})
    completion_only_loss: bool = field(default=True, metadata={"help": "Of a pair, learn the completion only."})
    mask_history: bool = field(default=False, metadata={"help": "Of a chat, learn the last answer only."})
    skip_bad_rows: bool = field(default=False, metadata={"help": "Leave out rows that cannot be read, and list them."})
    allow_lost_rows: bool = field(
        default=False, metadata={"help": "Go on though more than a tenth of the rows lose their answer to max_length."}
    )
    preview: int = field(default=0, metadata={"help": "Print so many rows, what is learnt marked, and exit."})
    dataloader_num_workers: int = 0


@dataclass
class AdapterArguments:
    """adapters"""

    use_peft: bool = field(default=False, metadata={"help": "Train LoRA adapters on a frozen model."})
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["all-linear"], metadata={"help": "Module names, or all-linear (the head excluded)."}
    )


@dataclass
class LoopArguments:
    """training"""

    per_device_train_batch_size: int = field(default=1, metadata={"help": "Rows per process per forward."})
    gradient_accumulation_steps: int = field(default=8, metadata={"help": "Micro-batches per optimizer step."})
    num_train_epochs: float = 3.0
    max_steps: int = field(default=-1, metadata={"help": "Optimizer steps; overrides num_train_epochs if positive."})
    learning_rate: float = 2e-5
    lr_scheduler_type: SCHEDULES = "linear"
    warmup_steps: float = field(default=0.0, metadata={"help": "Optimizer steps; below 1 a share of all steps."})
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    fp16_initial_scale: float = field(default=65536.0, metadata={"help": "Loss scale at the start of an fp16 run."})
    on_non_finite: str = field(
        default="stop", metadata={"help": "stop, or skip a step whose loss or gradient is not finite, on all ranks."}
    )
    seed: int = 42
    hang_timeout: float = field(
        default=500.0, metadata={"help": "Seconds after which ranks that wait for one another end the run (0: never)."}
    )


@dataclass
class EvaluationArguments:
    """evaluation"""

    per_device_eval_batch_size: int = 8
    eval_steps: int = field(default=0, metadata={"help": "Evaluate every so many steps (0: before and after only)."})
    predict_with_generate: bool = field(
        default=False, metadata={"help": "Answer the test prompts before and after training and count exact matches."}
    )
    max_new_tokens: int = field(default=64, metadata={"help": "Longest answer under predict_with_generate."})


@dataclass
class SavingArguments:
    """saving"""

    output_dir: str = "outputs/finetune"
    save_steps: int = field(default=0, metadata={"help": "Checkpoint every so many steps (0: none)."})
    save_total_limit: int | None = field(default=None, metadata={"help": "Checkpoints to keep."})
    load_best_model_at_end: bool = field(
        default=False, metadata={"help": "Keep the checkpoint of the lowest eval_loss and export that one."}
    )
    async_save: bool = field(default=False, metadata={"help": "Train on while a copy of the state is written."})
    on_save_error: str = field(default="stop", metadata={"help": "stop, or continue without that checkpoint."})
    resume_from_checkpoint: str | None = field(default=None, metadata={"help": "A checkpoint folder, or latest."})
    check_hashes: bool = field(default=False, metadata={"help": "Read all files of the checkpoint before loading it."})


@dataclass
class LoggingArguments:
    """logging"""

    logging_steps: int = 10
    report_to: list[str] = field(default_factory=lambda: ["tensorboard"], metadata={"help": "Trackers, or none."})
    profile: int = field(default=0, metadata={"help": "Record so many steps: where their time goes, what to try."})


@dataclass
class FinetuneArguments(  # a dataclass takes the fields of its last base first
    LoggingArguments,
    SavingArguments,
    EvaluationArguments,
    LoopArguments,
    AdapterArguments,
    DataArguments,
    ModelArguments,
    FileArguments,
):
    """Fine-tune a causal language model with FSDP2."""


@dataclass
class PerformanceArguments(FinetuneArguments):
    """Fine-tune a causal language model with FSDP2, for tokens per second."""

    packing: bool = field(default=True, metadata={"help": "Several documents per row, each seeing only itself."})
    async_save: bool = field(default=True, metadata={"help": "Train on while a copy of the state is written."})
    torch_compile: bool = field(default=False, metadata={"help": "Compile each block."})
    use_liger_kernel: bool = field(default=False, metadata={"help": "Liger's kernels (pip install liger-kernel)."})


@dataclass
class MemLimitArguments(FinetuneArguments):
    """Fine-tune a causal language model with FSDP2, where memory is the limit."""

    auto_find_batch_size: bool = field(
        default=False, metadata={"help": "Start with a step's rows as one micro-batch, and halve it until it fits."}
    )
    optim: str = field(
        default="adamw_torch_fused",
        metadata={"help": "adamw_torch_fused, or adamw_torch_8bit: its state in 8 bits (pip install torchao)."},
    )

    def __post_init__(self) -> None:
        sizes = self.per_device_train_batch_size, self.gradient_accumulation_steps
        if self.auto_find_batch_size and min(sizes) >= 1:  # else check_arguments has something to say
            self.per_device_train_batch_size *= self.gradient_accumulation_steps
            self.gradient_accumulation_steps = 1


KINDS = {
    "finetune.py": FinetuneArguments,
    "finetune_performance.py": PerformanceArguments,
    "finetune_mem_limit.py": MemLimitArguments,
}


def parse_arguments(
    argv: list[str] | None = None, sample_dir: Path | None = None, kind: type[FinetuneArguments] = FinetuneArguments
) -> FinetuneArguments:
    """Parse the command line; a file of arguments gives defaults that the command line overrides.

    Where neither a model nor a data set is named and `sample_dir` exists, both and the file come from there.

    Raises:
        ValueError: all problems at once.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and not argv[0].startswith("-") and argv[0].endswith((".yaml", ".yml", ".json")):
        argv = ["--config", *argv]  # as transformers' examples take it
    parser = QuietParser(kind, allow_abbrev=False)
    first = parser.parse(argv)
    from_file = read_arguments_file(first.config, kind) if first.config else []
    named = parser.parse([*from_file, *argv])
    names_nothing = named.model_name_or_path is None and named.dataset_name is None
    if names_nothing and sample_dir is not None and sample_dir.is_dir():
        sample = ["--model_name_or_path", str(sample_dir / "model"), "--dataset_name", str(sample_dir / "data")]
        from_file = [*read_arguments_file(str(sample_dir / "arguments.yaml"), kind), *sample, *from_file]
    arguments = parser.parse([*from_file, *argv])
    problems = check_arguments(arguments)
    if problems:
        raise ValueError("Arguments:\n- " + "\n- ".join(problems))
    return arguments


class QuietParser(HfArgumentParser):
    """Raises what argparse would print on every rank before exiting; --help is printed once."""

    def __init__(self, kind: type[Any], **kwargs: Any) -> None:
        super().__init__(kind, **kwargs)
        self.kind = kind

    def print_help(self, file: TextIO | None = None) -> None:
        """Print on rank 0 alone, the script's arguments by what they are about."""
        if os.environ.get("RANK", "0") != "0":
            return
        if not issubclass(self.kind, FinetuneArguments):
            return super().print_help(file)
        named: dict[str, list[tuple[str, type, Field]]] = {}
        groups = {one.name: group.__doc__ for group in FinetuneArguments.__bases__ for one in fields(group)}
        for one in fields(self.kind):
            named.setdefault(groups.get(one.name, "this script"), []).append((one.name, one.type, copy(one)))
        kinds = [make_dataclass("Group", own, namespace={"_argument_group_name": name}) for name, own in named.items()]
        usage = f"{self.prog} [ARGUMENTS.yaml] [--ARGUMENT VALUE ...]"
        HfArgumentParser(kinds, usage=usage, description=self.kind.__doc__).print_help(file)

    def error(self, message: str) -> None:
        """Raise ValueError with argparse's message."""
        raise ValueError(f"{message}. See --help.")

    def parse(self, argv: list[str]) -> FinetuneArguments:
        """Parse; all unknown arguments are one error that names the closest known ones."""
        arguments, rest = self.parse_args_into_dataclasses(argv, return_remaining_strings=True)
        unknown = [closest(word, "--") for word in rest if word.startswith("-")]
        if unknown or rest:
            self.error("unknown argument " + "; ".join(unknown or rest))
        return arguments


def closest(word: str, prefix: str = "") -> str:
    """An unknown argument with the script that has it, the YAML's key for it, or the closest known one."""
    name = word.split("=")[0].removeprefix(prefix)
    others = [script for script, kind in KINDS.items() if name in {argument.name for argument in fields(kind)}]
    if others:
        return f"{word} (an argument of {others[0]})"
    if name in NOW_A_COMMAND:
        return f"{word} (now a command of its own: {NOW_A_COMMAND[name]})"
    if name in IN_THE_YAML:
        return f"{word} (set {IN_THE_YAML[name]} in the Accelerate YAML)"
    close = difflib.get_close_matches(name, [argument.name for argument in fields(FinetuneArguments)], n=1)
    return word + (f" (did you mean {prefix}{close[0]}?)" if close else "")


def read_arguments_file(path: str, kind: type[FinetuneArguments] = FinetuneArguments) -> list[str]:
    """Read a YAML or JSON file of arguments as command-line words, so that its values pass the same checks.

    Raises:
        ValueError: unknown names, with the closest known ones, or values that no argument takes.
    """
    if not Path(path).is_file():
        raise ValueError(f"--config {path}: no such file.")
    text = Path(path).read_text(encoding="utf-8")
    try:
        values = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not readable: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected `name: value` lines, found {type(values).__name__}.")
    known = {argument.name: argument for argument in fields(kind)}
    unknown = [closest(str(name)) for name in values if name not in known]
    if unknown:
        raise ValueError(f"{path}: unknown argument {'; '.join(unknown)}.")
    words = []
    for name, value in values.items():
        takes_list = "list" in str(known[name].type)
        if value is None or isinstance(value, dict) or (isinstance(value, list) and not takes_list):
            raise ValueError(f"{path}: {name}: found {value!r}, expected a value{' or a list' if takes_list else ''}.")
        words += [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
    return words


def check_arguments(arguments: FinetuneArguments) -> list[str]:
    """Return every problem with these values, each with the rule."""
    problems = []
    for name in ("model_name_or_path", "dataset_name"):
        if getattr(arguments, name) is None:
            problems.append(f"--{name} is required (this folder has no sample/, or the other of the two was given)")
    at_least = {
        "max_length": 2,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "logging_steps": 1,
        "max_new_tokens": 1,
        "dataset_num_proc": 1,
        "lora_r": 1,
        "save_total_limit": 1,
        "warmup_steps": 0,
        "weight_decay": 0,
        "lora_dropout": 0,
        "eval_steps": 0,
        "save_steps": 0,
        "dataloader_num_workers": 0,
        "hang_timeout": 0,
        "profile": 0,
        "preview": 0,
        "validation_split_percentage": 0,
    }
    for name, least in at_least.items():
        value = getattr(arguments, name)
        if value is not None and not value >= least:  # written so that nan is refused too
            problems.append(f"--{name}: found {value}, allowed: {least} or more")
    for name in ("learning_rate", "max_grad_norm", "fp16_initial_scale"):
        if not getattr(arguments, name) > 0:
            problems.append(f"--{name}: found {getattr(arguments, name)}, allowed: above 0")
    if arguments.max_steps <= 0 and arguments.num_train_epochs <= 0:
        problems.append("--max_steps or --num_train_epochs must be above 0")
    problems += check_data_arguments(arguments)
    if arguments.lora_dropout >= 1:
        problems.append(f"--lora_dropout: found {arguments.lora_dropout}, allowed: below 1")
    for name in arguments.report_to:
        if name not in ("none", "all") and importlib.util.find_spec(name) is None:
            problems.append(f"--report_to {name}: not installed (pip install {name}), or use none")
    choices = {"on_save_error": ("stop", "continue"), "on_non_finite": ("stop", "skip")}
    choices |= {"dtype": ("auto", "float32", "bfloat16", "float16"), "truncation_mode": TRUNCATION_MODES}
    for name, allowed in choices.items():
        if getattr(arguments, name) not in allowed:
            problems.append(f"--{name}: found {getattr(arguments, name)}, allowed: {', '.join(allowed)}")
    save_steps, eval_steps = arguments.save_steps, arguments.eval_steps
    if arguments.load_best_model_at_end and (not save_steps or not eval_steps or save_steps % eval_steps):
        problems.append(
            f"--load_best_model_at_end needs each checkpoint evaluated: --save_steps (found {save_steps}) a multiple "
            f"of --eval_steps (found {eval_steps}), both above 0"
        )
    folder = Path(arguments.output_dir)
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        problems.append(f"--output_dir {folder}: {existing} is not a folder that can be written to")
    return problems


def check_data_arguments(arguments: FinetuneArguments) -> list[str]:
    """Return every problem with how data is read, cut and packed."""
    problems = []
    uses_flash = (arguments.attn_implementation or "").startswith("flash")
    if arguments.packing and uses_flash and arguments.per_device_train_batch_size > 1:
        problems.append(
            "--packing with flash attention: it tells documents apart in a batch of one row only; set "
            "--per_device_train_batch_size 1 and raise --max_length instead"
        )
    needs_length = arguments.group_by_length or arguments.dataset_weights or arguments.validation_split_percentage
    if arguments.streaming and (arguments.max_steps <= 0 or needs_length):
        problems.append(
            "--streaming needs --max_steps, and cannot be combined with --group_by_length, --dataset_weights or "
            "--validation_split_percentage: the length of a stream is not known"
        )
    if arguments.packing and arguments.group_by_length:
        problems.append("--group_by_length has nothing to do under --packing; leave one out (--no_packing)")
    if arguments.validation_split_percentage >= 100:
        problems.append(f"--validation_split_percentage: found {arguments.validation_split_percentage}, below 100")
    if any(not weight > 0 for weight in arguments.dataset_weights or ()):
        problems.append(f"--dataset_weights: found {arguments.dataset_weights}, allowed: above 0")
    return problems
