"""Whether the scripts still write what they wrote at a commit, to the bit: for changes that must change nothing.

    make same_bits COMMIT=main~3

Trains the sample under each script and its YAML, in one process and in two, saves, evaluates and exports, there and
here, and compares metrics.jsonl without what the clock and the memory decide, wrap_report.json, the checkpoints'
manifests (which hold every file's hash) and the exported files. Processors add in their own order, so both sides run
on this one; the other side's results are kept in outputs/same_bits.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from launching import ROOT, accelerate_launch, content_hash, part_of_sample, small_model
from tqdm import tqdm

SCENARIOS = {"finetune": "default", "finetune_performance": "performance", "finetune_mem_limit": "mem_limit"}
WORDS = "--max_steps 4 --eval_steps 2 --save_steps 2 --logging_steps 1 --report_to none --dataset_name data "
WORDS += "--model_name_or_path model --max_length 128 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 "
WORDS += "--learning_rate 1e-3 --max_new_tokens 8 --predict_with_generate true --output_dir out"
LORA = "--use_peft --lora_dropout 0.1 --packing"  # dropout, and rows of several documents
MEASURED = ("_s", "_gib", "_share", "_per_gpu")  # ends of names whose values differ from run to run


def main() -> None:
    commit = subprocess.check_output(["git", "rev-parse", sys.argv[1]], cwd=ROOT, text=True).strip()
    kept = ROOT / "outputs" / "same_bits" / f"{commit}.json"
    with tempfile.TemporaryDirectory() as folder:
        if not kept.is_file():
            there = Path(folder, "there")
            subprocess.run(["git", "worktree", "add", "--detach", str(there), commit], cwd=ROOT, check=True)
            try:
                found = results(there / "recipes", there / "accelerate_configs", Path(folder, "runs"))
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", str(there)], cwd=ROOT, check=True)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(found, indent=1) + "\n")
        now = results(ROOT / "recipes", ROOT / "accelerate_configs", Path(folder, "now"))
    now, then = json.loads(json.dumps(now)), json.loads(kept.read_text())
    different = [f"{run}: {name}" for run in then for name in then[run] if then[run][name] != now[run].get(name)]
    different += [f"{run}: {name} (new)" for run in now for name in now[run].keys() - then[run].keys()]
    print("\n".join([*different, f"{sum(map(len, then.values()))} files compared, {len(different)} differ"]))
    sys.exit(bool(different))


def results(recipes: Path, configs: Path, folder: Path) -> dict[str, dict[str, object]]:
    """Run -> what it wrote, by file."""
    found = {}
    runs = [(script, ranks, words) for script in SCENARIOS for ranks, words in ((1, LORA), (2, ""))]
    for script, ranks, words in tqdm(runs):
        shutil.rmtree(folder, ignore_errors=True)
        part_of_sample(folder / "data", 12)
        shutil.copytree(small_model(), folder / "model")
        config, flags = configs / f"{SCENARIOS[script]}.yaml", ("--num_processes", ranks)
        line = f"{WORDS} {words}".split()
        done = accelerate_launch(recipes / f"{script}.py", *line, config=config, flags=flags, cwd=folder)
        assert done.returncode == 0, done.stdout
        found[f"{script} on {ranks} {words}".strip()] = written(folder / "out")
    return found


def written(folder: Path) -> dict[str, object]:
    """What a run's folder holds, without what is measured."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, object] = {
        "metrics.jsonl": [{k: v for k, v in row.items() if not k.endswith(MEASURED)} for row in rows],
        "wrap_report.json": json.loads((folder / "wrap_report.json").read_text()),
    }
    for path in sorted(folder.glob("checkpoint-*/manifest.json")):
        manifest = json.loads(path.read_text())
        kept = {name: value for name, value in manifest.items() if name != "arguments"}
        kept["files"] = {name: content_hash(path.parent / name) for name in sorted(manifest["files"])}
        found[f"{path.parent.name}/{path.name}"] = kept
    for file in sorted((folder / "model").iterdir()):
        found[f"model/{file.name}"] = content_hash(file)
        if file.name == "adapter_config.json":  # says where its base lies, and names the layers in any order
            values = json.loads(file.read_text().replace(str(folder.parent), ""))
            found[f"model/{file.name}"] = {**values, "target_modules": sorted(values["target_modules"])}
    assert len(found) > 8 and sum("loss" in row for row in rows) == 4
    return found


if __name__ == "__main__":
    main()
