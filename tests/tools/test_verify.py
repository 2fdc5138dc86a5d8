"""verify.py passes what is exact, catches every classic fault and names it; a dozen architectures are exact."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import yaml
from hooks.config import read_hook_config
from in_process import Run
from launching import CONFIGS, RECIPES, ROOT, Patience, in_fp32, run
from tools.proof import architecture, cpu_ranks, structure_checks
from tools.proof import proof as verify_command
from tools.proof.cases import LORA_CASES, Check
from tools.proof.exactness import Arithmetic, reference_evaluation
from tools.proof.proof_arguments import VerifyArguments, build_case
from tools.proof.proof_report import exit_status, json_report, verdict
from torch import nn
from training.model import add_adapters
from transformers import CONFIG_MAPPING, LlamaConfig
from verify_worker import CASES_OF_MOST, DOZEN, WITH_ALL_CASES

SAMPLE = RECIPES / "sample" / "model"
DTYPES = ("the YAML's dtypes", "dtypes, accumulation 3")
RUNS = ("fp32", "fp32, recompute", "dropout, no recompute", "dropout, recompute", "accumulation 3")


FEW = ("mixtral", "mamba2")  # of the dozen: what other tests look at


def worked(path, *names):
    done = run([sys.executable, str(ROOT / "tests" / "verify_worker.py"), str(path), *names])
    assert done.returncode == 0, done.stdout[-3000:]
    return json.loads(path.read_text())


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    return worked(tmp_path_factory.mktemp("verify") / "results.json", "faults", *FEW)


@pytest.fixture(scope="session")
def others(tmp_path_factory):
    return worked(tmp_path_factory.mktemp("verify") / "others.json", *(name for name in DOZEN if name not in FEW))


def failed(checks):
    return {name: check for name, check in checks.items() if check["is_proof"] and not check["is_passed"]}


@pytest.mark.parametrize("name", FEW)
def test_architecture_trains_exactly(results, name):
    check_architecture(results[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DOZEN.keys() - set(FEW)))
def test_other_architecture_trains_exactly(others, name):
    check_architecture(others[name], name)


def check_architecture(checks, name):
    assert not failed(checks)
    assert set((*RUNS, *DTYPES) if name in WITH_ALL_CASES else CASES_OF_MOST) < set(checks)
    assert checks["gradient in every tensor"]["is_passed"]


def test_balancing_loss_of_experts_is_exact_for_the_same_split(results):
    check = results["mixtral"]["balancing loss"]
    assert check["is_passed"] and check["errors"]["gradient"] <= 1e-6


def test_exact_training_passes_every_check(results):
    checks = results["faults"]["none"]
    assert {*RUNS, *DTYPES, "units", "packed documents"} < set(checks) and not failed(checks)


def test_dropout_state_that_is_dropped_is_caught_where_dropout_meets_recompute(results):
    wrong = failed(results["faults"]["dropout state dropped"])
    assert set(wrong) == {"dropout, recompute", "dropout masks of recompute"}
    assert (
        wrong["dropout, recompute"]["errors"]["loss"] < 1e-6 < 1e-2 < wrong["dropout, recompute"]["errors"]["gradient"]
    )
    assert "gradients differ" in wrong["dropout, recompute"]["detail"]
    assert "another mask" in wrong["dropout masks of recompute"]["detail"]


def test_mean_of_means_is_caught(results):
    wrong = failed(results["faults"]["mean of means"])
    assert "first module whose output differs: none" in wrong["fp32"]["detail"]  # the forward is right
    assert "lm_head.weight" in wrong["fp32"]["detail"]  # and the first gradient of backward is wrong already


def test_loss_in_bf16_is_caught(results):
    wrong = failed(results["faults"]["loss in bf16"])
    assert wrong["fp32"]["errors"]["loss"] > 1e-5


def test_optimizer_on_unsharded_tensors_is_caught_and_named(results):
    wrong = failed(results["faults"]["optimizer on unsharded tensors"])
    assert "is in the optimizer 0 times" in wrong["fp32"]["detail"]


def test_optimizer_state_that_is_not_kept_is_caught_though_every_step_starts_from_equal_weights(results):
    check = failed(results["faults"]["state not kept"])["fp32"]
    assert check["errors"]["later"] < 1e-6 and check["errors"]["weights"] > 5e-5 and "weights differ" in check["detail"]


def test_gradients_that_are_not_zeroed_are_caught_in_the_second_step(results):
    check = failed(results["faults"]["gradients not zeroed"])["fp32"]
    assert check["errors"]["gradient"] < 1e-6 and "step 2 differs: norm by" in check["detail"]


def test_leaking_pack_is_named_with_the_setting_to_use(results):
    assert results["faults"]["none"]["packed documents"]["detail"] == "isolated"
    assert "see each other" in results["faults"]["leaking pack"]["packed documents"]["detail"]
    assert "leave --packing off" in results["faults"]["leaking pack"]["packed documents"]["detail"]
    assert "leave --packing off" in results["mamba2"]["packed documents"]["detail"]


def test_rounding_what_a_block_is_handed_in_fp32_is_caught(results):
    """Beam scales its queries by an fp32 tensor; FSDP2 rounds a unit's inputs unless told not to."""
    assert set(failed(results["faults"]["inputs cast"])) == set(DTYPES)


def test_rounding_a_router_that_the_model_keeps_in_fp32_is_caught(results):
    assert set(failed(results["faults"]["routers rounded"])) == set(DTYPES)


def test_gradients_of_one_ranks_later_micro_batches_that_are_lost_are_caught(results):
    wrong = failed(results["faults"]["later micro-batches of a rank dropped"])
    assert {"accumulation 3", "dtypes, accumulation 3"} <= set(wrong)


def test_missing_clipping_is_caught(results):
    assert set(failed(results["faults"]["not clipped"])) == {"fp32"}


def test_missing_fp32_masters_are_caught(results):
    assert set(failed(results["faults"]["no fp32 masters"])) == set(DTYPES)


def test_weights_that_are_not_a_number_on_one_rank_are_caught_and_named(results):
    check = failed(results["faults"]["NaN on one rank"])["fp32"]
    assert "1 weights differ, such as model.norm.weight" in check["detail"]
    assert check["errors"]["later"] < 1e-5 and check["errors"]["weights"] == float("inf")


def test_wrong_loss_on_one_rank_fails_on_all(results):
    """The results are those of the rank that is right."""
    check = failed(results["faults"]["wrong loss on one rank"])["fp32"]
    assert 0.9 < check["errors"]["loss"] < 1.1
    assert "step 2 differs: loss by 1e+00" in check["detail"]


def test_eval_loss_that_is_not_reduced_is_caught(results):
    check = failed(results["faults"]["evaluation not reduced"])["fp32"]
    assert "eval_loss differs" in check["detail"] and "gradient of" not in check["detail"]


def test_loss_that_is_not_a_number_fails_its_run_and_the_other_checks_go_on(results):
    checks = results["faults"]["NaN loss"]
    assert set(failed(checks)) == {"fp32"} and "units" in checks
    assert "loss is nan" in checks["fp32"]["detail"]


def test_model_that_does_not_run_unsharded_is_not_said_to_train_wrongly(results):
    checks = [Check(**values) for values in results["faults"]["does not run"].values()]
    assert not any(check.can_run for check in checks if check.name in RUNS)
    assert exit_status(checks) == 2
    assert "could not be proved: the tiny model does not run (RuntimeError: needs pictures" in verdict(checks)
    report = json.loads(json_report("m", "y", 2, checks))
    assert not report["is_exact"] and "does not run" in report["error"] and set(RUNS) < set(report["not_proved"])


def test_balancing_loss_that_changes_nothing_fails(results):
    checks = results["faults"]["no balancing"]
    assert checks["balancing loss"]["is_passed"]  # the reference has the same error
    assert "no gradient changes" in failed(checks)["balancing loss acts"]["detail"]


def test_window_that_is_summed_in_bf16_is_held_against_such_a_sum(results):
    check = results["faults"]["deferred in bf16"]["dtypes, accumulation 3"]
    assert check["is_passed"] and check["errors"]["gradient"] <= 1e-6


def test_what_does_not_act_is_said_to_be_unproved(results):
    checks = results["mamba2"]  # its config has no dropout
    assert "not proved" in checks["dropout, recompute acts"]["detail"]
    assert "dropout, recompute acts" not in results["faults"]["none"]


def verify(folder, *arguments):
    """The command's exit status and what it printed; it forks its own ranks."""
    done = Run(arguments, folder / "log", world_size=0, config=None, script="verify").wait()
    return done.codes[0], done.output


@pytest.mark.slow
def test_bf16_sums_over_three_ranks_are_judged_without_their_weights(tmp_path):
    arguments = ("--model_name_or_path", SAMPLE, "--accelerate_config", CONFIGS / "mem_limit.yaml")
    code, output = verify(tmp_path, *arguments, "--num_processes", 3)
    assert code == 0, output[-3000:]
    assert output.count("weights are not proved") == 2


@pytest.mark.slow
def test_command_proves_lora_too_and_json_is_one_object(tmp_path):
    arguments = ("--model_name_or_path", SAMPLE, "--accelerate_config", CONFIGS / "mem_limit.yaml")
    code, output = verify(tmp_path, *arguments, "--use_peft", "--json")
    assert code == 0, output[-3000:]
    report = json.loads(output)
    assert report["not_proved"] == ["needs a GPU"]
    assert report["is_exact"] and all(check["is_passed"] for check in report["checks"])
    assert "LoRA with dropout" in {check["name"] for check in report["checks"]}


@pytest.mark.slow
def test_yaml_in_fp32_is_held_against_references_of_its_own(tmp_path):
    """Its dtypes are those of the plain cases; its weights, rounded as a policy's are, and its clipping are not."""
    arguments = ("--model_name_or_path", SAMPLE, "--accelerate_config", in_fp32(), "--use_peft", "--json")
    code, output = verify(tmp_path, *arguments)
    assert code == 0, output[-3000:]
    checks = {check["name"]: check for check in json.loads(output)["checks"]}
    assert {*RUNS, *DTYPES, *(case.name for case in LORA_CASES)} < set(checks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num_processes", 0), "allowed: 2 or more"),
        (("--bogus", 1), "unknown argument: --bogus"),
        (("--use_peft", "--lora_target_modules", "nope_proj"), "--lora_target_modules nope_proj"),
    ],
)
def test_bad_argument_is_one_error_and_never_a_pass(arguments, message, tmp_path):
    code, output = verify(
        tmp_path, "--model_name_or_path", SAMPLE, "--accelerate_config", CONFIGS / "default.yaml", *arguments
    )
    assert code != 0 and output.count(message) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "no causal language model for ViTConfig"),
        ({"model_type": "bert"}, "is_decoder: true"),
    ],
)
def test_model_that_is_no_causal_language_model_is_refused(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(changes))
    code, output = verify(tmp_path, "--model_name_or_path", tmp_path, "--accelerate_config", CONFIGS / "default.yaml")
    assert code == 1 and message in output


@pytest.mark.slow
def test_size_based_units_are_proved_at_the_scale_of_the_tiny_model(tmp_path):
    values = yaml.safe_load((CONFIGS / "default.yaml").read_text())
    values["fsdp_config"] |= {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 100_000}
    (tmp_path / "size.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    code, output = verify(
        tmp_path, "--model_name_or_path", SAMPLE, "--accelerate_config", tmp_path / "size.yaml", "--num_processes", 3
    )
    assert code == 0, output[-3000:]
    assert "trains exactly" in output and "on 3 ranks" in output


def test_json_is_one_object_for_errors_too(tmp_path):
    yaml_path = str(tmp_path / "no.yaml")
    for arguments, message in ((("--bogus", 1), "unknown argument"), ((), "no.yaml")):
        names = ("--model_name_or_path", SAMPLE, "--accelerate_config", yaml_path, "--json", *arguments)
        done = Run(names, tmp_path / "log", world_size=0, config=None, script="verify").wait()
        lines = [line for line in done.output.splitlines() if line.startswith("{")]
        assert all(done.codes) and len(lines) == 1
        report = json.loads(lines[0])
        assert message in report["error"] and not report["is_exact"]
        assert (report["model"], report["yaml"]) == (str(SAMPLE), yaml_path)


def test_small_vocabulary_is_drawn_from_without_its_special_tokens(tmp_path):
    config = LlamaConfig(vocab_size=60, pad_token_id=59, bos_token_id=1, eos_token_id=[2, 41])
    tokens = architecture.text_tokens(architecture.build_tiny_model(config)).tolist()
    assert tokens == [40, *range(42, 59)]
    architecture.check_architecture(config, packing=True)
    large = architecture.text_tokens(architecture.build_tiny_model(LlamaConfig())).tolist()
    assert large == list(range(67, 96))


def test_model_that_cannot_be_built_small_is_refused_only_under_packing(monkeypatch):
    def unknown(*_, **__):
        raise KeyError("rope_kind")

    monkeypatch.setattr(architecture, "build_tiny_model", unknown)
    architecture.check_architecture(LlamaConfig(), packing=False)
    with pytest.raises(ValueError, match=r"--packing: no tiny model could be built .*rope_kind.*leave --packing off"):
        architecture.check_architecture(LlamaConfig(), packing=True)


def test_hooks_that_take_no_norm_for_one_or_keep_nothing_in_fp32_are_caught(monkeypatch):
    deepseek = architecture.build_tiny_model(CONFIG_MAPPING["deepseek_v3"]())
    assert not any(check.detail for check in structure_checks.structure_checks(deepseek, True))
    monkeypatch.setattr(structure_checks, "is_norm", lambda module: "Layer" in type(module).__name__)
    monkeypatch.setattr(structure_checks, "kept_in_fp32", lambda model: ([], []))
    wrong = {check.name: check for check in structure_checks.structure_checks(deepseek, True) if not check.is_passed}
    assert set(wrong) == {"norms", "kept in fp32"}
    assert "input_layernorm" in wrong["norms"].detail and "mlp.gate.weight" in wrong["kept in fp32"].detail


def lora(**changes):
    return VerifyArguments(str(SAMPLE), "", use_peft=True, **changes)


def test_adapter_of_another_scale_is_caught():
    build = partial(architecture.build_tiny_model, LlamaConfig())
    adapted = build_case(build, LORA_CASES[0], lora(lora_alpha=8, lora_r=4))
    for scale in (2.0, 2.1):
        (check,) = structure_checks.adapter_check(adapted, scale)
        assert check.is_passed == (scale == 2.0)


def test_experts_are_adapted_without_dropout_and_the_error_says_how():
    config = CONFIG_MAPPING["mixtral"]()
    arguments = lora(lora_dropout=0.1)
    build = partial(architecture.build_tiny_model, config)
    try:
        add_adapters(build(), arguments)
    except ValueError as error:
        assert "Use --lora_dropout 0." in str(error)
    else:
        pytest.fail("peft takes this dropout now: the message is needless")
    assert build_case(build, LORA_CASES[0], arguments).peft_config["default"].lora_dropout == 0


def model_checks(config, layers):
    """Checks without training of a Llama with so many layers."""
    model_config = LlamaConfig(num_hidden_layers=layers, hidden_size=256, intermediate_size=512)
    build = verify_command.tiny_builder(model_config, config)
    found = verify_command.model_checks(config, build, None, 1000, *architecture.unsized_model(model_config))
    return build, {check.name: check for check in found}


def test_units_are_planned_for_the_real_size_too():
    config = read_hook_config(str(CONFIGS / "default.yaml"))
    config = dataclasses.replace(config, fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=10**9)
    _, checks = model_checks(config, 4)
    assert checks["units"].is_passed  # at the threshold of a tiny model
    assert not checks["units at real size"].is_passed and "fsdp_min_num_params" in checks["units at real size"].detail


def test_function_of_the_user_meets_the_layers_of_the_real_model(tmp_path):
    (tmp_path / "mine.py").write_text("def tenth(model):\n    return [(['model.layers.9'], True)]\n")
    config = read_hook_config(str(CONFIGS / "default.yaml"))
    config = dataclasses.replace(config, hook_wrap_function=f"{tmp_path}/mine.py:tenth")
    build, checks = model_checks(config, 12)
    assert build().config.num_hidden_layers == 12
    assert checks["units"].is_passed and checks["units at real size"].is_passed
    build, checks = model_checks(config, 60)
    assert build().config.num_hidden_layers == 4
    assert "more than 48 layers" in checks["the user's function"].detail


def skip_a_collective(_):
    """Rank 1 never comes."""
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(10_000)


def test_rank_that_skips_a_collective_ends_the_run(monkeypatch, capfd):
    monkeypatch.setattr(cpu_ranks, "PATIENCE_S", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # which the call sets
    assert cpu_ranks.run_on_cpu_ranks(skip_a_collective, None, 2) == 1
    assert "Timed out waiting 2000ms" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_ranks_end_with_a_parent_that_is_killed(tmp_path):
    code = "import os, sys, time\nfrom tools.proof import cpu_ranks\n"
    code += "def rank(_): open(f'{sys.argv[1]}/{os.getpid()}', 'w'); time.sleep(10_000)\n"
    code += "cpu_ranks.run_on_cpu_ranks(rank, None, 2)"
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=RECIPES)
    patience = Patience(parent.pid)
    while len(list(tmp_path.iterdir())) < 2:
        assert parent.poll() is None and not patience.is_over()
        time.sleep(0.1)
    ranks = [int(path.name) for path in tmp_path.iterdir()]
    parent.kill()
    parent.wait()
    end = time.monotonic() + 60  # for a signal of the kernel's own
    while (left := [rank for rank in ranks if is_running(rank)]) and time.monotonic() < end:
        time.sleep(0.05)
    for rank in left:
        os.kill(rank, signal.SIGKILL)
    assert not left


def is_running(process: int) -> bool:
    """Whether a process is there and no zombie, which waits for a parent."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_quantized_weights_are_refused_with_what_to_use_instead(tmp_path):
    config = json.loads((SAMPLE / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, output = verify(tmp_path, "--model_name_or_path", tmp_path, "--accelerate_config", CONFIGS / "default.yaml")
    assert code == 1
    assert output.count("quantized (bitsandbytes)") == 1 and "unquantized checkpoint" in output


class MultipliesWhatIsNotContiguous(nn.Module):
    """Logits from a transposed input, such as Jamba's mixer hands on."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 128), nn.Linear(128, 64, bias=False)
        self.requires = set()

    def forward(self, input_ids):
        self.requires.add(self.head.weight.requires_grad)
        hidden = self.embed(input_ids).transpose(1, 2).contiguous().transpose(1, 2)
        return SimpleNamespace(logits=self.head(hidden))


def test_reference_evaluates_to_the_bits_of_weights_that_are_parameters_in_bf16():
    # torch multiplies otherwise where the weight requires no gradient: on some CPUs the last bit of 1 in 10 differs.
    torch.manual_seed(0)
    for _ in range(100):
        model, ids = MultipliesWhatIsNotContiguous(), torch.randint(64, (2, 16))
        batches = [{"input_ids": ids, "labels": ids}]
        expected = reference_evaluation(model, batches, Arithmetic(param_dtype=torch.bfloat16))
        assert reference_evaluation(model.bfloat16(), batches, Arithmetic(param_dtype=torch.bfloat16)) == expected
        assert model.requires == {True}
