"""What to change when a plan does not fit, in the order of the README's ladder, each change planned and not guessed."""

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from .planned_step import GIB, Plan, Request, make_plan

CHUNKS = "finetune_mem_limit.py"
ANOTHER_JOB = ("--max_length", "--num_processes")  # change what is trained, or what it costs to hire
AT_ONCE = 2  # plans made at the same time: each is a process of its own
SMALLEST = {"per_device_train_batch_size": 1, "max_length": 128}  # steps in which --max searches
# Which changes help first where it happened, in the README's order (beginnings of possible_changes' names).
ACTIVATIONS_FIRST = ("recompute every block", "--per_device_train_batch_size", "finetune_mem_limit.py", "hook_wrap_emb")
ACTIVATIONS_FIRST += ("--max_length", "hook_offload_optimizer", "fsdp_offload_params")
KNOBS = {  # elsewhere ACTIVATIONS_FIRST
    "logits and loss": ("finetune_mem_limit.py", "--per_device_train_batch_size", "--max_length"),
    "gathering a unit": ("hook_wrap_blocks_per_unit", "hook_prefetch_units", "hook_wrap_emb", "recompute every block"),
    "clipping": ("hook_offload_optimizer", "fsdp_offload_params", "--num_processes"),
    "the optimizer's step": ("hook_offload_optimizer", "fsdp_offload_params", "--num_processes"),
}
ADVICE = {
    "reading the data": "it is host memory: fewer --dataloader_num_workers, --streaming, fewer ranks on a machine",
    "evaluation": "lower --per_device_eval_batch_size",
    "answers": "lower --per_device_eval_batch_size or --max_new_tokens",
    "saving": "leave --async_save off (it copies the state to the host), or save less often",
}
NAMED = 4  # knobs that a message names; the first with a prediction
Planner = Callable[[Request, str], Plan | None]  # None: it cannot be planned
Change = Callable[[Request], Request]  # the request with one change made


def changes(request: Request) -> Iterator[tuple[str, Request]]:
    """Every single change that would save memory, is not made yet and is allowed, with its request."""
    made = ((name, change(request)) for name, change in possible_changes(request))
    return ((name, changed) for name, changed in made if changed.is_allowed())


def possible_changes(request: Request) -> Iterator[tuple[str, Change]]:
    """The same, each as what makes it, whether or not the YAML's other keys allow it."""
    config, arguments = request.hook_config, request.arguments

    def keys(**values: object) -> Change:
        return lambda base: dataclasses.replace(base, hook_config={**base.hook_config, **values})

    def with_arguments(**values: object) -> Change:
        return lambda base: dataclasses.replace(base, arguments={**base.arguments, **values})

    def request_with(**values: object) -> Change:
        return lambda base: dataclasses.replace(base, **values)

    recomputes = config["fsdp_activation_checkpointing"]
    is_partial = config["hook_checkpoint_every_n_blocks"] > 1 or config["hook_checkpoint_function"]
    if not recomputes or is_partial or config["hook_checkpoint_mode"] != "full":
        every = {"hook_checkpoint_every_n_blocks": 1, "hook_checkpoint_mode": "full", "hook_checkpoint_function": None}
        yield "recompute every block", keys(fsdp_activation_checkpointing=True, **every)
    wraps_blocks = config["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP" and not config["hook_wrap_function"]
    if not wraps_blocks:
        per_block = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "hook_wrap_blocks_per_unit": 1}
        yield "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", keys(**per_block, hook_wrap_function=None)
    elif config["hook_wrap_blocks_per_unit"] > 1:
        yield "hook_wrap_blocks_per_unit: 1", keys(hook_wrap_blocks_per_unit=1)
    if wraps_blocks and not config["hook_wrap_embeddings"]:
        yield "hook_wrap_embeddings: true", keys(hook_wrap_embeddings=True)
    if not config["fsdp_reshard_after_forward"]:
        yield "fsdp_reshard_after_forward: true", keys(fsdp_reshard_after_forward=True)
    if config["hook_prefetch_units"] > 1:
        yield "hook_prefetch_units: 1", keys(hook_prefetch_units=1)
    if not config["hook_reduce_every_micro_batch"] and arguments["gradient_accumulation_steps"] > 1:
        yield "hook_reduce_every_micro_batch: true", keys(hook_reduce_every_micro_batch=True)
    if request.kind != CHUNKS:
        yield f"{CHUNKS} (loss in chunks)", request_with(script=CHUNKS, kind=CHUNKS)
    rows, accumulation = arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]
    if rows > 1:
        parts = 2 if rows % 2 == 0 else rows  # the global batch stays
        fewer = {"per_device_train_batch_size": rows // parts, "gradient_accumulation_steps": parts * accumulation}
        yield f"--per_device_train_batch_size {rows // parts}", with_arguments(**fewer)
    if not config["hook_offload_optimizer"] and not config["fsdp_offload_params"]:
        yield "hook_offload_optimizer: true", keys(hook_offload_optimizer=True)
    if recomputes and not config["fsdp_activation_checkpointing_offload"]:
        yield "fsdp_activation_checkpointing_offload: true", keys(fsdp_activation_checkpointing_offload=True)
    if not config["fsdp_offload_params"]:
        yield "fsdp_offload_params: true", keys(fsdp_offload_params=True)
    if arguments["max_length"] > 256:
        shorter = arguments["max_length"] // 2
        yield f"--max_length {shorter}", with_arguments(max_length=shorter)
    ranks = 2 * request.num_processes
    yield f"--num_processes {ranks}", request_with(num_processes=ranks)


def advise(request: Request, plan: Plan, planner: Planner) -> tuple[list[Plan], str]:
    """All single changes as plans, and the sentence that says what to do.

    The cheapest change that makes it fit is the one of most tokens per second. Where no single one does, changes that
    save the most are made together until it fits.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        tried = pool.map(lambda change: planner(change[1], change[0]), changes(request))
        plans = [one for one in tried if one is not None]
    fitting = [one for one in plans if one.verdict == "fits"]
    if fitting:
        best = max(fitting, key=lambda one: (not one.name.startswith(ANOTHER_JOB), one.tokens_per_second))
        return plans, f"cheapest single change that fits: {best.name} (saves {saving(plan, best):.2f} GiB)"
    possible, together, names = dict(possible_changes(request)), request, []
    for one in sorted(plans, key=lambda one: one.comfortable):
        if saving(plan, one) <= 0:
            break
        together, names = possible[one.name](together), [*names, one.name]
        if len(names) == 1:
            continue
        both = planner(together, " + ".join(names)) if together.is_allowed() else None
        if both is not None and both.verdict == "fits":
            return plans, f"no single change fits; together these do: {both.name} ({both.comfortable:.2f} GiB)"
    return plans, "no change here makes it fit: a smaller model, LoRA (--use_peft), or more or larger GPUs"


def saving(plan: Plan, other: Plan) -> float:
    """GiB that another plan needs less than this one, to be comfortable."""
    return plan.comfortable - other.comfortable


def next_knobs(place: str, request: Request) -> Iterator[str]:
    """What to change where memory ran out in this place, best first; of the first one what the planner predicts."""
    if place in ADVICE:
        yield ADVICE[place]
        return
    possible = dict(changes(request))
    wanted = KNOBS.get(place, ACTIVATIONS_FIRST)
    ordered = [name for knob in wanted for name in possible if name.startswith(knob)] or [*possible]
    first, *others = ordered[:NAMED]
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            before, after = pool.map(make_plan, (request, possible[first]), ("as it is", first))
    except (ValueError, OSError) as error:
        yield f"{first} (no prediction: {error})"
    else:
        yield f"{first}: {before.step.peak / GIB:.3f} -> {after.step.peak / GIB:.3f} GiB at the peak (predicted)"
    yield from others


def largest(request: Request, name: str, planner: Planner) -> tuple[int, Plan | None]:
    """The largest value of an argument that is allowed and fits, to a 16th of it, and its plan; 0 where not even the
    smallest does.

    Raises:
        ValueError: a value cannot be planned.
    """
    step = SMALLEST[name]
    fits: dict[int, Plan] = {}

    def does_fit(value: int) -> bool:
        changed = dataclasses.replace(request, arguments={**request.arguments, name: value})
        if not changed.is_allowed():
            return False
        plan = planner(changed, f"--{name} {value}")
        if plan is None:
            raise ValueError(
                f"--{name} {value} cannot be planned, so the search for the largest ends without an answer"
            )
        is_cut = name == "max_length" and plan.step.length < value  # the model has no more positions
        if plan.verdict == "fits" and not is_cut:
            fits[value] = plan
        return value in fits

    if not does_fit(step):
        return 0, None
    low, high = step, 2 * step
    while does_fit(high):
        low, high = high, 2 * high
    while high - low > max(step, low // 16 // step * step):
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if does_fit(middle) else (low, middle)
    return low, fits[low]
