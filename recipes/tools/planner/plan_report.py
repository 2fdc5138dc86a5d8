"""How plan.py answers: text, Markdown, JSON, and a chart of memory over one step."""

import dataclasses
import json
from pathlib import Path

from .planned_step import GIB, Plan, PlannedStep
from .roofline import ASSUMPTIONS

COLOURS = ("#1b4f72", "#2e86c1", "#5dade2", "#f39c12", "#f8c471", "#a04000", "#27ae60", "#82e0aa")
COLOURS += ("#c0392b", "#8e44ad", "#7f8c8d", "#d5d8dc")


def text(plan: Plan) -> str:
    """The whole plan for a terminal."""
    step = plan.step
    lines = [f"{plan.name}", f"parameters {step.parameters:,}, trained {step.trainable:,}", ""]
    lines.append(f"{'peak memory of a rank':<40}{'GiB':>9}")
    lines += [f"  {name:<38}{gib(size):>9}" for name, size in largest_parts(step)]
    lines.append(f"  {'live at the peak':<38}{gib(step.peak):>9}  in: {step.peak_at}")
    lines.append(f"  {'reserved by the allocator':<38}{gib(step.reserved):>9}")
    lines.append(f"  {'context, communicator (a constant)':<38}{plan.outside:>9.2f}")
    lines.append(f"needs at least {plan.needs:.2f} GiB, comfortable at {plan.comfortable:.2f} GiB")
    if plan.capacity is not None:
        lines.append(f"{plan.capacity:.2f} GiB given: {verdict_line(plan)}")
    lines.append("peaks: " + ", ".join(f"{name} {gib(n)}" for name, n in step.phase_peaks.items()) + " GiB")
    if plan.capacity is not None and plan.evaluation > plan.capacity:
        lines.append(
            f"evaluation does NOT fit ({plan.evaluation:.2f} GiB, full rows): lower --per_device_eval_batch_size"
        )
    elif plan.evaluation > plan.needs:
        lines.append("evaluation needs more than training: lower --per_device_eval_batch_size")
    if plan.host:
        needed = ", ".join(f"{name} {size:.2f}" for name, size in plan.host.items())
        lines.append(f"host memory of a machine, GiB: {needed}")
    lines += ["", f"{'sent per optimizer step':<24}{'calls':>8}{'GiB':>10}"]
    lines += [f"  {kind:<22}{calls:>8}{gib(size):>10}" for kind, calls, size in sent(step)]
    times = ", ".join(f"{name} {seconds:.3f}" for name, seconds in plan.seconds.items())
    lines.append(f"estimated seconds: {times} ({plan.tokens_per_second:,.0f} tokens/s/GPU)")
    return "\n".join([*lines, *(f"note: {note}" for note in step.notes)])


def largest_parts(step: PlannedStep) -> list[tuple[str, int]]:
    """The parts at the peak, the largest first, without crumbs."""
    parts = sorted(step.parts.items(), key=lambda part: -part[1])
    return [(name, size) for name, size in parts if size > step.peak / 1000]


def verdict_line(plan: Plan) -> str:
    """The verdict with its number."""
    if plan.verdict == "fits":
        return f"fits, {plan.headroom:.2f} GiB to spare"
    if plan.verdict == "tight":
        return "tight: it runs, but the allocator has to give memory back and ask again, which is slow"
    return f"does not fit, {plan.needs - plan.capacity:.2f} GiB short"


def sent(step: PlannedStep) -> list[tuple[str, int, int]]:
    """Collectives of a step: kind, calls, bytes."""
    kinds = [name.removesuffix(" calls") for name in step.counts if name.endswith(" calls")]
    return [(kind, step.counts[f"{kind} calls"], step.counts[f"{kind} bytes"]) for kind in kinds]


def gib(size: int) -> str:
    """Bytes as GiB, with enough digits to tell small models apart."""
    return f"{size / GIB:.2f}" if size >= GIB / 10 or not size else f"{size / GIB:.4f}"


def comparison(plans: list[Plan], header: str = "plan") -> list[str]:
    """Several plans, one line each, against the first."""
    first = plans[0]
    lines = [f"{header:<52}{'needs':>8}{'comfort.':>9}{'saves':>8}{'tok/s/GPU':>11}  verdict"]
    for plan in plans:
        saved = f"{first.comfortable - plan.comfortable:>8.2f}" if plan is not first else " " * 8
        speed = f"{plan.tokens_per_second:>11,.0f}"
        lines.append(f"{plan.name:<52}{plan.needs:>8.2f}{plan.comfortable:>9.2f}{saved}{speed}  {plan.verdict}")
    return lines


def markdown(plan: Plan) -> str:
    """The plan as a table that a report can hold."""
    rows = [("part", "GiB"), ("---", "---:")]
    rows += [(name, gib(size)) for name, size in largest_parts(plan.step)]
    rows += [("**live at the peak**", gib(plan.step.peak)), ("reserved by the allocator", gib(plan.step.reserved))]
    rows += [("needs at least", f"{plan.needs:.2f}"), ("comfortable at", f"{plan.comfortable:.2f}")]
    table = "\n".join(f"| {name} | {size} |" for name, size in rows)
    calls = "\n".join(f"| {kind} | {count} | {gib(size)} |" for kind, count, size in sent(plan.step))
    return (
        f"### {plan.name}\n\n{table}\n\nThe peak is in: {plan.step.peak_at}.\n\n"
        f"| sent per optimizer step | calls | GiB |\n| --- | ---: | ---: |\n{calls}\n"
    )


def as_json(plans: list[Plan]) -> str:
    """Every figure, in bytes and GiB as named."""
    values = [
        {
            "name": plan.name,
            "needs_gib": plan.needs,
            "comfortable_gib": plan.comfortable,
            "capacity_gib": plan.capacity,
            "outside_gib": plan.outside,
            "evaluation_gib": plan.evaluation,
            "verdict": plan.verdict,
            "seconds": plan.seconds,
            "host_gib": plan.host,
            "step": {name: value for name, value in dataclasses.asdict(plan.step).items() if name != "timeline"},
        }
        for plan in plans
    ]
    return json.dumps(values if len(values) > 1 else values[0], indent=1)


def save_chart(plan: Plan, path: Path) -> None:
    """Memory over one step by part, as a PNG."""
    from matplotlib.figure import Figure  # not pyplot, which is for one thread

    from .memory_trace import PARTS

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.subplots()
    points = [parts for _, parts in plan.step.timeline]
    points += points[-1:]  # a step is drawn up to the next point
    layers = [[parts[i] / GIB for parts in points] for i in range(len(PARTS))]
    used = [i for i, layer in enumerate(layers) if max(layer) > 0]
    axes.stackplot(
        range(len(points)),
        [layers[i] for i in used],
        labels=[PARTS[i] for i in used],
        colors=[COLOURS[i] for i in used],
        step="post",
    )
    phases = [phase for phase, _ in plan.step.timeline]
    starts = [i for i, phase in enumerate(phases) if i == 0 or phase != phases[i - 1]]
    for start in starts:
        axes.axvline(start, color="#555555", linewidth=0.6)
        axes.text(start, 1.01, phases[start], transform=axes.get_xaxis_transform(), fontsize=7, rotation=30)
    axes.axhline(plan.step.reserved / GIB, color="black", linestyle=":", label="reserved by the allocator")
    if plan.capacity is not None and plan.capacity < 3 * plan.comfortable:
        axes.axhline(plan.capacity - plan.outside, color="red", linestyle="--", label="capacity less constants")
    axes.set(xlabel="moments of one optimizer step and one evaluation batch", ylabel="GiB of one rank")
    axes.set_xlim(0, max(len(points) - 1, 1))
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
    figure.suptitle(plan.name, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def write_report(plans: list[Plan], folder: Path) -> None:
    """plan.md, plan.json and plan.png."""
    folder.mkdir(parents=True, exist_ok=True)
    save_chart(plans[0], folder / "plan.png")
    table = "\n".join(["```", *comparison(plans), "```"]) if len(plans) > 1 else ""
    page = "\n".join(["# Plan", "", markdown(plans[0]), table, "", "![memory](plan.png)", "", ASSUMPTIONS])
    (folder / "plan.md").write_text(page + "\n", encoding="utf-8")
    (folder / "plan.json").write_text(as_json(plans), encoding="utf-8")
