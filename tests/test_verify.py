"""verify.py passes what is exact, catches every classic fault and names it; a dozen architectures are exact."""

import json
import sys

import pytest
from launching import CONFIGS, RECIPES, ROOT, run
from verify_worker import DOZEN

SAMPLE = RECIPES / "sample" / "model"
RUNS = ("fp32", "fp32, recompute", "dropout, no recompute", "dropout, recompute", "accumulation 3")


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("verify") / "results.json"
    done = run([sys.executable, str(ROOT / "tests" / "verify_worker.py"), str(path)], timeout_s=400)
    assert done.returncode == 0, done.stdout[-3000:]
    return json.loads(path.read_text())


def failed(checks):
    return {name: check for name, check in checks.items() if not check["is_passed"]}


@pytest.mark.parametrize("name", sorted(DOZEN))
def test_architecture_trains_exactly(results, name):
    checks = results["dozen"][name]
    unproved = failed(checks)
    if name == "bert":  # its token types are all zero in text: the other rows of that table are not trained
        unproved.pop("gradient in every tensor", None)
    assert not unproved
    assert set(RUNS) < set(checks)


def test_balancing_loss_of_experts_is_exact_for_the_same_split(results):
    check = results["dozen"]["mixtral"]["balancing loss"]
    assert check["is_passed"] and check["errors"]["gradient"] <= 1e-6


def test_exact_training_passes_every_check(results):
    assert not failed(results["faults"]["none"])


def test_dropout_state_that_is_dropped_is_caught_where_dropout_meets_recompute(results):
    wrong = failed(results["faults"]["dropout state dropped"])
    assert set(wrong) == {"dropout, recompute", "dropout masks of recompute"}
    assert (
        wrong["dropout, recompute"]["errors"]["loss"] < 1e-6 < 1e-2 < wrong["dropout, recompute"]["errors"]["gradient"]
    )
    assert "gradients differ" in wrong["dropout, recompute"]["detail"]
    assert "another mask" in wrong["dropout masks of recompute"]["detail"]


def test_mean_of_means_is_caught_in_every_run(results):
    wrong = failed(results["faults"]["mean of means"])
    assert set(RUNS) < set(wrong)
    assert "first module whose output differs: none" in wrong["fp32"]["detail"]  # the forward is right
    assert "lm_head.weight" in wrong["fp32"]["detail"]  # and the first gradient of backward is wrong already


def test_loss_in_bf16_is_caught_in_every_run(results):
    wrong = failed(results["faults"]["loss in bf16"])
    assert set(RUNS) < set(wrong)
    assert wrong["fp32"]["errors"]["loss"] > 1e-5


def test_optimizer_on_unsharded_tensors_is_caught_and_named(results):
    wrong = failed(results["faults"]["optimizer on unsharded tensors"])
    assert set(RUNS) < set(wrong)
    assert "is in the optimizer 0 times" in wrong["fp32"]["detail"]


def test_leaking_pack_is_named_with_the_setting_to_use(results):
    assert results["faults"]["none"]["packed documents"]["detail"] == "isolated"
    assert "see each other" in results["faults"]["leaking pack"]["packed documents"]["detail"]
    assert "leave --packing off" in results["faults"]["leaking pack"]["packed documents"]["detail"]
    assert "leave --packing off" in results["dozen"]["mamba2"]["packed documents"]["detail"]


def test_rounding_what_a_block_is_handed_in_fp32_is_caught(results):
    """Beam scales its queries by an fp32 tensor; FSDP2 rounds a unit's inputs unless told not to."""
    assert set(failed(results["faults"]["inputs cast"])) == {"the YAML's dtypes"}


def test_rounding_a_router_that_the_model_keeps_in_fp32_is_caught(results):
    assert set(failed(results["faults"]["routers rounded"])) == {"the YAML's dtypes"}


def verify(*arguments):
    return run([sys.executable, str(RECIPES / "verify.py"), *map(str, arguments)])


def test_command_proves_lora_too_and_json_is_one_object():
    arguments = ("--model_name_or_path", SAMPLE, "--accelerate_config", CONFIGS / "mem_limit.yaml")
    done = verify(*arguments, "--use_peft", "--json")
    assert done.returncode == 0, done.stdout[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["is_exact"] and all(check["is_passed"] for check in report["checks"])
    assert "LoRA with dropout" in {check["name"] for check in report["checks"]}


def test_quantized_weights_are_refused_with_what_to_use_instead(tmp_path):
    config = json.loads((SAMPLE / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = verify("--model_name_or_path", tmp_path, "--accelerate_config", CONFIGS / "default.yaml")
    assert done.returncode == 1
    assert done.stdout.count("quantized (bitsandbytes)") == 1 and "unquantized checkpoint" in done.stdout
