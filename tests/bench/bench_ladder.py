"""What each dial of the two scenario scripts buys and costs, one row a dial (a section of bench.py).

Two processes, bf16 as in the YAMLs, gradients of two micro-batches per step. What a dial saves on a GPU alone (host
memory, fused kernels, copies beside the computation) shows here as its price without the saving.
"""

from collections.abc import Iterator
from dataclasses import replace

from bench_turns import run_in_turn, speed_ratio
from bench_work import IGNORE, SIZES, Loop, make_rows
from launching import RECIPES

MIB = 2**20
ROUNDS = 8  # enough to see what a dial is worth; no bar hangs on it
TOLERANCE = 2e-3  # of the loss in bf16: norms in fp32 and a loss in chunks round differently
MODEL = {**SIZES, "vocab_size": 16384}
LAYOUT = {"processes": 2, "rows_per_step": 16, "accumulation": 2, "length": 512, "dtype": "bf16", "sizes": MODEL}
OFF = {"fsdp_activation_checkpointing": False}

# Dial, the keys it adds to the row before, what else it changes; "recompute ..." take one another's place.
PERFORMANCE = (
    ("finetune.py, default.yaml", {}, {"runs": "finetune"}),
    ("recompute: selective", {"hook_checkpoint_mode": "selective"}, {}),
    ("recompute: every 2nd block", {"hook_checkpoint_mode": "full", "hook_checkpoint_every_n_blocks": 2}, {}),
    ("2 blocks per unit", {"hook_wrap_blocks_per_unit": 2}, {}),
    ("gradients reduced once a step", {"hook_reduce_every_micro_batch": False}, {}),
    ("2 units gathered ahead", {"hook_prefetch_units": 2}, {}),
    ("finetune_performance.py", {}, {"runs": "finetune_performance"}),
    ("packed rows", {}, {"rows": "packed"}),
    ("blocks compiled", {}, {"compiles_blocks": True}),
    ("recompute: none", OFF, {}),
)
MEM_LIMIT = (
    ("finetune.py, no recompute", OFF, {"runs": "finetune"}),
    ("recompute: every 2nd block", {"fsdp_activation_checkpointing": True, "hook_checkpoint_every_n_blocks": 2}, {}),
    ("recompute: every block", {"hook_checkpoint_every_n_blocks": 1}, {}),
    ("embeddings and head apart", {"hook_wrap_embeddings": True}, {}),
    ("gradients reduced in bf16", {"hook_reduce_dtype": "bf16"}, {}),
    ("finetune_mem_limit.py: loss in chunks", {}, {"runs": "finetune_mem_limit"}),
    ("optimizer state in host memory", {"hook_offload_optimizer": True}, {}),
    ("recompute inputs in host memory", {"fsdp_activation_checkpointing_offload": True}, {}),
    ("parameters in host memory", {"hook_offload_optimizer": False, "fsdp_offload_params": True}, {}),
    ("norms in fp32", {"hook_norm_dtype": "fp32"}, {}),
)
NOT_ON_A_CPU = "host memory"  # what these rows say: the dial runs, is exact, and saves nothing where all is on the host


def ladder() -> Iterator[str]:
    """Cumulative: each row has the dials of the rows above it; ratios are to the row above."""
    yield (
        f"Llama, hidden size {MODEL['hidden_size']}, {MODEL['num_hidden_layers']} layers, vocabulary "
        f"{MODEL['vocab_size']:,}, bf16, 2 processes, 16 rows of 512 tokens a step in 2 micro-batches. Speed: label "
        f"tokens per second, medians of {ROUNDS} steps taken in turn, [95% bounds]; memory: live tensor bytes at the "
        "peak of a step of rank 0. Each row adds a dial to the row above and is compared with that row."
    )
    for script, dials in (("finetune_performance", PERFORMANCE), ("finetune_mem_limit", MEM_LIMIT)):
        if not (RECIPES / f"{script}.py").is_file():
            yield f"\n{script}.py is not there yet; left out"
            continue
        yield f"\n{script}.py{'':24} {'speed':>7} {'[95% bounds]':>14} {'peak MiB':>9} {'ratio':>6}  collectives"
        yield from climb(dials)


def climb(dials: tuple[tuple[str, dict, dict], ...]) -> Iterator[str]:
    """Measure the rows of one ladder beside one another, a step in turn."""
    loops: dict[str, Loop] = {}
    loop = Loop("finetune", **LAYOUT)
    for name, keys, changes in dials:
        loop = replace(loop, keys={**loop.keys, **keys}, **changes)
        loops[name] = loop
    measured = run_in_turn(loops, ROUNDS, TOLERANCE)
    above = dials[0][0]
    for name, found in measured.items():
        more_labels = label_tokens(loops[name]) / label_tokens(loops[above])
        speed, lower, upper = (value * more_labels for value in speed_ratio(found.seconds, measured[above].seconds))
        number = sum(number for number, _ in found.collectives.values())
        size = sum(size for _, size in found.collectives.values()) / MIB
        line = f"{name:38} {speed:6.3f} [{lower:.3f}, {upper:.3f}] {found.peak_bytes / MIB:9.1f} "
        line += f"{found.peak_bytes / measured[above].peak_bytes:6.3f}  {number}, {size:.1f} MiB"
        yield line + (" (saves nothing on a CPU)" if NOT_ON_A_CPU in name else "")
        above = name
    whole, _, _ = speed_ratio(found.seconds, measured[dials[0][0]].seconds)
    yield f"last row by the first: {whole * label_tokens(loops[above]) / label_tokens(loops[dials[0][0]]):.3f}"


def label_tokens(loop: Loop) -> int:
    """Label tokens of a step: all but a document's first. See bench_loops.make_rows."""
    return sum(label != IGNORE for row in make_rows(loop)[: loop.rows_per_step] for label in row["labels"])
