"""The recipe itself, launched as a user launches it, on the sample that the repo ships."""

import json
import shutil
import sys

import pytest
import torch
import yaml
from in_process import finetune_in_process
from launching import CONFIGS, RECIPES, accelerate_launch, part_of_sample, run, small_model
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

RECIPE = RECIPES / "finetune.py"
SAMPLE, SMALL_MODEL = RECIPES / "sample", small_model()
SCRIPTS = ("finetune", "finetune_mem_limit", "finetune_performance")


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_of(folder):
    return {row["step"]: row for row in metrics(folder) if "loss" in row}


def successful(done):
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def trained(folder, *arguments, config="default"):
    """The output of a run in forked ranks: the script without the launcher."""
    folder.mkdir(exist_ok=True)
    done = finetune_in_process([*arguments, "--output_dir", folder], folder / "log", config=config)
    assert not any(done.codes), done.output[-4000:]
    return done.output


def last_score(folder):
    (row,) = [row for row in metrics(folder) if "exact_match_after" in row]
    return row["exact_match_before"], row["exact_match_after"]


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    """What `make finetune` launches on this machine, half of its steps."""
    folder = tmp_path_factory.mktemp("default")
    flags = successful(run([sys.executable, str(SAMPLE / "launch_flags.py")])).splitlines()[-1].split()
    short = ["--max_steps", 60, "--eval_steps", 60, "--max_new_tokens", 24]
    output = successful(accelerate_launch(RECIPE, "--output_dir", folder, *short, flags=flags))
    return folder, output


def test_sample_has_held_out_prompts_whose_answers_are_in_no_training_row():
    rows = {}
    for name in ("train", "test"):
        lines = (SAMPLE / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        rows[name] = [json.loads(line)["messages"] for line in lines]
    assert len(rows["test"]) >= 200
    train_answers = {chat[-1]["content"] for chat in rows["train"]}
    assert train_answers.isdisjoint(chat[-1]["content"] for chat in rows["test"])
    train_prompts = {chat[0]["content"] for chat in rows["train"]}
    assert train_prompts.isdisjoint(chat[0]["content"] for chat in rows["test"])


def test_default_run_learns_the_sample_and_shows_it(default_run):
    folder, output = default_run
    before, after = last_score(folder)
    assert before < 0.2 and after > 0.8
    assert output.count("  before ") >= 3 and output.count("  after ") >= 3
    assert "held-out answers:" in output
    assert "micro-batch 8 x accumulation 1 x ranks 2 = global batch 16 rows" in output
    assert "found by accelerate launch --config_file" in output


def test_messages_are_printed_once(default_run):
    lines = [
        line
        for line in default_run[1].splitlines()
        if line.startswith(("FSDP:", "step 5/", "exact match", "train data"))
    ]
    assert len(lines) == len(set(lines)) == 4


def test_exported_model_loads_in_plain_transformers_with_equal_logits(default_run):
    folder, _ = default_run
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.config.dtype == model.dtype == torch.bfloat16 and model.config.architectures == ["LlamaForCausalLM"]
    assert model.config.use_cache
    names = set(load_file(folder / "model" / "model.safetensors"))
    assert names == set(AutoModelForCausalLM.from_pretrained(SAMPLE / "model").state_dict())
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    chat = json.loads((SAMPLE / "data" / "test.jsonl").read_text().splitlines()[0])["messages"]
    prompt = tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.eval().generate(**prompt, do_sample=False, max_new_tokens=40)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer.strip() == chat[-1]["content"]


def test_report_says_what_was_done_and_where_each_value_came_from(default_run):
    report = json.loads((default_run[0] / "wrap_report.json").read_text())
    assert report["num_units"] == 7 and len(report["recomputed_blocks"]) == report["num_blocks"] == 6
    assert sum(unit["parameters"] for unit in report["units"]) == report["parameters"] == 1_435_264
    assert all(unit["is_sharded"] and unit["stored_dtypes"] == ["float32"] for unit in report["units"])
    values = yaml.safe_load((CONFIGS / "default.yaml").read_text())["fsdp_config"]
    for key, value in values.items():
        if key != "fsdp_version":
            assert report["keys"][key] == {"value": value, "origin": "YAML"}, key
    assert report["keys"]["hook_norm_dtype"] == {"value": None, "origin": "default"}


def test_log_line_and_metrics_have_the_agreed_fields(default_run):
    folder, output = default_run
    (line,) = [line for line in output.splitlines() if line.startswith("step 5/")]
    names = [field.split()[0] for field in line.split(" | ")]
    assert names[:6] == ["step", "loss", "lr", "grad_norm", "step_time", "tok/s/gpu"] and len(names) == 7
    row = steps_of(folder)[5]
    assert {"loss", "learning_rate", "grad_norm", "step_time_s", "data_share", "tokens_per_second_per_gpu"} <= set(row)
    assert list(folder.rglob("events.out.tfevents.*"))


def test_learning_rate_depends_on_the_step_alone(default_run):
    """A scheduler inside `prepare` would step once per process and reach zero after half of the run."""
    import math

    rows = steps_of(default_run[0])
    assert set(rows) == set(range(5, 61, 5))
    for step, row in rows.items():
        done = step - 1  # steps before this one
        share = done / 10 if done < 10 else 0.5 * (1 + math.cos(math.pi * (done - 10) / 50))
        assert row["learning_rate"] == pytest.approx(5e-4 * share, rel=1e-6)


@pytest.mark.slow
def test_memory_limit_yaml_learns_the_sample_too(tmp_path):
    sample = ["--config", SAMPLE / "arguments.yaml", "--model_name_or_path", SMALL_MODEL]
    sample += ["--dataset_name", part_of_sample(tmp_path / "data", 32), "--predict_with_generate", "false"]
    trained(tmp_path, *sample, "--eval_steps", 0, "--max_steps", 16, config="mem_limit")
    before, after = [row["eval_loss"] for row in metrics(tmp_path) if "eval_loss" in row]
    assert after < 0.5 * before
    report = json.loads((tmp_path / "wrap_report.json").read_text())
    assert report["num_units"] == 5 and len(report["recomputed_blocks"]) == 3


@pytest.mark.slow
def test_shuffled_answers_are_not_learnt(tmp_path):
    """The score measures what the rows teach: with answers moved to other prompts it stays low in as many steps."""
    rows = [json.loads(line) for line in (SAMPLE / "data" / "train.jsonl").read_text().splitlines()]
    answers = [row["messages"][-1] for row in rows]
    data = tmp_path / "data"
    data.mkdir()
    with open(data / "train.jsonl", "w") as file:
        for row, answer in zip(rows, answers[1:] + answers[:1]):
            file.write(json.dumps({"messages": [row["messages"][0], answer]}) + "\n")
    shutil.copy(part_of_sample(tmp_path / "part", 32) / "test.jsonl", data)
    arguments = ["--config", SAMPLE / "arguments.yaml", "--model_name_or_path", SAMPLE / "model"]
    trained(tmp_path / "out", *arguments, "--dataset_name", data, "--eval_steps", 0, "--max_steps", 60)
    assert last_score(tmp_path / "out")[1] < 0.2


def test_exported_adapter_loads_in_plain_peft(tmp_path):
    arguments = ["--use_peft", "--max_steps", 4, "--eval_steps", 0, "--model_name_or_path", SMALL_MODEL]
    trained(tmp_path, *arguments, "--dataset_name", SAMPLE / "data" / "train.jsonl", "--learning_rate", 1e-3)
    adapter = load_file(tmp_path / "model" / "adapter_model.safetensors")
    assert not any(path.name.startswith("model") for path in (tmp_path / "model").iterdir())
    assert all("lora_" in name and "FSDP" not in name and "_orig_mod" not in name for name in adapter)
    base = AutoModelForCausalLM.from_pretrained(SMALL_MODEL)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        without = base(ids).logits.clone()
        assert not torch.equal(PeftModel.from_pretrained(base, tmp_path / "model").eval()(ids).logits, without)


def test_model_with_its_own_code_is_trained_and_exported_with_it(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "one two", "completion": " three"}\n{"prompt": "a b", "completion": " c"}\n' * 3)
    arguments = ["--model_name_or_path", model_with_its_own_code(tmp_path / "theirs"), "--dataset_name", rows]
    command = [sys.executable, RECIPES / "finetune.py", "--accelerate_config", CONFIGS / "mem_limit.yaml", *arguments]
    command = [*map(str, command), "--max_steps", "2", "--trust_remote_code"]
    assert "1 rank(s) on" in successful(run(command, cwd=tmp_path, HF_HOME=str(tmp_path)))
    exported = tmp_path / "outputs" / "finetune" / "model"
    assert (exported / "model.safetensors").is_file() and (exported / "modeling_theirs.py").is_file()
    assert json.loads((exported / "config.json").read_text())["architectures"] == ["TheirModel"]


def model_with_its_own_code(folder):
    """The sample's weights in a folder whose model class lies beside them, as on the hub."""
    shutil.copytree(SAMPLE / "model", folder)
    lines = ["from transformers import LlamaForCausalLM", "", "class TheirModel(LlamaForCausalLM):", "    pass", ""]
    (folder / "modeling_theirs.py").write_text("\n".join(lines))
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["TheirModel"], "auto_map": {"AutoModelForCausalLM": "modeling_theirs.TheirModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_bad_row_ends_both_ranks_with_one_message_and_a_preview_trains_nothing(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a b", "completion": " c"}\n{"prompt": "a b", "completion": ""}\n')
    arguments = ["--model_name_or_path", SMALL_MODEL, "--dataset_name", rows]
    done = finetune_in_process([*arguments, "--output_dir", tmp_path / "bad"], tmp_path / "log")
    assert done.codes == [1, 1]
    assert done.output.count(f"{rows}, line 2: completion is empty") == 1 and "--skip_bad_rows" in done.output
    shown = trained(tmp_path / "out", *arguments, "--skip_bad_rows", "--preview", 1)
    assert shown.count(">>> c") == 1 and not (tmp_path / "out" / "model").exists()


def test_packed_run_learns_and_its_report_counts_rows(tmp_path):
    sample = ["--config", SAMPLE / "arguments.yaml", "--model_name_or_path", SMALL_MODEL]
    packed = ["--packing", "--max_length", 512, "--per_device_train_batch_size", 1, "--max_steps", 16]
    packed += ["--predict_with_generate", "false", "--eval_steps", 0]
    output = trained(tmp_path, *sample, "--dataset_name", part_of_sample(tmp_path / "data", 32), *packed)
    assert "packing: 3,600 rows into 418 rows" in output
    before, after = [row["eval_loss"] for row in metrics(tmp_path) if "eval_loss" in row]
    assert after < 0.5 * before
