"""Start scripts the way a user does, away from this process's environment."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "accelerate_configs"
RECIPES = ROOT / "recipes"
SHARED_CASES = ROOT.parent / "shared" / "cases"


def quarter_of_sample(folder: Path) -> Path:
    """The sample's data with 64 of its 256 test rows: answering them all takes longer than training."""
    folder.mkdir(parents=True)
    for name, rows in (("train", None), ("test", 64)):
        lines = (RECIPES / "sample" / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:rows]), encoding="utf-8")
    return folder


def clean_environment(**variables: str) -> dict[str, str]:
    """This environment without what a launcher would set; offline, one thread per process."""
    names = ("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_", "RECIPES_", "TORCHELASTIC_")
    exact = {"PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(names) and k not in exact}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONFAULTHANDLER": "1", **variables}


def run(command: list[str], cwd: Path = ROOT, timeout_s: int = 240, **variables: str) -> subprocess.CompletedProcess:
    """Run a command; stdout holds both streams."""
    return subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment(**variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )


def accelerate_launch(
    script: Path | str, *arguments: object, config: Path | str = CONFIGS / "default.yaml", flags: tuple = (), **kwargs
) -> subprocess.CompletedProcess:
    """`accelerate launch --config_file CONFIG SCRIPT ARGUMENTS` on a free port."""
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0"]
    command = [*launcher, "--config_file", str(config), *map(str, flags), str(script), *map(str, arguments)]
    return run(command, **kwargs)


def torchrun(script: Path | str, *arguments: object, processes: int = 2, **kwargs) -> subprocess.CompletedProcess:
    """`torchrun --nproc_per_node=N SCRIPT ARGUMENTS` on a free port."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    return run([*command, str(script), *map(str, arguments)], **kwargs)
