"""copy_recipe.py: a copy runs in a project of the same names, loses no edit, and follows the recipes."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from modulefinder import ModuleFinder
from pathlib import Path

import copy_recipe
import pytest
from launching import CONFIGS, RECIPES, accelerate_launch, run, small_model
from training.origin import RECORD, origin_lines

SCRIPT, YAML = "finetune_mem_limit.py", "mem_limit.yaml"
OLD_END, NEW_END = "    sys.exit(STOPPED", "    sys.exit(1 + STOPPED"


@pytest.fixture
def clone(tmp_path):
    """Recipes that a test may edit: an unpacked archive, without git."""
    skip = shutil.ignore_patterns("sample", "__pycache__")
    shutil.copytree(RECIPES, tmp_path / "clone" / "recipes", ignore=skip)
    shutil.copytree(CONFIGS, tmp_path / "clone" / "accelerate_configs")
    return tmp_path / "clone" / "recipes"


@pytest.fixture
def to(clone):
    """A copy of the memory-limit script."""
    to = clone.parents[1] / "copy"
    copied(clone, "finetune_mem_limit", to)
    return to


def command(clone, *arguments, **variables):
    words = [sys.executable, str(clone / "copy_recipe.py"), *map(str, arguments)]
    return run(words, cwd=clone.parents[1], GIT_CONFIG_GLOBAL=os.devnull, **variables)


def copied(clone, *arguments, **variables):
    """The output of a command that succeeds."""
    done = command(clone, *arguments, **variables)
    assert done.returncode == 0, done.stdout
    return done.stdout


def refused(clone, *arguments, **variables):
    """The one line of a command that is refused."""
    done = command(clone, *arguments, **variables)
    assert done.returncode == 1 and done.stdout.startswith("Error: "), done.stdout
    assert done.stdout.count("\n") == 1, done.stdout
    return done.stdout


def content(folder):
    """Every file under a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def own_files(folder):
    """Those of a copy without its record."""
    return {name: text for name, text in content(folder).items() if not name.startswith(".recipe/")}


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new))


def git(folder, *arguments):
    command = ["git", "-c", "user.name=A", "-c", "user.email=a@b.c", "-C", str(folder), *arguments]
    own = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=own)
    return done.stdout.strip()


@pytest.mark.parametrize("scenario", copy_recipe.SCENARIOS)
def test_copy_is_the_script_its_yaml_and_what_python_would_import(scenario, clone, tmp_path):
    for name in ("hooks", "tools"):
        (clone / name / "README.md").write_text("what goes in, what comes out\n")
    output = copied(clone, scenario, tmp_path / "copy")
    finder = ModuleFinder([str(clone)], excludes=["tools"])
    finder.run_script(str(clone / f"{scenario}.py"))
    paths = [module.__file__ for module in finder.modules.values() if module.__file__]
    found = {Path(path).relative_to(clone).as_posix() for path in paths}
    assert len(found) > 40 and {"utils.py", "hooks/__init__.py", "rows/chat.py"} <= found
    yaml = f"{copy_recipe.SCENARIOS[scenario]}.yaml"
    assert set(own_files(tmp_path / "copy")) == found | {
        yaml,
        *(f"{room}/README.md" for room in ("hooks", "rows", "training", "saving")),
    }
    assert (tmp_path / "copy" / yaml).read_bytes() == (CONFIGS / yaml).read_bytes()
    assert f"--config_file {tmp_path}/copy/{yaml} {tmp_path}/copy/{scenario}.py " in output
    assert copied(clone, "--status", tmp_path / "copy").endswith(": no file differs\n")


@pytest.mark.parametrize("more", [(), ("--with", "tools")])
def test_links_of_a_copys_pages_lead_somewhere_in_it(more, clone, tmp_path):
    copied(clone, "finetune", tmp_path / "copy", *more)
    links = [
        page.parent / link
        for page in (tmp_path / "copy").rglob("*.md")
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
        if "://" not in link
    ]
    assert len(links) >= 2 and all(link.exists() for link in links), links


def test_copy_with_tools_has_the_workshop_the_commands_and_what_they_import(clone, to, tmp_path):
    copied(clone, "finetune_mem_limit.py", tmp_path / "all", "--with", "tools", "--yaml", "performance.yaml")
    found = own_files(tmp_path / "all")
    tools = {path.relative_to(clone).as_posix() for path in (clone / "tools").rglob("*.py")}
    assert len(tools) > 30 and tools <= set(found)
    assert {"plan.py", "verify.py", "export.py", "report.py", "finetune.py", "performance.yaml"} <= set(found)
    assert {"copy_recipe.py", "mem_limit.yaml"}.isdisjoint(found)
    (to / "utils.py").write_text("mine = 1\n")
    assert "utils.py: edited here: left as it is" in copied(clone, "--update", to, "--with", "tools")
    assert set(own_files(to)) == set(found) - {"performance.yaml"} | {YAML}
    message = refused(clone, "finetune", to)
    assert f"{SCRIPT} and {YAML} with tools" in message and "another folder" in message


def test_second_copy_changes_nothing_and_over_an_edited_one_names_the_files_and_update(clone, to):
    before = content(to)
    assert "is up to date" in copied(clone, "finetune_mem_limit", to) and content(to) == before
    (to / "utils.py").write_text("mine = 1\n")
    before = content(to)
    message = refused(clone, "finetune_mem_limit", to)
    assert "utils.py (edited here)" in message and f"--update {to}" in message and content(to) == before


def test_files_of_another_are_all_named_and_nothing_is_written(clone, tmp_path):
    """Also one that is empty as ours is: two packages of one name would be one folder."""
    others = ["utils.py", "hooks", "mem_limit.yaml", "rows/__init__.py", "training/deep/mine.txt"]
    for name in [*others, "data/x.py", "models/x.py", "setup.py", "saving/__pycache__/a.pyc"]:
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_text("")
    before = content(tmp_path / "project")
    message = refused(clone, "finetune_mem_limit", tmp_path / "project")
    assert " has its own hooks, mem_limit.yaml, rows/, training/, utils.py; nothing was written: name a new" in message
    assert content(tmp_path / "project") == before
    for name in others:
        (tmp_path / "project" / name).unlink()
    copied(clone, "finetune_mem_limit", tmp_path / "project")


def change_both_sides(clone, to):
    """One file for each way to differ. Returns what status says of each."""
    edit(to / "mem_limit.yaml", "num_processes: 2\n", "num_processes: 4\n")
    edit(to / SCRIPT, "LOSS_CHUNK_TOKENS = 1024", "LOSS_CHUNK_TOKENS = 512")
    edit(clone / SCRIPT, OLD_END, NEW_END)
    edit(clone / "utils.py", "cast_forward_inputs=False", "cast_forward_inputs=True")
    for side in (clone, to):  # the same edit on both sides is no difference
        (side / "hooks" / "keys.py").write_text("same = 1\n")
    for name in ("answers", "evaluation"):
        (to / "training" / f"{name}.py").unlink()
    (clone / "training" / "evaluation.py").write_text("new = 1\n")
    (clone / "training" / "losses.py").write_text("from . import brand_new\nfrom .extra.more import x\n")
    (clone / "training" / "brand_new.py").write_text("")
    (clone / "training" / "extra").mkdir()
    for name in ("__init__", "more"):
        (clone / "training" / "extra" / f"{name}.py").write_text("x = 1\n")
    lines = (clone / SCRIPT).read_text().splitlines(keepends=True)
    unneeded = ("from training.chunked_loss ", "from training.out_of_memory ")
    assert sum(line.startswith(unneeded) for line in lines) == 2
    (clone / SCRIPT).write_text("".join(line for line in lines if not line.startswith(unneeded)))
    (to / "training" / "out_of_memory.py").write_text("mine = 1\n")
    (to / "mine.py").write_text("mine = 1\n")  # a file beside the copy's is not its business
    return {
        YAML: "edited here",
        SCRIPT: "edited here, changed in the recipes",
        "utils.py": "changed in the recipes",
        "training/answers.py": "removed here",
        "training/evaluation.py": "removed here",
        "training/losses.py": "changed in the recipes",
        "training/brand_new.py": "new in the recipes",
        "training/extra/__init__.py": "new in the recipes",
        "training/extra/more.py": "new in the recipes",
        "training/chunked_loss.py": "no longer needed",
        "training/out_of_memory.py": "edited here, no longer needed",
    }


def test_status_names_each_file_that_differs_and_the_side_and_writes_nothing(clone, to):
    expected = change_both_sides(clone, to)
    before = content(to)
    *lines, summary = copied(clone, "--status", to).splitlines()
    assert lines == [f"{name}: {state}" for name, state in sorted(expected.items())]
    assert "2 changed in the recipes" in summary and "2 removed here" in summary and content(to) == before


def test_update_merges_replaces_adds_and_removes_and_keeps_every_edit(clone, to):
    states, kept = change_both_sides(clone, to), content(to)
    output = copied(clone, "--update", to)
    assert sorted(states) == sorted(line.split(": ")[0] for line in output.splitlines()[:-1])
    script = (clone / SCRIPT).read_text().replace("LOSS_CHUNK_TOKENS = 1024", "LOSS_CHUNK_TOKENS = 512")
    assert (to / SCRIPT).read_text() == script and NEW_END in script
    for name in ("utils.py", "training/losses.py", "training/extra/more.py", "training/brand_new.py"):
        assert (to / name).read_bytes() == (clone / name).read_bytes(), name
    for name in (YAML, "training/out_of_memory.py", "mine.py"):
        assert (to / name).read_bytes() == kept[name], name
    for name in ("training/chunked_loss.py", "training/answers.py", "training/evaluation.py"):
        assert not (to / name).exists(), name
    left = copied(clone, "--status", to).splitlines()[:-1]
    expected = {SCRIPT: "edited here", YAML: "edited here"}
    expected |= {f"training/{name}.py": "removed here" for name in ("answers", "evaluation")}
    assert left == [f"{name}: {state}" for name, state in sorted(expected.items())]
    edit(clone / SCRIPT, NEW_END, "    sys.exit(2 + STOPPED")  # a later update starts from the last one
    copied(clone, "--update", to)
    assert (to / SCRIPT).read_text() == script.replace(NEW_END, "    sys.exit(2 + STOPPED")


def test_conflict_is_marked_named_and_to_be_resolved_before_the_next_merge(clone, to):
    edit(to / SCRIPT, "LOSS_CHUNK_TOKENS = 1024", "LOSS_CHUNK_TOKENS = 512")
    edit(clone / SCRIPT, "LOSS_CHUNK_TOKENS = 1024", "LOSS_CHUNK_TOKENS = 2048")
    edit(clone / "utils.py", "cast_forward_inputs=False", "cast_forward_inputs=True")
    done = command(clone, "--update", to)
    assert done.returncode == 1 and f"{SCRIPT}: {copy_recipe.BOTH}: merged with 1 CONFLICT" in done.stdout
    assert "conflicts to resolve: 1" in done.stdout and "cast_forward_inputs=True" in (to / "utils.py").read_text()
    text = (to / SCRIPT).read_text()
    pattern = r"<<<<<<< edited here\n.*= 512.*\n=======\n.*= 2048.*\n>>>>>>> recipes unknown-\w+\n"
    assert len(re.findall(pattern, text)) == 1
    assert f"{SCRIPT}: edited here: left" in copied(clone, "--update", to) and (to / SCRIPT).read_text() == text
    edit(clone / SCRIPT, OLD_END, NEW_END)
    edit(clone / "utils.py", "cast_forward_inputs=True", "cast_forward_inputs=None")
    before = content(to)
    assert f"{to / SCRIPT} has conflict marks" in refused(clone, "--update", to) and content(to) == before
    (to / SCRIPT).write_text(re.sub(pattern, "LOSS_CHUNK_TOKENS = 512\n", text))
    copied(clone, "--update", to)
    assert "LOSS_CHUNK_TOKENS = 512\n" in (to / SCRIPT).read_text() and NEW_END in (to / SCRIPT).read_text()


def test_merge_needs_git_and_the_file_as_copied_and_says_so_and_all_else_needs_neither(clone, to, tmp_path):
    (tmp_path / "empty").mkdir()
    without_git = {"PATH": str(tmp_path / "empty")}
    edit(clone / "utils.py", "cast_forward_inputs=False", "cast_forward_inputs=True")
    edit(to / SCRIPT, "LOSS_CHUNK_TOKENS = 1024", "LOSS_CHUNK_TOKENS = 512")
    copied(clone, "--update", to, **without_git)
    assert "cast_forward_inputs=True" in (to / "utils.py").read_text()
    edit(clone / SCRIPT, OLD_END, NEW_END)
    before = content(to)
    assert "a merge needs the program git" in refused(clone, "--update", to, **without_git)
    digest = json.loads((to / RECORD).read_text())["files"][SCRIPT]
    assert content(to) == before
    (to / ".recipe" / "files" / digest).unlink()
    assert f"restore {to}/.recipe/files/{digest}" in refused(clone, "--update", to)


def test_update_stops_at_a_file_of_yours_where_a_new_one_goes(clone, to):
    (to / "training" / "brand_new.py").write_text("mine = 1\n")
    (clone / "training" / "brand_new.py").write_text("theirs = 1\n")
    (clone / "training" / "losses.py").write_text("from . import brand_new\n")
    before = content(to)
    assert "training/brand_new.py" in refused(clone, "--update", to) and content(to) == before


def test_version_is_the_commit_and_where_none_holds_the_files_says_so(clone, tmp_path):
    def version(of, name):
        copied(of, "finetune", tmp_path / name)
        return json.loads((tmp_path / name / RECORD).read_text())["version"]

    git(tmp_path, "init", "--quiet")  # another repository around an unpacked archive
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "not of the recipes")
    assert re.fullmatch(r"unknown-\w{12}", version(clone, "archive"))
    git(clone.parent, "init", "--quiet")
    git(clone.parent, "add", ".")
    git(clone.parent, "commit", "--quiet", "--message", "one")
    commit = git(clone, "rev-parse", "--short=12", "HEAD")
    (clone / "notes.txt").write_text("not copied, so no matter\n")
    assert version(clone, "clean") == commit
    assert version(clone, "again") == commit
    edit(clone / "utils.py", "cast_forward_inputs=False", "cast_forward_inputs=True")
    assert re.fullmatch(commit + r"-dirty-\w{12}", version(clone, "dirty"))
    assert origin_lines(tmp_path / "clean")[0].startswith(f"copied from fsdp recipes {commit} (20")
    assert f"copied from {commit} (" in copied(clone, "--status", tmp_path / "clean", GIT_DIR=str(tmp_path / ".git"))


def test_update_from_a_clone_without_the_copied_commit_merges_all_the_same(clone, tmp_path):
    """What was copied lies in the copy: neither a shallow clone nor uncommitted changes of then are in the way."""
    git(clone.parent, "init", "--quiet")
    git(clone.parent, "add", ".")
    git(clone.parent, "commit", "--quiet", "--message", "one")
    edit(clone / "utils.py", "cast_forward_inputs=False", "cast_forward_inputs=True")
    copied(clone, "finetune", tmp_path / "copy")
    edit(tmp_path / "copy" / "utils.py", "def clip_grad_norm(", "def mine(")
    edit(clone / "utils.py", "cast_forward_inputs=True", "cast_forward_inputs=None")
    git(clone.parent, "commit", "--quiet", "--all", "--message", "two")
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{clone.parent}", "shallow")
    shallow = tmp_path / "shallow" / "recipes"
    assert git(shallow, "rev-list", "--count", "HEAD") == "1"
    output = copied(shallow, "--update", tmp_path / "copy")
    assert "utils.py: edited here, changed in the recipes: merged\n" in output
    text = (tmp_path / "copy" / "utils.py").read_text()
    assert "def mine(" in text and "cast_forward_inputs=None" in text


@pytest.mark.parametrize("action", ["copy", "update"])
def test_command_killed_anywhere_leaves_whole_files_and_is_made_good_by_itself(
    action, clone, to, tmp_path, monkeypatch
):
    monkeypatch.setattr(copy_recipe, "RECIPES", clone)
    monkeypatch.setattr(copy_recipe, "CONFIGS", clone.parent / "accelerate_configs")
    change_both_sides(clone, to)
    arguments = (SCRIPT, YAML, False) if action == "copy" else (False,)

    def act(folder, killed_at=0):
        """Carry it out; returns how often it renamed or removed a file. Killed before one of these it raises."""
        calls = []

        def counted(own):
            def call(path, *arguments):
                if not path.is_relative_to(folder):  # another thread's
                    return own(path, *arguments)
                calls.append(path)
                if len(calls) == killed_at:
                    raise KeyboardInterrupt
                return own(path, *arguments)

            return call

        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", counted(Path.replace))
            patched.setattr(Path, "unlink", counted(Path.unlink))
            getattr(copy_recipe, action)(folder, *arguments)
        return len(calls)

    def start(name):
        if action == "update":
            shutil.copytree(to, tmp_path / name)
        return tmp_path / name

    whole = start("whole")
    steps = act(whole)
    wanted = content(whole)
    known = {*wanted.values(), *content(start("before")).values()}
    for step in (1, steps // 2, steps - 3, steps - 2, steps - 1, steps):
        folder = start(f"killed-{step}")
        with pytest.raises(KeyboardInterrupt):
            act(folder, killed_at=step)
        left = content(folder)
        left.pop(".recipe/being_written", None)
        assert set(left.values()) <= known, step
        act(folder)
        assert content(folder) == wanted, step


def test_origin_line_is_for_copies_alone_and_a_damaged_record_ends_no_run(tmp_path):
    assert origin_lines(RECIPES) == origin_lines(tmp_path) == []
    (tmp_path / ".recipe").mkdir()
    (tmp_path / RECORD).write_text('{"version": "1a2b3c4", "date": "2026-12-01", "files": {}}')
    assert origin_lines(tmp_path) == ["copied from fsdp recipes 1a2b3c4 (2026-12-01)"]
    for text in ("", "[]", '{"date": 1}'):
        (tmp_path / RECORD).write_text(text)
        assert str(tmp_path / RECORD) in origin_lines(tmp_path)[0]


def test_wrong_commands_are_one_line_that_names_what_is_allowed(clone, to, tmp_path):
    assert "finetune_performance.py" in refused(clone, "finetune_mem", tmp_path / "x")
    assert "performance.yaml" in refused(clone, "finetune", tmp_path / "x", "--yaml", "fast")
    for place in (clone.parent, clone, clone / "tools" / "x"):
        assert "name a folder of your project" in refused(clone, "finetune", place)
    for option in ("--status", "--update"):
        assert "holds no copy" in refused(clone, option, tmp_path)
    (to / "file").write_text("")
    assert str(to / "file") in refused(clone, "finetune", to / "file")
    (tmp_path / "precious").write_text("")
    outside = {"../precious": hashlib.sha256(b"").hexdigest()}
    record = json.loads((to / RECORD).read_text())
    for text in ("{", "[]", json.dumps({**record, "files": []}), json.dumps({**record, "files": outside})):
        (to / RECORD).write_text(text)
        assert f"{to / RECORD} is damaged" in refused(clone, "--update", to)
    assert (tmp_path / "precious").exists()
    (clone / "utils.py").write_text("def\n")
    assert "utils.py, line 1" in refused(clone, "finetune", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    wrong = [[], ["finetune"], ["--status", to, "--update", to], ["finetune", to, "--status", to]]
    wrong += [["--status", to, "--with", "tools"], ["--update", to, "--yaml", "x"], ["finetune", to, "--with", "x"]]
    assert [command(clone, *words).returncode for words in wrong] == [2] * 7


@pytest.mark.slow
def test_copy_trains_and_exports_in_a_project_whose_modules_have_the_same_names(tmp_path):
    """From another working directory, and with the project on PYTHONPATH; each of its modules fails if imported."""
    files = "utils.py hooks.py training/__init__.py rows/__init__.py tools/__init__.py data/x.py models/x.py"
    for name in files.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise ImportError(f'the project has its own {__name__}')\n")
    rows = tmp_path / "data" / "rows.jsonl"
    rows.write_text('{"prompt": "one two", "completion": " three"}\n{"prompt": "a b", "completion": " c"}\n' * 8)
    copied(RECIPES, "finetune_mem_limit", tmp_path / "fsdp")
    alone = run([sys.executable, f"fsdp/{SCRIPT}", "--accelerate_config", f"fsdp/{YAML}"], cwd=tmp_path)
    assert alone.returncode == 1
    assert alone.stdout.count("--model_name_or_path is required") == 1  # no sample is copied
    assert alone.stdout.count("--dataset_name is required") == 1
    arguments = ["--model_name_or_path", small_model(), "--dataset_name", "data/rows.jsonl", "--max_steps", 2]
    arguments += ["--output_dir", "runs/one"]
    done = accelerate_launch(
        f"fsdp/{SCRIPT}",
        *arguments,
        config=f"fsdp/{YAML}",
        flags=("--mixed_precision", "no"),
        cwd=tmp_path,
        PYTHONPATH=str(tmp_path),
    )
    assert done.returncode == 0, done.stdout[-4000:]
    record = json.loads((tmp_path / "fsdp" / RECORD).read_text())
    line = f"copied from fsdp recipes {record['version']} ({record['date']})"
    assert done.stdout.splitlines().count(line) == 1
    assert "step 2/2 | loss" in done.stdout and (tmp_path / "runs/one/model/model.safetensors").is_file()
    assert copied(RECIPES, "--status", tmp_path / "fsdp").endswith(": no file differs\n")
