"""The shape of recipes/: rooms, one direction of imports, budgets. Read from the files; nothing is imported."""

import ast
import re
import sys
from functools import cache
from importlib.metadata import packages_distributions

from launching import RECIPES, ROOT

SCRIPTS = ("finetune", "finetune_performance", "finetune_mem_limit")
COMMANDS = ("plan", "verify", "export", "report", "replay", "compare", "copy_recipe")
ROOMS = ("hooks", "rows", "training", "saving", "tools")
MAY_IMPORT = {  # whoever stands here imports only these of ours
    "scripts": {"utils", "hooks", "rows", "training", "saving"},
    "utils": {"hooks"},
    "training": {"hooks", "rows"},
    "hooks": set(),
    "rows": set(),
    "saving": set(),
    "tools": {"utils", "hooks", "rows", "training", "saving", *SCRIPTS},
    "commands": {"tools", "training"},
    "sample": {"hooks"},
}
# What stands there; nothing grows without taking as much away. The first estimates (11,000, 3,500, 5,600 and 2,100)
# left out what failures on every backend, hangs, resume at any size and exact refusals of bad data take, and that rows
# stay on disk (packed rows and the steps of an epoch are sequences of their own), what ranks must have in common, that
# each reads its own slices, that a model is exported a block at a time, that files are hashed as they are written,
# streams that ranks tokenise together, ahead of need, and what is handed to the device so that nothing waits for it.
LINES = {"all": 15_970, "core without rows": 6_010, "core": 8_770, "rows": 2_760}


def files() -> list[str]:
    """Every Python file of recipes/, as a path from there."""
    return sorted(str(path.relative_to(RECIPES)) for path in RECIPES.rglob("*.py") if "__pycache__" not in path.parts)


def owner(file: str) -> str:
    """Who a file belongs to, in MAY_IMPORT's words."""
    first, *rest = file.removesuffix(".py").split("/")
    if rest:
        return first
    return "scripts" if first in SCRIPTS else "commands" if first in COMMANDS else first


@cache
def imports(file: str) -> list[tuple[str, str]]:
    """(module of ours, name) of every import in a file, indented ones too; relative ones as full names."""
    package, found = file.split("/")[:-1], []
    tops = {*ROOMS, *SCRIPTS, *COMMANDS, "utils"}
    for node in ast.walk(ast.parse((RECIPES / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            module = (
                ".".join([*package[: len(package) - node.level + 1], node.module or ""]) if node.level else node.module
            )
            found += [(module.strip("."), alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
    return [(module, name) for module, name in found if module.split(".")[0] in tops]


def file_of(module: str, name: str) -> str:
    """The file that an import reads: a module, or a name in one."""
    for path in (f"{module}.{name}".replace(".", "/") + ".py", module.replace(".", "/") + ".py"):
        if (RECIPES / path).is_file():
            return path
    return module.replace(".", "/") + "/__init__.py"


def closure(file: str) -> set[str]:
    """A file with all that it imports of ours."""
    seen, waiting = set(), [file]
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            waiting += [file_of(module, name) for module, name in imports(one)]
    return seen


def lines(paths: set[str]) -> int:
    """How long they are together."""
    return sum(len((RECIPES / path).read_text(encoding="utf-8").splitlines()) for path in paths)


def test_imports_lead_in_one_direction():
    edges, wrong = 0, []
    for file in files():
        for module, _ in imports(file):
            edges += 1
            room = module.split(".")[0]
            if room != owner(file) and room not in MAY_IMPORT[owner(file)]:
                wrong.append(f"{file} imports {module}")
    assert not wrong, wrong
    assert edges > 600  # all were seen


def test_imports_inside_a_room_are_relative_and_name_the_file_that_defines():
    for file in files():
        if owner(file) in ROOMS:
            tree = ast.parse((RECIPES / file).read_text(encoding="utf-8"))
            absolute = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level]
            assert not [n.module for n in absolute if n.module.split(".")[0] == owner(file)], file
        for module, name in imports(file):
            target = file_of(module, name)
            if target.endswith("__init__.py") or not name or target == f"{module}.{name}".replace(".", "/") + ".py":
                continue
            body = ast.parse((RECIPES / target).read_text(encoding="utf-8")).body
            defined = {getattr(node, "name", "") for node in body}
            for node in body:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                defined |= {n.id for t in targets if t is not None for n in ast.walk(t) if isinstance(n, ast.Name)}
            assert name in defined, f"{file} imports {name} from {target}, which does not define it"


def test_tools_are_started_in_one_place_of_the_core():
    core = [file for file in files() if owner(file) in ("scripts", "utils", "hooks", "rows", "training", "saving")]
    asks = [file for file in core if "importlib.import_module" in (RECIPES / file).read_text(encoding="utf-8")]
    assert asks == ["hooks/config.py", "training/on_demand.py"]  # the former: a function that the user's YAML names
    assert len(core) > 45


def test_rooms_have_an_init_a_page_and_names_of_their_own():
    folders = {path.name for path in RECIPES.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {*ROOMS, "sample"}
    for room in ROOMS:
        assert (RECIPES / room / "__init__.py").read_text() == ""
        page = (RECIPES / room / "README.md").read_text(encoding="utf-8")
        code = "".join(re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S))
        assert page.count("\n") - code.count("\n") <= 55 and code.count("\n") <= 62, room  # a page, a file to copy
    names = {file.split("/")[-1].removesuffix(".py") for file in files()} - {"__init__"}
    taken = {*sys.stdlib_module_names, *packages_distributions()} & {*names, *ROOMS}
    assert not taken, taken
    flat = {path.stem for path in RECIPES.glob("*.py")}
    assert flat == {*SCRIPTS, *COMMANDS, "utils"} and not flat & {*ROOMS}


def test_nothing_reads_the_stack_or_the_folder_of_a_file():
    """A step marks where it is (training/progress.py). A script's own folder is where its sample lies."""
    wrong = []
    for file in files():
        text = (RECIPES / file).read_text(encoding="utf-8")
        if owner(file) in ROOMS and "__file__" in text:
            wrong.append(f"{file}: __file__")
        wrong += [f"{file}: {word}" for word in ("co_name", "f_locals", "walk_tb", "co_filename") if word in text]
    assert not wrong, wrong


def test_main_is_a_list_of_named_steps_and_the_loop_an_algorithm():
    for script in SCRIPTS:
        tree = ast.parse((RECIPES / f"{script}.py").read_text(encoding="utf-8"))
        length = {n.name: n.end_lineno - n.lineno + 1 for n in tree.body if isinstance(n, ast.FunctionDef)}
        assert length["main"] <= 60 and length["train"] <= 70, (script, length)


def test_core_takes_at_most_five_positional_parameters_and_hands_over_no_splatted_list():
    functions, wrong = 0, []
    for file in files():
        if owner(file) not in ("scripts", "utils", "hooks", "rows", "training", "saving"):
            continue
        for node in ast.walk(ast.parse((RECIPES / file).read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                functions += 1
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
                if len(names) > 5:
                    wrong.append(f"{file}: {node.name}({', '.join(names)})")
    assert not wrong, wrong
    assert functions > 350


def test_budgets_of_lines():
    core = closure("finetune.py")
    rows = {file for file in core if file.startswith("rows/")}
    found = {
        "all": lines({file for file in files() if not file.startswith("sample/")}),
        "core without rows": lines(core - rows),
        "core": lines(core),
        "rows": lines({file for file in files() if file.startswith("rows/")}),
    }
    assert all(found[name] <= limit for name, limit in LINES.items()), (found, LINES)


def test_front_page_is_short_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    assert len(links) >= 5 and all((ROOT / link).exists() for link in links), links


def test_top_level_holds_only_the_fixed_names():
    fixed = {"accelerate_configs", "recipes", "tests", "requirements.txt", "Makefile", "README.md"}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")} - {"outputs"}
    assert found == fixed
