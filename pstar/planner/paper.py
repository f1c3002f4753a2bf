"""The largest model that fits a machine, for this engine and for other layouts, compared with published figures.

No formula is fitted to the published figures: they are printed next to the formulas' results, with the assumptions.
"""

from dataclasses import dataclass, replace

from pstar.planner.gpt_shape import MODELS, GptShape
from pstar.planner.machines import MACHINES, Machine
from pstar.planner.predict import MODES, Job, predict

STRATEGIES = ("patrickstar", "patrickstar-margin", "zero-offload", "ddp", "ddp-fp32-grads")
"""patrickstar: this engine in any mode. patrickstar-margin: this engine in the modes MARGIN_MODES. Near then holds optimizer
states only in the room that all parameters together leave (PatrickStar, section 8.2).

zero-offload: Ren et al. 2021. Each GPU holds all 16-bit parameters, 2 bytes each, and the gradients of one layer before they
are copied to the host. The hosts together hold one copy of 16-bit gradients and fp32 master and moments, 14 bytes each.
ddp: 16-bit parameters and gradients, fp32 master and moments on every GPU, 16 bytes a parameter; 18 with fp32 gradients."""

PSTAR_STRATEGIES = ("patrickstar", "patrickstar-margin")
MARGIN_MODES = MODES[:3]
"""All modes but `full` and `disk`."""


@dataclass(frozen=True)
class Published:
    """A machine and the largest model that was reported for it."""

    machine: str
    width: GptShape
    """The published model: its width is kept, its number of layers is searched."""
    patrickstar_params: float
    """Number of parameters of the largest model that PatrickStar trained on the machine."""
    deepspeed_billions: str
    """The same source's claim about DeepSpeed ZeRO-3 with offload on the machine, in billions of parameters."""


# PatrickStar: Fang et al., IEEE TPDS 2023 (arXiv 2108.05818) and the README of Tencent/PatrickStar, which says "over twice
# as large as DeepSpeed" (v0.4.3) and "over 6x larger than DeepSpeed v0.5.7".
PUBLISHED = (
    Published("yard", MODELS["18B"], 18e9, "below 9"),
    Published("superpod", MODELS["68B"], 68e9, "below 11.3"),
    Published("superpod-4", MODELS["175B"], 175e9, "none given"),
)


def fits(shape: GptShape, machine: Machine, strategy: str, job: Job) -> bool:
    """Whether the model's bytes fit the machine under one of STRATEGIES. Raises ValueError for another strategy."""
    if strategy == "patrickstar":
        return predict(shape, machine, job).fits
    if strategy == "patrickstar-margin":
        return predict(shape, machine, job, MARGIN_MODES).fits
    params = shape.num_params
    gpu_bytes = machine.usable_gpu_bytes - shape.activation_bytes(job.batch, job.seq_len, 2, job.recompute)
    if strategy == "zero-offload":
        largest_module = max(sum(numel for _, numel in module.parameters) for module in shape.modules())
        return 2 * params + 2 * largest_module <= gpu_bytes and 14 * params <= machine.usable_host_bytes * machine.num_gpus
    if strategy in ("ddp", "ddp-fp32-grads"):
        return (16 if strategy == "ddp" else 18) * params <= gpu_bytes
    raise ValueError(f"strategy is {strategy!r}; one of {', '.join(STRATEGIES)}")


def largest_model(machine: Machine, strategy: str, width: GptShape, job: Job | None = None) -> GptShape | None:
    """The GPT with the width of `width` and as many layers as fit the machine; None if not even one layer fits.

    job: default batch 1 of 1024 tokens, full recomputation, bf16 if the machine's GPUs have it, else fp16.
    """
    job = job or Job(precision="bf16" if machine.has_bf16 else "fp16")

    # An upper bound: every strategy takes more than 12 bytes a parameter.
    total_bytes = machine.num_gpus * (machine.usable_gpu_bytes + machine.usable_host_bytes + machine.usable_disk_bytes)
    layer = replace(width, layers=2).num_params - replace(width, layers=1).num_params
    low, high = 0, total_bytes // (12 * layer) + 1    # low fits, high does not
    if strategy in PSTAR_STRATEGIES:
        # Choose the chunk size once, for a model of about the right depth: then each trial computes one layout.
        about = replace(width, layers=max(1, total_bytes // (20 * layer)))
        job = replace(job, chunk_elems=predict(about, machine, job).layout.chunk_elems)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(replace(width, layers=middle), machine, strategy, job):
            low = middle
        else:
            high = middle
    return replace(width, layers=low) if low else None


def paper_rows() -> list[dict[str, object]]:
    """One row for each published machine: parameters in billions by strategy, and the published figures."""
    rows = []
    for entry in PUBLISHED:
        machine = MACHINES[entry.machine]
        row: dict[str, object] = {"machine": machine.name, "precision": "bf16" if machine.has_bf16 else "fp16"}
        for strategy in STRATEGIES:
            shape = largest_model(machine, strategy, _narrow(entry.width, strategy))
            row[strategy] = shape.num_params / 1e9 if shape else 0.0
        rows.append(row | {"published": entry.patrickstar_params / 1e9, "published DeepSpeed": entry.deepspeed_billions})
    return rows


def _narrow(width: GptShape, strategy: str) -> GptShape:
    """The width to search with: 2048 for data parallelism, because at most one layer of the largest models' width fits."""
    return MODELS["1B"] if strategy.startswith("ddp") else width


ASSUMPTIONS = (
    "Batch 1 of 1024 tokens a GPU, full recomputation, vocabulary 50257, the published model's width (2048 for data "
    "parallelism); the depth is searched.",
    "Reserved: 1 GiB and 5 % of each GPU, 8 GiB of each node and 2 GiB for each process.",
    "V100 has no bf16: this engine's fp16 keeps a separate gradient and an fp32 master, 16 bytes a parameter where "
    "PatrickStar's shared slot takes 14, as does this engine's bf16.",
    "Published figures are of runs, not bounds of memory: the run of 175 billion was planned at that size.",
    "pstar fills near with optimizer states where far is too small. By margin only, near holds states in the room that all "
    "parameters and gradients leave. These models leave none, so the host's bytes alone decide.",
    "ZeRO-Offload's layout is counted without its own buffers and fragments, so it is an upper bound; what was "
    "published of DeepSpeed is ZeRO-3 with offload as it ran.",
)
