"""Verify every causal language model that transformers registers under the three YAMLs, in one process pair.

    make sweep                              all of them; goes on where it stopped
    .venv/bin/python tests/sweep.py llama   these, again

Results go to outputs/sweep.jsonl, a line per architecture, and from there into tests/architectures.md.
"""

import gc
import json
import signal
import sys
import time
import traceback
import warnings
from datetime import date
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import finetune
from hooks.config import read_hook_config
from tools.proof.cases import CASES
from tools.proof.cpu_ranks import run_on_cpu_ranks
from tools.proof.proof import exact_config, verify
from tqdm import tqdm
from training.launch import end, make_accelerator
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).parents[1]
RESULTS, TABLE = ROOT / "outputs" / "sweep.jsonl", ROOT / "tests" / "architectures.md"
SCENARIOS = ("default", "performance", "mem_limit")
CPU_LIMIT_S = 600  # of a rank, for one architecture under all YAMLs


def main() -> None:
    names = sys.argv[1:] or [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in read_results()]
    RESULTS.parent.mkdir(exist_ok=True)
    while names:
        first = len(RESULTS.read_text().splitlines()) if RESULTS.exists() else 0
        run_on_cpu_ranks(sweep, names, 2)
        done = read_results(first)
        if not done:
            append({"name": names[0], "error": f"the processes ended without a result (more than {CPU_LIMIT_S} s?)"})
            done = {names[0]: {}}
        names = [name for name in names if name not in done]
    write_table(read_results())


def read_results(first: int = 0) -> dict[str, dict]:
    """Name -> its newest result, of this line and those behind it."""
    lines = RESULTS.read_text().splitlines()[first:] if RESULTS.exists() else []
    return {result["name"]: result for result in map(json.loads, lines)}


def append(result: dict) -> None:
    """Add one line."""
    with open(RESULTS, "a") as file:
        file.write(json.dumps(result) + "\n")


def sweep(names: list[str]) -> None:
    """One rank: every architecture in turn."""
    warnings.filterwarnings("ignore")
    finetune.memory = lambda device: {"live_tensors_gib": 0.0}  # counting live tensors is a tenth of such a run
    gc.freeze()  # the imported libraries are never garbage
    configs = {name: read_hook_config(str(ROOT / "accelerate_configs" / f"{name}.yaml")) for name in SCENARIOS}
    accelerator = make_accelerator(exact_config(configs["default"]))
    for name in tqdm(names, disable=not accelerator.is_main_process, dynamic_ncols=True):
        result = check_one(name, configs, accelerator)
        if accelerator.is_main_process:
            append(result)
        gc.collect()
    end(accelerator)


def check_one(name: str, configs: dict, accelerator: object) -> dict:
    """All checks of one architecture; an exception outside of them is its result."""
    result: dict = {"name": name, "class": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name], "scenarios": {}}
    started = time.monotonic()

    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends this process, and with it the pair; the next takes up the rest
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    try:
        references: dict = {}
        model_config = CONFIG_MAPPING[name]()
        for scenario, config in configs.items():
            checks = []
            for check in verify(model_config, config, accelerator, references=references):
                checks.append(vars(check))
            result["scenarios"][scenario] = checks
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"[:600]
        result["traceback"] = traceback.format_exc().splitlines()[-8:]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def is_passed(result: dict) -> bool:
    """Every proof of every scenario, and a gradient in every tensor; that documents cannot be packed is no failure."""
    checks = [check for scenario in result.get("scenarios", {}).values() for check in scenario]
    needed = [c for c in checks if c.get("is_proof", True) or c["name"] == "gradient in every tensor"]
    return len(result.get("scenarios", {})) == len(SCENARIOS) and all(check["is_passed"] for check in needed)


def write_table(results: dict[str, dict]) -> None:
    """The results for a reader: tests/architectures.md."""
    ordered = [results[name] for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in results]
    passed = [result for result in ordered if is_passed(result)]
    others = [result for result in ordered if not is_passed(result)]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "accelerate", "transformers"))
    lines = [
        "# Which architectures train exactly",
        "",
        f"Written by `make sweep` ({versions}, 2 gloo processes on a CPU, {date.today()}). {len(passed)} of the "
        f"{len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)} causal language models that transformers registers pass every check "
        "of `recipes/verify.py` under all three YAMLs, as tiny models with at least two blocks of each kind. Gradient: "
        "the worst relative error of a tensor in the first step against one unsharded process, in fp32 or the YAML's "
        "dtypes. Weights: the largest absolute difference after a step; each of three starts from equal weights.",
        "",
        "A star marks results from before a case joined the checks; `make sweep ARGS=NAME` brings a name up to date.",
        "",
        "| name | class | gradient | weights | packed documents | units (default, performance, mem_limit) |",
        "|---|---|---|---|---|---|",
    ]
    for result in passed:
        checks = [check for scenario in result["scenarios"].values() for check in scenario]
        worst = {key: max(c["errors"][key] for c in checks if c["errors"]) for key in ("gradient", "weights")}
        details = {check["name"]: check["detail"] for check in checks}
        packed = "isolated" if details["packed documents"] == "isolated" else "leave packing off"
        units = ", ".join(
            next(c["detail"] for c in scenario if c["name"] == "units").split()[0]
            for scenario in result["scenarios"].values()
        )
        errors = f"{worst['gradient']:.0e} | {worst['weights']:.0e}"
        lines.append(f"| {result['name']}{star(result)} | {result['class']} | {errors} | {packed} | {units} |")
    lines += ["", "## Not proved", "", "| name | class | reason |", "|---|---|---|"]
    lines += [f"| {r['name']}{star(r)} | {r['class']} | {reason(r)} |" for r in others]
    TABLE.write_text("\n".join(lines) + "\n")


def star(result: dict) -> str:
    """A mark where a case of today was not run."""
    names = {check["name"] for checks in result.get("scenarios", {}).values() for check in checks}
    needed = {case.name for case in CASES} | {"norms", "kept in fp32", "units at real size"}
    return "" if needed <= names or not names else " *"


def reason(result: dict) -> str:
    """What did not pass, in a line: the library's own exception where there is one."""
    checks = [check for scenario in result.get("scenarios", {}).values() for check in scenario]
    failed = [c for c in checks if not c["is_passed"] and c["name"] != "packed documents"]
    texts = [result["error"]] if "error" in result else []
    texts += [f"{c['name']}: {c['detail']}" for c in failed]
    unique = list(dict.fromkeys(" ".join(text.split()).replace("|", "/")[:220] for text in texts))
    return "; ".join(unique[:2])


if __name__ == "__main__":
    main()
