"""plan.py: the options, one plan or several, what to change where none fits."""

import dataclasses
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from hooks.config import read_hook_config
from tqdm import tqdm
from training.arguments import KINDS, QuietParser, parse_arguments

from .advice import AT_ONCE, SMALLEST, Planner, advise, largest
from .plan_report import as_json, comparison, text, write_report
from .planned_step import OUTSIDE_GIB, Plan, Request, capacity_gib, make_plan, make_request, named
from .roofline import ASSUMPTIONS, DEFAULT_GPU, GPUS

SCENARIOS = (
    ("default.yaml", "finetune.py"),
    ("performance.yaml", "finetune_performance.py"),
    ("mem_limit.yaml", "finetune_mem_limit.py"),
)


@dataclass
class PlanOptions:
    """Plan a run; the script's own arguments follow."""

    script: str = field(default="finetune.py", metadata={"help": f"Of: {', '.join(KINDS)}."})
    num_processes: int | None = field(default=None, metadata={"help": "Ranks; as in the YAML unless given."})
    gpu_memory: str | None = field(default=None, metadata={"help": "As in 80GiB; the --gpu's unless given."})
    gpu: str | None = field(default=None, metadata={"help": f"Of: {', '.join(GPUS)}. For capacity and speed."})
    outside_gib: float = field(default=OUTSIDE_GIB, metadata={"help": "Context and communicator, outside of torch."})
    equal_lengths: bool = field(default=False, metadata={"help": "Rows are never padded: no attention mask."})
    compare: bool = field(default=False, metadata={"help": "The three scenarios beside each other."})
    max: str | None = field(default=None, metadata={"help": f"Largest that fits: {' or '.join(SMALLEST)}."})
    plan_dir: str = field(default="outputs/plan", metadata={"help": "Folder of plan.md, plan.json and plan.png."})
    json: bool = field(default=False, metadata={"help": "Print one JSON object and nothing else."})


def main(sample_dir: Path) -> None:
    try:
        command(sys.argv[1:], sample_dir)
    except (ValueError, OSError) as error:
        sys.exit(f"\nError: {error}\n")


def command(argv: list[str], sample_dir: Path) -> None:
    """Plan, print, and write the report."""
    parser = QuietParser(PlanOptions, allow_abbrev=False)
    options, rest = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    if problems := check_options(options):
        raise ValueError("Arguments:\n- " + "\n- ".join(problems))
    rest = without_data(rest)
    arguments = parse_arguments(rest, sample_dir, KINDS[options.script])
    config = read_hook_config(arguments.accelerate_config)
    request = make_request(arguments, config, options.script, options.num_processes, options.equal_lengths)
    planner = make_planner(options)
    if options.compare:
        plans, last = compare(request, options, rest, sample_dir, planner)
    elif options.max:
        plans, last = search(request, options.max, planner)
    else:
        plans, last = advised(request, planner, sys.stderr if options.json else sys.stdout)
    write_report(plans, Path(options.plan_dir))
    print(as_json(plans) if options.json else last)


def without_data(words: list[str]) -> list[str]:
    """The script's command line, whose data set need not be named: its rows are taken to be full."""
    names = {word.split("=")[0] for word in words}
    is_named = {"--dataset_name", "--config"} & names or "--model_name_or_path" not in names
    return words if is_named else [*words, "--dataset_name", "none"]


def check_options(options: PlanOptions) -> list[str]:
    """Every problem with the options of plan.py itself."""
    problems = []
    if options.script not in KINDS:
        problems.append(f"--script: found {options.script}, allowed: {', '.join(KINDS)}")
    if options.gpu is not None and options.gpu not in GPUS:
        problems.append(f"--gpu: found {options.gpu}, allowed: {', '.join(GPUS)} (or give --gpu_memory)")
    if options.max is not None and options.max not in SMALLEST:
        problems.append(f"--max: found {options.max}, allowed: {', '.join(SMALLEST)}")
    if options.gpu_memory is not None and not re.fullmatch(r"\d+(\.\d+)? *(G|GB|GiB)?", options.gpu_memory):
        problems.append(f"--gpu_memory: found {options.gpu_memory}, allowed: as in 80GiB or 80GB")
    if options.num_processes is not None and options.num_processes < 1:
        problems.append(f"--num_processes: found {options.num_processes}, allowed: 1 or more")
    if options.max is not None and options.gpu_memory is None and options.gpu is None:
        problems.append("--max needs --gpu_memory or --gpu")
    return problems


def make_planner(options: PlanOptions) -> Planner:
    """A function that plans a request, or says why it cannot and returns None."""
    capacity, gpu = capacity_gib(options.gpu_memory, options.gpu), GPUS[options.gpu or DEFAULT_GPU]

    def planner(request: Request, name: str) -> Plan | None:
        try:
            return make_plan(request, name, capacity, gpu.name, options.outside_gib)
        except ValueError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return None

    return planner


def advised(request: Request, planner: Planner, screen: TextIO) -> tuple[list[Plan], str]:
    """One plan and, where it does not fit, what to change."""
    plan = planner(request, named(request))
    if plan is None:
        sys.exit(1)
    lines = [text(plan), f"note: {ASSUMPTIONS}"]
    if plan.verdict not in ("tight", "does not fit"):
        return [plan], "\n".join(lines)
    print("\n".join(lines), flush=True, file=screen)
    plans, advice = advise(request, plan, planner)
    table = comparison([dataclasses.replace(plan, name="as planned"), *plans], "single change")
    return [plan, *plans], "\n".join(["", *table, advice])


def compare(
    request: Request, options: PlanOptions, rest: list[str], sample_dir: Path, planner: Planner
) -> tuple[list[Plan], str]:
    """The three scenarios, each YAML with its script."""
    folder = Path(request.hook_config["path"]).parent
    requests: dict[str, Request] = {}
    for yaml, script in SCENARIOS:
        if not (folder / yaml).is_file():
            raise ValueError(f"--compare: no {yaml} beside {request.hook_config['path']}")
        words = [*rest, "--accelerate_config", str(folder / yaml)]
        arguments, config = parse_arguments(words, sample_dir, KINDS[script]), read_hook_config(str(folder / yaml))
        one = make_request(arguments, config, script, request.num_processes, options.equal_lengths)
        requests[f"{yaml} with {script}"] = one
    with ThreadPoolExecutor(AT_ONCE) as pool:
        made = tqdm(pool.map(planner, requests.values(), requests), total=len(requests), desc="planning")
        plans = [plan for plan in made if plan is not None]
    fitting = [plan for plan in plans if plan.verdict == "fits"]
    if not plans:
        sys.exit(1)  # each has said why
    lines = comparison(plans, "scenario (GiB of a rank)")
    if fitting:
        lines.append(f"fastest that fits: {max(fitting, key=lambda plan: plan.tokens_per_second).name}")
    elif plans[0].capacity is not None:
        least = min(plans, key=lambda plan: plan.comfortable)
        print("\n".join(lines), flush=True, file=sys.stderr if options.json else sys.stdout)
        changed, advice = advise(requests[least.name], least, planner)
        lines = [f"none fits; from {least.name}:", *comparison([least, *changed], "single change"), advice]
        plans += changed
    return plans, "\n".join([*lines, f"note: {ASSUMPTIONS}"])


def search(request: Request, name: str, planner: Planner) -> tuple[list[Plan], str]:
    """The largest value of an argument that fits."""
    value, plan = largest(request, name, planner)
    if plan is None:
        at_least = SMALLEST[name]
        raise ValueError(f"--max {name}: not even {at_least} fits; run without --max for what to change")
    return [plan], f"{text(plan)}\n\nlargest --{name} that fits: {value}"
