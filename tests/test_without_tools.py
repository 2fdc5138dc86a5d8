"""rm -r recipes/tools: the scripts train, evaluate, save, resume, export to the same bits, and say what is missing."""

import json
import shutil
import sys

import pytest
from in_process import finetune_in_process
from launching import RECIPES, ROOT, in_fp32, part_of_sample, run, small_model
from without_tools_worker import SCENARIOS, words_of, written


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return part_of_sample(tmp_path_factory.mktemp("data") / "data", 6)


@pytest.fixture(scope="module")
def without(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("without")
    shutil.copytree(RECIPES, folder / "recipes", ignore=shutil.ignore_patterns("tools", "__pycache__"))
    worker, arguments = ROOT / "tests" / "without_tools_worker.py", (folder / "recipes", small_model(), data, folder)
    done = run([sys.executable, str(worker), *map(str, arguments)])
    assert done.returncode == 0, done.stdout[-5000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("script", SCENARIOS)
def test_script_without_tools_gives_the_same_bits_and_resumes_to_them(without, data, tmp_path, script):
    done = finetune_in_process(
        words_of(small_model(), data, tmp_path / "run"),
        tmp_path / "log",
        script=script,
        config=in_fp32(SCENARIOS[script]),
    )
    assert not any(done.codes), done.output[-3000:]
    expected, found = json.loads(json.dumps(written(tmp_path / "run"))), without[script]
    assert len(expected["rows"]) >= 8 and len(expected["checkpoint"]) == 6 and "model.safetensors" in expected["model"]
    for name in ("rows", "checkpoint", "model"):
        assert found[name] == expected[name]
    assert found["resumed"]["checkpoint"] == expected["checkpoint"] and found["resumed"]["model"] == expected["model"]
    assert found["output"].count("without tools/ there is no report of") == 1
    assert found["output"].count("without tools/ there is no check that positions see no later ones") == 1
