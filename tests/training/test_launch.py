"""Every way to start a script ends in real FSDP2 over all processes, or in one clear error on all of them."""

import json
import shutil
import socket
import sys

import pytest
import torch
import yaml
from hooks.yaml_of_run import find_launch
from in_process import Run
from late_ranks import soon, wrong_interface
from launching import CONFIGS, ROOT, accelerate_launch, run, torchrun
from training.roll_call import ranges, tried_by_gloo

WORKER = ROOT / "tests" / "launch_worker.py"
DEFAULT = CONFIGS / "default.yaml"


def found(done):
    assert done.returncode == 0, done.stdout[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND "))


def errors(done):
    """The errors of a launch, whose last line is the first of them once more."""
    assert done.returncode != 0, done.stdout[-3000:]
    lines = done.stdout.splitlines()
    found = [line for line in lines if line.startswith("Error: ")]
    assert lines[-1].startswith(found[0].rstrip().replace("Error: ", "Failed: ", 1)), done.stdout[-3000:]
    return found


def ranks(folder, *arguments, world_size=2, config=DEFAULT):
    """The worker in forked ranks with torchrun's environment: (its errors, all it printed)."""
    done = Run(arguments, folder / "log", world_size=world_size, config=config, script="launch_worker").wait()
    assert all(done.codes), done.output[-3000:]
    return [line for line in done.output.splitlines() if line.startswith("Error: ")], done.output


def changed_yaml(path, **changes):
    values = yaml.safe_load(DEFAULT.read_text())
    fsdp = {key: value for key, value in changes.items() if key.startswith(("fsdp_", "hook_"))}
    values["fsdp_config"].update(fsdp)
    values.update({key: value for key, value in changes.items() if key not in fsdp})
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path


def test_accelerate_runs_fsdp2_on_cpu():
    """Accelerate alone would run each process by itself here: world size 1, no communication, exit status 0."""
    seen = found(accelerate_launch(WORKER))
    assert seen["world_size"] == 2 and seen["is_fsdp2"] and "FSDP" in seen["type"]
    assert seen["gathered"] == [0, 1]
    assert seen["found_by"] == "accelerate launch --config_file" and seen["path"] == str(DEFAULT)
    # weight gradient: mean over ranks of x = (0 + 1) / 2 in 16 places; bias gradient: 1 in 4 places
    assert seen["norm"] == pytest.approx((16 * 0.25 + 4) ** 0.5, rel=1e-6)
    assert "nccl" in seen["backend"] if torch.cuda.is_available() else seen["backend"] == "gloo"
    (first_began, first_ended), (second_began, _) = sorted(seen["turns"])
    assert first_began < first_ended <= second_began  # one rank loads at a time


def test_launcher_flags_override_the_yaml_and_the_report_says_so(tmp_path):
    shutil.copy(DEFAULT, tmp_path / "mine.yaml")  # a relative path is resolved where the launcher was started
    flags = ("--num_processes", 1, "--mixed_precision", "no", "--fsdp_activation_checkpointing", "false")
    seen = found(accelerate_launch(WORKER, flags=flags, config="mine.yaml", cwd=tmp_path))
    assert seen["path"] == str(tmp_path / "mine.yaml")
    assert seen["world_size"] == 1
    assert seen["keys"]["fsdp_activation_checkpointing"] == {"value": False, "origin": "launcher flag"}
    assert seen["keys"]["hook_param_dtype"]["value"] == "fp32"
    assert seen["keys"]["hook_reduce_dtype"] == {"value": "fp32", "origin": "YAML"}


def test_default_file_of_accelerate_is_found(tmp_path):
    (tmp_path / "accelerate").mkdir()
    shutil.copy(DEFAULT, tmp_path / "accelerate" / "default_config.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    seen = found(run([*command, "--num_processes", "1", str(WORKER)], HF_HOME=str(tmp_path)))
    assert seen["found_by"] == "accelerate's default file" and seen["world_size"] == 1


def test_torchrun_and_plain_python_take_the_same_path():
    seen = found(torchrun(WORKER, "--accelerate_config", DEFAULT))
    assert seen["world_size"] == 2 and seen["is_fsdp2"] and seen["found_by"] == "--accelerate_config"
    alone = found(run([sys.executable, str(WORKER), "--accelerate_config", str(DEFAULT)]))
    assert alone["world_size"] == 1 and alone["is_fsdp2"]
    assert {k: v for k, v in alone["keys"].items() if k != "num_processes"} == {
        k: v for k, v in seen["keys"].items() if k != "num_processes"
    }


def test_environment_variable_names_the_yaml_for_torchrun(monkeypatch):
    monkeypatch.setenv("RECIPES_ACCELERATE_CONFIG", str(CONFIGS / "mem_limit.yaml"))
    launch = find_launch(None)
    assert launch.found_by == "RECIPES_ACCELERATE_CONFIG" and launch.path == str(CONFIGS / "mem_limit.yaml")


def test_no_yaml_is_one_error_with_the_right_commands(tmp_path):
    (error,), output = ranks(tmp_path, config=None)
    assert "no Accelerate YAML was found" in error
    assert "accelerate launch --config_file" in output and "torchrun --nproc_per_node" in output


def test_fsdp_flags_without_a_yaml_are_refused(tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", "--use_fsdp"]
    command += ["--fsdp_version", "2", "--num_processes", "1", "--mixed_precision", "no", str(WORKER)]
    (error,) = errors(run(command, HF_HOME=str(tmp_path)))
    assert "FSDP is on, but no Accelerate YAML was found" in error


def test_process_count_other_than_asked_for_is_an_error():
    """`--cpu` starts one process whatever the YAML says; it would train on half of the machine without a word."""
    (error,) = errors(accelerate_launch(WORKER, flags=("--cpu",)))
    assert "asked for 2 processes, but 1 runs" in error and "Leave --cpu out" in error


def test_yaml_problems_are_printed_once_and_all_together(tmp_path):
    config = changed_yaml(
        tmp_path / "bad.yaml", hook_wrap_blocks_per_unit=0, hook_prefetch_unit=2, fsdp_ofload_params=True
    )
    (error,), output = ranks(tmp_path, config=config)
    assert output.count("hook_wrap_blocks_per_unit: found 0") == 1
    assert "did you mean hook_prefetch_units?" in output and "did you mean fsdp_offload_params?" in output
    assert str(config) in error


def test_ranks_with_different_yamls_stop_and_name_the_keys(tmp_path):
    changed_yaml(tmp_path / "0.yaml")
    changed_yaml(tmp_path / "1.yaml", hook_wrap_blocks_per_unit=2)
    _, output = ranks(tmp_path, config=tmp_path / "{rank}.yaml")
    assert output.count("The ranks differ:") == 1 and "): YAML hook_wrap_blocks_per_unit: 2 here, 1 on rank 0" in output


@pytest.mark.parametrize("option", ["--fail", "--break"])
def test_failure_of_one_rank_ends_all_within_seconds_and_is_named(option, tmp_path):
    (error,), output = ranks(tmp_path, option, 1)
    assert error.startswith("Error: rank 1: ")
    assert ("rank 1 found a bad row" if option == "--fail" else "RuntimeError: an unexpected error") in output


@pytest.mark.parametrize(("option", "what"), [("--exit", "SystemExit: 0"), ("--interrupt", "KeyboardInterrupt: ")])
def test_rank_whose_code_exits_ends_all(option, what, tmp_path):
    """Without a launcher, which would end the others: they would wait for a day."""
    (error,), output = ranks(tmp_path, option, 1)
    assert error == f"Error: rank 1: {what}" and "launch_worker.py" in output  # where


def test_ranks_that_all_exit_do_so_with_their_own_status(tmp_path):
    for arguments, script in ((["--exit", "all"], "launch_worker"), (["--help"], "finetune")):
        done = Run(arguments, tmp_path / "log", config=DEFAULT, script=script).wait()
        assert done.codes == [0, 0] and "Error" not in done.output, done.output[-3000:]
    assert done.output.count("--learning_rate") == 1


def test_failure_that_is_told_before_the_others_come_is_told_once(tmp_path):
    """Rank 0 is long in coming, so that rank 1 speaks for itself."""
    (error,), output = ranks(tmp_path, "--fail", 1, "--late", 0)
    assert "rank 1" in error and output.count("found a bad row") == 1


def test_crash_that_nobody_catches_is_the_last_line_of_torchrun_too():
    lines = torchrun(WORKER, "--accelerate_config", DEFAULT, "--crash", 1).stdout.splitlines()
    assert (
        "[rank1]: KeyError: 'nobody expects this'" in lines and lines[-1] == "Failed: KeyError: 'nobody expects this'"
    )


def test_yaml_that_only_one_rank_lacks_is_named_with_the_rank(tmp_path):
    changed_yaml(tmp_path / "0.yaml")
    (error,), _ = ranks(tmp_path, config=tmp_path / "{rank}.yaml")
    assert error.startswith("Error: rank 1: No such file")


@pytest.mark.parametrize("late", [1, 0])
def test_rank_that_starts_late_is_named_by_the_one_that_waits(tmp_path, late):
    """It starts when that was said, and the run goes on."""
    run = Run(
        ["--accelerate_config", DEFAULT],
        tmp_path / "log",
        config=None,
        script="launch_worker",
        before=soon,
        first=[1 - late],
    )
    who = "for 1 of 2 ranks, which have not started: 1" if late else "for rank 0, which does not answer at 127.0.0.1:"
    run.wait_for(f"waits at start {who}")
    run.start(late)
    done = run.wait()
    assert done.codes == [0, 0] and f"note: rank {1 - late} on {socket.gethostname()} waits" in done.output, done.output
    assert '"world_size": 2' in done.output


def test_missing_ranks_are_named_in_short():
    assert ranges([1, 4, 5, 6, 9]) == "1, 4-6, 9" and ranges([0, 1]) == "0-1" and ranges([3]) == "3"


def test_interface_that_gloo_cannot_use_is_named_with_what_to_set(tmp_path):
    done = Run([], tmp_path / "log", config=DEFAULT, script="launch_worker", before=wrong_interface).wait()
    errors = [line for line in done.output.splitlines() if line.startswith("Error: ")]
    assert done.codes == [1, 1] and len(errors) == 2 and "Traceback" not in done.output, done.output
    for rank, error in enumerate(sorted(errors)):
        assert error.startswith(f"Error: rank {rank}: gloo could not connect (")
        assert (
            "GLOO_SOCKET_IFNAME is nowhere0. Set GLOO_SOCKET_IFNAME on every machine" in error and "here: lo" in error
        )


def test_address_of_the_hostname_is_named_where_no_interface_is(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: {socket.gethostname(): "127.0.1.1"}[name])
    assert f"the interface of the hostname, {socket.gethostname()} (127.0.1.1)" in tried_by_gloo()


def test_fp16_is_refused_on_a_cpu_with_the_dtype_to_use(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, where fp16 is allowed")
    config = changed_yaml(tmp_path / "fp16.yaml", mixed_precision="fp16")
    (error,), _ = ranks(tmp_path, world_size=0, config=config)
    assert "fp16 is for GPUs; on a CPU set mixed_precision: bf16" in error


def test_more_processes_than_devices_is_refused_with_the_right_command(monkeypatch):
    from training import launch

    monkeypatch.setattr(launch, "device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    config = type("Config", (), {"num_processes": 4, "path": "x.yaml"})
    with pytest.raises(ValueError, match=r"(?s)4 processes on this machine, but 2 device.*--num_processes 2"):
        launch.check_processes(config)


def test_gpu_without_bf16_is_offered_fp16(monkeypatch):
    from hooks import dtypes

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    config = type("Config", (), {"hook_param_dtype": "bf16", "path": "x.yaml"})
    with pytest.raises(ValueError, match="Tesla V100 has no bf16; set mixed_precision: fp16"):
        dtypes.check_device_dtype(config, torch.device("cuda"))
