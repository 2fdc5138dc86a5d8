"""An estimate of a step's time from what it computes, moves and sends. It ranks plans; it promises no time.

Sources of the presets: the vendors' data sheets (dense bf16 and fp32 operations, memory bandwidth, link bandwidth in
one direction). The shares of them that a training step reaches are rules of thumb, printed with every estimate.
"""

from dataclasses import dataclass

from hooks.live import GPUS_PER_MACHINE

COMPUTE_SHARE, MEMORY_SHARE, LINK_SHARE = 0.55, 0.75, 0.75  # reached of the peaks
CALL_S = 30e-6  # per collective
HOST_LINK = 25e9  # bytes/s to and from pinned host memory (PCIe 4 x16)
OPTIMIZER_BYTES = 7 / 4  # a fused AdamW reads weight, gradient, two moments and writes three of them: 7 for 4 held


@dataclass(frozen=True)
class Gpu:
    """GiB, operations/s, bytes/s."""

    name: str
    memory_gib: float
    bf16: float
    fp32: float
    memory_bandwidth: float
    link: float  # to another GPU of the machine
    network: float = 50e9  # to another machine, per GPU (400 Gbit/s)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("b200", 178.0, 2250e12, 75e12, 8.0e12, 900e9),
        Gpu("h200", 139.8, 989e12, 67e12, 4.8e12, 450e9),
        Gpu("h100", 79.1, 989e12, 67e12, 3.35e12, 450e9),
        Gpu("a100-80", 79.3, 312e12, 19.5e12, 2.0e12, 300e9, 25e9),
        Gpu("a100-40", 39.4, 312e12, 19.5e12, 1.55e12, 300e9, 25e9),
        Gpu("l40s", 44.4, 362e12, 91e12, 0.86e12, 32e9, 12.5e9),
        Gpu("a10", 22.1, 125e12, 31e12, 0.6e12, 32e9, 12.5e9),
        Gpu("l4", 22.0, 121e12, 30e12, 0.3e12, 32e9, 12.5e9),
        Gpu("rtx4090", 23.6, 165e12, 82e12, 1.0e12, 32e9, 12.5e9),
    )
}
DEFAULT_GPU = "h100"


def step_seconds(
    counts: dict[str, int], gpu: Gpu, num_processes: int, is_fp32: bool, state: int, copied: int
) -> dict[str, float]:
    """Seconds of one optimizer step by what takes them; `step` is their sum, with communication behind computation.

    `counts` are MemoryTrace.counts. `state` is what the optimizer reads, `copied` what goes to the host and back, in
    bytes.
    """
    phases = [name for name in counts if name.endswith(" flops") and not name.startswith("evaluation")]
    flops = sum(counts[name] for name in phases)
    moved = sum(n for name, n in counts.items() if name.endswith(" moved") and not name.startswith("evaluation"))
    compute = flops / (COMPUTE_SHARE * (gpu.fp32 if is_fp32 else gpu.bf16))
    compute += moved / (MEMORY_SHARE * gpu.memory_bandwidth)
    bandwidth = gpu.link if num_processes <= GPUS_PER_MACHINE else gpu.network
    sent = sum(n for name, n in counts.items() if name.endswith(" bytes"))
    calls = sum(n for name, n in counts.items() if name.endswith(" calls"))
    communication = sent * (num_processes - 1) / num_processes / (LINK_SHARE * bandwidth) + calls * CALL_S
    communication *= num_processes > 1
    optimizer = OPTIMIZER_BYTES * state / (MEMORY_SHARE * gpu.memory_bandwidth)
    copies = copied / HOST_LINK
    step = max(compute, communication) + optimizer + copies
    return {
        "computation": compute,
        "communication": communication,
        "optimizer": optimizer,
        "copies to and from the host": copies,
        "step": step,
    }


ASSUMPTIONS = (
    f"step times assume {COMPUTE_SHARE:.0%} of the GPU's peak in matrix products, {MEMORY_SHARE:.0%} of its memory "
    f"bandwidth, {LINK_SHARE:.0%} of its links, communication behind computation, {GPUS_PER_MACHINE} GPUs a machine: "
    "they rank plans and promise no time"
)
