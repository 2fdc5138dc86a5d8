"""The script's arguments: one clear error for everything that cannot be meant, from the command line or a file."""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from launching import RECIPES
from training.arguments import (
    NOW_A_COMMAND,
    SCHEDULES,
    FinetuneArguments,
    MemLimitArguments,
    QuietParser,
    parse_arguments,
    read_arguments_file,
)
from training.optimizer import make_scheduler

NAMED = ["--model_name_or_path", "a_model", "--dataset_name", "some_rows.jsonl"]
SAMPLE = RECIPES / "sample"


def error_of(argv: list[str], sample_dir: Path | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        parse_arguments(argv, sample_dir)
    return str(caught.value)


def write(folder: Path, values: Any, name: str = "job.yaml") -> str:
    path = folder / name
    path.write_text(json.dumps(values) if name.endswith(".json") else yaml.safe_dump(values))
    return str(path)


# --- the command line


@pytest.mark.parametrize(
    ("misspelt", "closest"),
    [
        ("--learning_rte", "--learning_rate"),
        ("--max_lenght", "--max_length"),
        ("--per_device_batch_size", "--per_device_eval_batch_size"),
        ("--learning_rte=3", "--learning_rate"),
    ],
)
def test_unknown_argument_names_the_closest_known_one(misspelt: str, closest: str) -> None:
    message = error_of([*NAMED, misspelt, "3"])
    assert misspelt in message
    assert f"did you mean {closest}?" in message


@pytest.mark.parametrize(
    ("argument", "key"),
    [("--bf16", "mixed_precision: bf16"), ("--gradient_checkpointing", "fsdp_activation_checkpointing: true")],
)
def test_argument_of_the_trainer_that_belongs_in_the_yaml_names_its_key(argument: str, key: str) -> None:
    assert f"{argument} (set {key} in the Accelerate YAML)" in error_of([*NAMED, argument])


def test_help_is_printed_by_one_rank(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stopped:
            parse_arguments(["--help"])
        assert stopped.value.code == 0
    assert capsys.readouterr().out.count("usage:") == 1


def test_argument_like_no_other_gets_no_misleading_proposal() -> None:
    message = error_of([*NAMED, "--qqq", "3"])
    assert "--qqq" in message
    assert "did you mean" not in message


def test_every_unknown_argument_is_reported_at_once() -> None:
    message = error_of([*NAMED, "--learning_rte", "3", "--max_lenght", "5"])
    assert "--learning_rte" in message
    assert "--max_lenght" in message


def test_all_problems_are_reported_at_once() -> None:
    wrong = {
        "--max_length": "1",
        "--per_device_train_batch_size": "0",
        "--learning_rate": "-1",
        "--max_grad_norm": "0",
        "--lora_dropout": "1.0",
        "--dtype": "bf16",
        "--num_train_epochs": "0",
    }
    message = error_of([word for pair in wrong.items() for word in pair])
    for name in [*wrong, "--model_name_or_path", "--dataset_name"]:
        assert name in message
    assert message.count("\n- ") == len(wrong) + 2, message


LEAST_ALLOWED = {
    "max_length": 2,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "logging_steps": 1,
    "max_new_tokens": 1,
    "lora_r": 1,
    "save_total_limit": 1,
    "eval_steps": 0,
    "save_steps": 0,
    "dataloader_num_workers": 0,
    "warmup_steps": 0,
    "weight_decay": 0,
    "lora_dropout": 0,
}


@pytest.mark.parametrize("name", LEAST_ALLOWED)
def test_smallest_allowed_value_is_taken_and_one_below_it_is_refused(name: str) -> None:
    least = LEAST_ALLOWED[name]
    assert getattr(parse_arguments([*NAMED, f"--{name}", str(least)]), name) == least
    assert f"--{name}: found {least - 1}" in error_of([*NAMED, f"--{name}={least - 1}"])


def test_best_checkpoint_needs_every_checkpoint_evaluated() -> None:
    best = [*NAMED, "--load_best_model_at_end"]
    for steps in ([], ["--save_steps", "10"], ["--save_steps", "10", "--eval_steps", "4"], ["--eval_steps", "4"]):
        assert "--load_best_model_at_end needs each checkpoint evaluated" in error_of([*best, *steps])
    parse_arguments([*best, "--save_steps", "8", "--eval_steps", "4"])
    assert "--on_save_error: found skip, allowed: stop, continue" in error_of([*NAMED, "--on_save_error", "skip"])


@pytest.mark.parametrize("name", ["learning_rate", "max_grad_norm", "fp16_initial_scale"])
def test_zero_is_refused_where_nothing_would_be_learnt(name: str) -> None:
    assert f"--{name}: found 0.0, allowed: above 0" in error_of([*NAMED, f"--{name}", "0"])


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "max_grad_norm", "warmup_steps"])
def test_nan_is_refused(name: str) -> None:
    assert f"--{name}" in error_of([*NAMED, f"--{name}", "nan"])


def test_no_clipping_can_be_asked_for_as_infinity() -> None:
    assert parse_arguments([*NAMED, "--max_grad_norm", "inf"]).max_grad_norm == float("inf")


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        (["--max_length", "long"], "max_length"),
        (["--max_length", "10.5"], "max_length"),
        (["--learning_rate", "high"], "learning_rate"),
        (["--use_peft", "perhaps"], "perhaps"),
        (["--max_length"], "max_length"),
    ],
)
def test_value_of_the_wrong_type_names_the_argument_and_does_not_exit(argv: list[str], fragment: str) -> None:
    message = error_of([*NAMED, *argv])
    assert fragment in message
    assert "--help" in message


@pytest.mark.parametrize("name", ["cosin", "warmup_stable_decay"])  # no schedule; one with arguments of its own
def test_wrong_scheduler_is_refused_with_the_choices(name: str) -> None:
    message = error_of([*NAMED, "--lr_scheduler_type", name])
    assert f"'{name}'" in message and "'cosine'" in message and "'linear'" in message


@pytest.mark.parametrize("name", get_args(SCHEDULES))
def test_schedule_needs_warm_up_and_length_alone(name: str) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler, rates = make_scheduler(optimizer, name, 2, 8), []
    for _ in range(8):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert max(rates) == pytest.approx(0.1) and all(rate >= 0 for rate in rates)


def test_scheduler_is_read_by_name() -> None:
    assert parse_arguments([*NAMED, "--lr_scheduler_type", "cosine"]).lr_scheduler_type == "cosine"


@pytest.mark.parametrize(("text", "value"), [("0.1", 0.1), ("10", 10.0), ("0", 0.0), ("0.03", 0.03)])
def test_warmup_below_one_stays_a_share(text: str, value: float) -> None:
    arguments = parse_arguments([*NAMED, "--warmup_steps", text])
    assert arguments.warmup_steps == value
    assert isinstance(arguments.warmup_steps, float)


def test_help_is_printed_and_exits_without_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    for argument in fields(FinetuneArguments):
        assert f"--{argument.name}" in printed


def test_list_argument_takes_several_words() -> None:
    arguments = parse_arguments([*NAMED, "--lora_target_modules", "q_proj", "v_proj"])
    assert arguments.lora_target_modules == ["q_proj", "v_proj"]
    assert parse_arguments(NAMED).lora_target_modules == ["all-linear"]


# --- a file of arguments


@pytest.mark.parametrize("name", ["job.yaml", "job.yml", "job.json"])
@pytest.mark.parametrize("form", ["positional", "--config", "--config="])
def test_file_is_read_in_every_form(tmp_path: Path, name: str, form: str) -> None:
    values = {"model_name_or_path": "m", "dataset_name": "d", "max_length": 77, "use_peft": True}
    path = write(tmp_path, values, name)
    argv = {"positional": [path], "--config": ["--config", path], "--config=": [f"--config={path}"]}[form]
    arguments = parse_arguments(argv)
    assert {key: getattr(arguments, key) for key in values} == values
    assert arguments.config == path


def test_command_line_overrides_the_file(tmp_path: Path) -> None:
    values = {"model_name_or_path": "m", "dataset_name": "d", "max_length": 77, "use_peft": True, "report_to": ["none"]}
    path = write(tmp_path, values)
    argv = [path, "--max_length", "88", "--dataset_name", "e", "--use_peft", "false", "--report_to", "tensorboard"]
    arguments = parse_arguments(argv)
    assert (arguments.max_length, arguments.dataset_name, arguments.use_peft) == (88, "e", False)
    assert arguments.report_to == ["tensorboard"]
    assert arguments.model_name_or_path == "m"


def test_unquoted_2e_5_in_yaml_is_the_number(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "model_name_or_path: m\ndataset_name: d\nlearning_rate: 2e-5\nadam_epsilon: 1e-9\nwarmup_steps: 0.1\n"
    )
    assert yaml.safe_load(path.read_text())["learning_rate"] == "2e-5"  # text, to YAML 1.1
    arguments = parse_arguments([str(path)])
    assert (arguments.learning_rate, arguments.adam_epsilon) == (2e-5, 1e-9)
    assert arguments.warmup_steps == 0.1


@pytest.mark.parametrize(("written", "value"), [("true", True), ("false", False), ("yes", True), ("no", False)])
def test_boolean_in_a_file_is_read(tmp_path: Path, written: str, value: bool) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"model_name_or_path: m\ndataset_name: d\nuse_peft: {written}\n")
    assert parse_arguments([str(path)]).use_peft is value


@pytest.mark.parametrize(
    ("written", "value"),
    [(["q_proj", "v_proj"], ["q_proj", "v_proj"]), (["q_proj"], ["q_proj"]), ("q_proj", ["q_proj"])],
)
def test_list_in_a_file_is_a_list_even_when_written_as_one_word(tmp_path: Path, written: Any, value: list[str]) -> None:
    path = write(tmp_path, {"model_name_or_path": "m", "dataset_name": "d", "lora_target_modules": written})
    assert parse_arguments([path]).lora_target_modules == value


def test_file_gives_the_same_arguments_as_the_command_line(tmp_path: Path) -> None:
    values = {
        "model_name_or_path": "m",
        "dataset_name": "d",
        "max_steps": 7,
        "num_train_epochs": 2,
        "learning_rate": 0.001,
        "lr_scheduler_type": "cosine",
        "use_peft": True,
        "lora_target_modules": ["q_proj", "v_proj"],
        "save_total_limit": 3,
        "report_to": ["none"],
        "seed": 0,
    }
    words = []
    for name, value in values.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    expected = parse_arguments(words)
    for name in ("job.yaml", "job.json"):
        found = parse_arguments([write(tmp_path, values, name)])
        for argument in fields(FinetuneArguments)[1:]:
            of_file, of_words = getattr(found, argument.name), getattr(expected, argument.name)
            assert (of_file, type(of_file)) == (of_words, type(of_words)), argument.name


def test_unknown_key_in_a_file_names_file_and_closest_known_one(tmp_path: Path) -> None:
    path = write(tmp_path, {"model_name_or_path": "m", "dataset_name": "d", "learning_rte": 1})
    message = error_of([path])
    assert path in message
    assert "learning_rte" in message
    assert "did you mean learning_rate?" in message


def test_every_unknown_key_of_a_file_is_reported_at_once(tmp_path: Path) -> None:
    message = error_of([write(tmp_path, {"learning_rte": 1, "max_lenght": 2})])
    assert "learning_rte" in message
    assert "max_lenght" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr_scheduler_type", "cosin"),
        ("max_length", "long"),
        ("max_length", [1, 2]),
        ("max_length", None),
        ("learning_rate", None),
        ("learning_rate", {"value": 1}),
        ("use_peft", "perhaps"),
        ("max_steps", 10.5),
        ("max_steps", True),
        ("seed", None),
        ("report_to", {"a": 1}),
        ("output_dir", ["a"]),
    ],
)
def test_wrong_value_in_a_file_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    message = error_of([write(tmp_path, {"model_name_or_path": "m", "dataset_name": "d", key: value})])
    assert key in message and str(value) in message


def test_missing_or_unreadable_file_is_named(tmp_path: Path) -> None:
    assert "nowhere.yaml" in error_of(["nowhere.yaml"])
    for name, text in (("broken.yaml", "a: [\n"), ("broken.json", "{"), ("list.yaml", "- a\n"), ("empty.yaml", "")):
        (tmp_path / name).write_text(text)
        assert name in error_of([str(tmp_path / name)])


def test_broken_file_names_the_line(tmp_path: Path) -> None:
    for name, text in (("broken.yaml", "max_length: 5\n seed: [\n"), ("broken.json", '{"max_length": 5,\n]')):
        (tmp_path / name).write_text(text)
        assert "line 2" in error_of([str(tmp_path / name)])


# --- the embedded sample


def test_without_sample_folder_model_and_data_are_required_in_one_error(tmp_path: Path) -> None:
    for sample_dir in (None, tmp_path / "absent"):
        message = error_of([], sample_dir)
        assert "--model_name_or_path is required" in message
        assert "--dataset_name is required" in message


def test_with_the_sample_folder_model_data_and_job_come_from_there() -> None:
    arguments = parse_arguments([], SAMPLE)
    assert Path(arguments.model_name_or_path) == SAMPLE / "model"
    assert Path(arguments.dataset_name) == SAMPLE / "data"
    job = yaml.safe_load((SAMPLE / "arguments.yaml").read_text())
    assert len(job) > 5
    assert {name: getattr(arguments, name) for name in job} == job
    assert (SAMPLE / "model").is_dir()
    assert (SAMPLE / "data").is_dir()


def test_command_line_and_file_override_the_samples_job(tmp_path: Path) -> None:
    path = write(tmp_path, {"max_steps": 3, "seed": 11})
    arguments = parse_arguments([path, "--max_steps", "4"], SAMPLE)
    assert (arguments.max_steps, arguments.seed) == (4, 11)
    assert Path(arguments.dataset_name) == SAMPLE / "data"


@pytest.mark.parametrize("named", ["model_name_or_path", "dataset_name"])
def test_model_or_data_alone_is_not_completed_with_the_sample(tmp_path: Path, named: str) -> None:
    missing = ({"model_name_or_path", "dataset_name"} - {named}).pop()
    for argv in ([f"--{named}", "mine"], [write(tmp_path, {named: "mine"})]):
        message = error_of(argv, SAMPLE)
        assert f"--{missing} is required" in message
        assert f"--{named} is required" not in message


def test_sample_job_does_not_leak_into_a_users_own_run() -> None:
    assert parse_arguments(NAMED, SAMPLE) == parse_arguments(NAMED, None)


def test_sample_job_file_holds_known_names_only() -> None:
    names = {word.removeprefix("--").split("=")[0] for word in read_arguments_file(str(SAMPLE / "arguments.yaml"))}
    assert len(names) > 5
    assert names <= {field.name for field in fields(FinetuneArguments)}


def test_output_dir_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert f"--output_dir {folder}" in error_of([*NAMED, "--output_dir", str(folder)])
    assert parse_arguments([*NAMED, "--output_dir", str(tmp_path / "new" / "folder")], None)


@pytest.mark.parametrize("flag", NOW_A_COMMAND)
def test_flag_that_is_a_command_now_names_one_that_is_there(flag):
    with pytest.raises(ValueError, match=rf"--{flag} \(now a command of its own: ") as refused:
        parse_arguments(["--model_name_or_path", "m", "--dataset_name", "d", f"--{flag}"])
    (command,) = re.findall(r"of its own: (\w+\.py) ", str(refused.value))
    assert (RECIPES / command).is_file()


def test_help_shows_every_argument_in_a_group(capsys):
    QuietParser(MemLimitArguments, prog="finetune_mem_limit.py").print_help()
    shown = capsys.readouterr().out
    titles = ["files", "model", "data", "adapters", "training", "evaluation", "saving", "logging", "this script"]
    places = [shown.index(f"\n{title}:\n") for title in titles]
    assert all(f"--{field.name} " in shown for field in fields(MemLimitArguments))
    assert places[-1] < shown.index("--auto_find_batch_size") and places[2] < shown.index("--packing ") < places[3]
