"""Copy a training script into your project; see later what changed on either side, and merge.

    python recipes/copy_recipe.py finetune_mem_limit PROJECT/fsdp               with its own YAML
    python recipes/copy_recipe.py finetune PROJECT/fsdp --yaml performance      with another one
    python recipes/copy_recipe.py finetune PROJECT/fsdp --with tools            and the planner, the proof, all commands
    python recipes/copy_recipe.py --status PROJECT/fsdp                         what you edited, what changed here since
    python recipes/copy_recipe.py --update PROJECT/fsdp                         merge the two (--with tools: add them)

    accelerate launch --config_file PROJECT/fsdp/mem_limit.yaml PROJECT/fsdp/finetune_mem_limit.py ...

A copy is a folder of its own: the script, the files that it imports, a YAML beside it, and .recipe/ with the version
and each file as it was copied. So a merge needs no history of this clone, only the program git, where a file changed on
both sides. A file that this command did not write is never overwritten, one that you edited only by a merge.

Exit status 1: an error, and nothing was changed; or conflicts, marked <<<<<<< in the files that are named.
"""

import argparse
import ast
import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from training.origin import RECORD

RECIPES = Path(__file__).resolve().parent
CONFIGS = RECIPES.parent / "accelerate_configs"
SCENARIOS = {"finetune": "default", "finetune_performance": "performance", "finetune_mem_limit": "mem_limit"}
AS_COPIED = RECORD.parent / "files"  # each file as it was copied, named by its hash: where a merge starts from

NEW, CHANGED, EDITED = "new in the recipes", "changed in the recipes", "edited here"
BOTH, REMOVED = "edited here, changed in the recipes", "removed here"
UNNEEDED, UNNEEDED_EDITED = "no longer needed", "edited here, no longer needed"
ON_UPDATE = {NEW: "added", CHANGED: "replaced", EDITED: "left as it is", BOTH: "merged", REMOVED: "left away"}
ON_UPDATE |= {UNNEEDED: "removed", UNNEEDED_EDITED: "left as it is, and yours from now on"}

Hashes = dict[str, str]  # path in a copy, with slashes -> sha256


@dataclass(frozen=True)
class Record:
    """What a copy holds and where it is from: .recipe/record.json."""

    version: str
    date: str
    script: str
    yaml: str
    with_tools: bool
    files: Hashes  # as copied


def main() -> None:
    arguments = parse_arguments()
    with_tools = arguments.parts == "tools"
    try:
        if arguments.status is not None:
            print(status(arguments.status))
        elif arguments.update is not None:
            text, num_conflicts = update(arguments.update, with_tools)
            print(text)
            sys.exit(1 if num_conflicts else 0)
        else:
            script = arguments.script.removesuffix(".py")
            yaml = (arguments.yaml or SCENARIOS.get(script, "")).removesuffix(".yaml")
            print(copy(arguments.to, f"{script}.py", f"{yaml}.yaml", with_tools))
    except (ValueError, OSError, SyntaxError) as error:  # each names the file
        sys.exit(f"Error: {error}")


def parse_arguments() -> argparse.Namespace:
    """The command line; argparse ends a wrong one with status 2."""
    parser = argparse.ArgumentParser(description="Copy a training script; see what changed on either side; merge.")
    parser.add_argument("script", nargs="?", help=f"One of {', '.join(SCENARIOS)}.")
    parser.add_argument("to", nargs="?", type=Path, metavar="TO", help="A folder of its own for the copy.")
    parser.add_argument("--yaml", metavar="NAME", help="Another file of accelerate_configs/ than the script's own.")
    parser.add_argument("--with", dest="parts", choices=["tools"], help="Also what explains, predicts and proves.")
    parser.add_argument("--status", type=Path, metavar="TO", help="Say what differs in a copy, and on which side.")
    parser.add_argument("--update", type=Path, metavar="TO", help="Merge what changed in the recipes into a copy.")
    arguments = parser.parse_args()
    is_copy = arguments.to is not None
    is_one = [arguments.script is not None, arguments.status is not None, arguments.update is not None].count(True) == 1
    is_fitting = is_copy or not (arguments.script or arguments.yaml or (arguments.status and arguments.parts))
    if not (is_one and is_fitting):
        parser.error("give SCRIPT TO [--yaml NAME] [--with tools], --status TO, or --update TO [--with tools]")
    return arguments


def copy(to: Path, script: str, yaml: str, with_tools: bool) -> str:
    """Make a copy; returns what to print. Raises ValueError over other files, and over a copy that differs."""
    if to.resolve() == RECIPES.parent or RECIPES in (to.resolve(), *to.resolve().parents):
        raise ValueError(f"{to} is where the recipes themselves lie; name a folder of your project")
    new = record_now(script, yaml, with_tools)
    if (to / RECORD).exists():
        old = read_record(to)
        if (old.script, old.yaml, old.with_tools) != (script, yaml, with_tools):
            what = f"{old.script} and {old.yaml} {'with' if old.with_tools else 'without'} tools"
            raise ValueError(f"{to} holds {what}; name another folder (--update {to} --with tools adds the tools here)")
        if states := compare(to, old.files, new.files):
            differ = ", ".join(f"{name} ({state})" for name, state in states.items())
            raise ValueError(f"{to} holds a copy already, but {differ}; --update {to} keeps what you edited")
        return f"{to} is up to date: {script} and {yaml} of {old.version}"
    stop_at_other_files(to, {}, new.files)
    write(to, new, {name: source(name).read_bytes() for name in new.files}, [])
    launch = f"accelerate launch --config_file {shlex.quote(str(to / yaml))} {shlex.quote(str(to / script))}"
    launch += " --model_name_or_path ... --dataset_name ..."
    return f"copied {len(new.files)} files to {to}, of {new.version}; the sample is not among them\n{launch}"


def status(to: Path) -> str:
    """A line for each file that differs, and a summary."""
    old = read_record(to)
    new = record_now(old.script, old.yaml, old.with_tools)
    states = compare(to, old.files, new.files)
    counts = ", ".join(f"{count} {state}" for state, count in Counter(states.values()).items()) or "no file differs"
    summary = f"{old.script} copied from {old.version} ({old.date}); the recipes are at {new.version}: {counts}"
    return "\n".join([*(f"{name}: {state}" for name, state in states.items()), summary])


def update(to: Path, adds_tools: bool) -> tuple[str, int]:
    """Merge the recipes as they are now into a copy; returns what to print and the number of conflicts left."""
    old = read_record(to)
    new = record_now(old.script, old.yaml, old.with_tools or adds_tools)
    states = compare(to, old.files, new.files)
    stop_at_other_files(to, old.files, new.files)
    contents = {name: source(name).read_bytes() for name, state in states.items() if state in (NEW, CHANGED)}
    lines = {name: f"{name}: {state}: {ON_UPDATE[state]}" for name, state in states.items()}
    num_conflicts = 0
    for name in [name for name, state in states.items() if state == BOTH]:
        contents[name], conflicts = merge(to / name, to / AS_COPIED / old.files[name], source(name), new.version)
        lines[name] += f" with {conflicts} CONFLICT(S), marked <<<<<<<" if conflicts else ""
        num_conflicts += conflicts
    write(to, new, contents, [name for name, state in states.items() if state == UNNEEDED])
    was = f", was at {old.version}" if old.version != new.version else ""
    end = f"; conflicts to resolve: {num_conflicts}" if num_conflicts else ""
    return "\n".join([*lines.values(), f"{to} is at {new.version}{was}{end}"]), num_conflicts


def wanted_files(script: str, yaml: str, with_tools: bool) -> list[str]:
    """The paths of a copy's files in it. Raises ValueError for a script or a YAML that is not here."""
    scripts = [f"{name}.py" for name in SCENARIOS]
    configs = sorted(path.name for path in CONFIGS.glob("*.yaml"))
    for name, known, folder in ((script, scripts, RECIPES), (yaml, configs, CONFIGS)):
        if name not in known or not (folder / name).is_file():
            raise ValueError(f"{name} is not in {folder}; choose from: {', '.join(known)}")
    left, found = {RECIPES / script}, set()
    if with_tools:
        left |= {path for path in RECIPES.glob("*.py") if path.name not in (*scripts, Path(__file__).name)}
        left |= {path for pattern in ("*.py", "*.md") for path in (RECIPES / "tools").rglob(pattern)}
    while left:
        found.add(path := left.pop())
        imported = imported_files(path) - found if path.suffix == ".py" else set()
        left |= {path for path in imported if with_tools or RECIPES / "tools" not in path.parents}
    return [yaml, *sorted(path.relative_to(RECIPES).as_posix() for path in found)]


def imported_files(path: Path) -> set[Path]:
    """The recipes' files that a file imports, anywhere in it, with __init__.py and README.md of their packages."""
    package, modules = path.relative_to(RECIPES).parent.parts, []
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.Import):
            modules += [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = [*above, *(node.module.split(".") if node.module else [])]
            modules += [[*base, alias.name] for alias in node.names]  # a module, or a name in one
    places = {RECIPES.joinpath(*module[:n]) for module in modules for n in range(1, len(module) + 1)}
    files = {file for p in places for file in (p.with_name(f"{p.name}.py"), p / "__init__.py", p / "README.md")}
    return {file for file in files if file.is_file()}


def source(name: str) -> Path:
    """The file here that a copy's file is of."""
    return (CONFIGS if name.endswith(".yaml") else RECIPES) / name


def record_now(script: str, yaml: str, with_tools: bool) -> Record:
    """The record of a copy made now. Its version is the commit; where none holds these very files, with their hash."""
    files = {name: sha256(source(name)) for name in wanted_files(script, yaml, with_tools)}
    digest, version = hashlib.sha256(json.dumps(files).encode()).hexdigest()[:12], None
    is_tracked = git("ls-files", "--error-unmatch", Path(__file__).name)  # else unpacked inside another repository
    if is_tracked and (version := git("describe", "--always", "--tags", "--abbrev=12")):
        changes = git("status", "--porcelain", "--", *(str(source(name)) for name in files))
        version += f"-dirty-{digest}" if changes != "" else ""
    date = datetime.now(timezone.utc).date().isoformat()
    return Record(version or f"unknown-{digest}", date, script, yaml, with_tools, files)


def git(*arguments: str) -> str | None:
    """What git says of the clone that this file lies in; None where it has no answer."""
    outer = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")  # of another repository, one of whose hooks runs this
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    with suppress(OSError):
        command = ["git", "-C", str(RECIPES), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        return done.stdout.strip() if done.returncode == 0 else None


def compare(to: Path, old: Hashes, new: Hashes) -> dict[str, str]:
    """How each file differs that is not here as it is in the recipes now."""
    states = {}
    for name in sorted({*old, *new}):
        copied, here, now = old.get(name), sha256(to / name), new.get(name)
        if here == now:  # also an edit that the recipes have made too, and what an interrupted update wrote
            continue
        if copied is None:
            states[name] = NEW
        elif here is None:
            states[name] = REMOVED
        elif now is None:
            states[name] = UNNEEDED if here == copied else UNNEEDED_EDITED
        else:
            states[name] = CHANGED if here == copied else EDITED if now == copied else BOTH
    return states


def stop_at_other_files(to: Path, old: Hashes, new: Hashes) -> None:
    """Raise ValueError for files where one of ours would go, or in a folder that would become one of our packages.

    Not for what an interrupted copy or update has written: that lies in AS_COPIED too.
    """
    ours = {path.name for path in (to / AS_COPIED).glob("*")}
    our_folders = {Path(name).parts[0] for name in old}
    others = []
    for place in sorted({name if (top := Path(name).parts[0]) in our_folders else top for name in {*new} - {*old}}):
        files = [path for path in (to / place, *(to / place).rglob("*")) if path.is_file() or path.is_symlink()]
        is_folder = place in new and (to / place).is_dir()
        if is_folder or any(path.suffix != ".pyc" and sha256(path) not in ours for path in files):
            others.append(f"{place}/" if (to / place).is_dir() else place)
    if others:
        raise ValueError(f"{to} has its own {', '.join(others)}; nothing was written: name a new folder, or move them")


def merge(mine: Path, copied: Path, theirs: Path, version: str) -> tuple[bytes, int]:
    """A file with the edits of both sides, and the number of conflicts. Raises ValueError where git cannot merge."""
    if any(line.startswith(b"<<<<<<< ") for line in mine.read_bytes().splitlines()):
        raise ValueError(f"{mine} has conflict marks (<<<<<<<) of an update before; resolve them, then update again")
    if not copied.is_file():
        raise ValueError(f"{mine} changed on both sides, and a merge needs it as it was copied: restore {copied}")
    labels = ["-L", "edited here", "-L", "as copied", "-L", f"recipes {version}"]
    files = [str(path.resolve()) for path in (mine, copied, theirs)]
    try:
        done = subprocess.run(["git", "merge-file", "-p", "-q", *labels, *files], capture_output=True)
    except FileNotFoundError as error:
        raise ValueError(f"{mine} changed on both sides, and a merge needs the program git: install it") from error
    if not 0 <= done.returncode < 128:
        raise ValueError(f"{mine} cannot be merged: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout, done.returncode


def write(to: Path, record: Record, contents: dict[str, bytes], removed: list[str]) -> None:
    """Bring a copy to a record that is written last, so that after a kill the same command makes good what it left."""
    for name, digest in record.files.items():
        if not (to / AS_COPIED / digest).exists():
            write_whole(to, AS_COPIED / digest, source(name).read_bytes())
    for name, content in contents.items():
        write_whole(to, Path(name), content)
    for name in removed:
        (to / name).unlink()
        with suppress(OSError):  # not empty
            (to / name).parent.rmdir()
    write_whole(to, RECORD, (json.dumps(asdict(record), indent=1) + "\n").encode())
    for path in (to / AS_COPIED).iterdir():
        if path.name not in record.files.values():
            path.unlink()


def write_whole(to: Path, name: Path, content: bytes) -> None:
    """Write a file elsewhere, then move it to its name: it is the old one or the new one, never a part."""
    beside = to / RECORD.parent / "being_written"
    for path in (beside, to / name):
        path.parent.mkdir(parents=True, exist_ok=True)
    beside.write_bytes(content)
    beside.replace(to / name)


def read_record(to: Path) -> Record:
    """The record of a copy. Raises ValueError where there is none, or a damaged one."""
    if not (to / RECORD).is_file():
        raise ValueError(f"{to} holds no copy (no {RECORD}); to make one: copy_recipe.py SCRIPT {to}")
    try:
        record = Record(**json.loads((to / RECORD).read_text(encoding="utf-8")))
        if outside := [name for name, _ in record.files.items() if name[:1] == "/" or ".." in Path(name).parts]:
            raise ValueError(f"it names {outside[0]}")
        return record
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{to / RECORD} is damaged ({error}); restore it, or copy into a new folder") from error


def sha256(path: Path) -> str | None:
    """The hash of a file, None where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


if __name__ == "__main__":
    main()
