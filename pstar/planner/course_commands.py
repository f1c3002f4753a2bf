"""The command of the course that runs a layout, or that comes nearest, and the library that runs it in production."""

import json
from dataclasses import dataclass
from math import gcd

from pstar.planner.gpt_shape import GptShape
from pstar.planner.gpus import Cluster
from pstar.planner.layout_memory import Layout, LayoutJob, pstar_bytes

# (layers, width, heads, positions) -> --model-config; a test compares them with gpt2_chinese/model/config.py.
CONFIGS = {
    (4, 128, 4, 128): "tiny", (12, 768, 12, 1024): "small", (24, 1024, 16, 1024): "medium",
    (36, 1280, 20, 1024): "large", (48, 1600, 25, 1024): "xl",
}  # fmt: skip
LIBRARIES = {
    "plain": "plain PyTorch",
    "ddp": "torch DistributedDataParallel; Accelerate starts it",
    "zero1": "torch ZeroRedundancyOptimizer, DeepSpeed stage 1, Megatron-Core's distributed optimizer",
    "zero2": "DeepSpeed stage 2, FSDP2 with reshard_after_forward=False",
    "zero3": "FSDP2 (fully_shard), DeepSpeed stage 3",
    "offload": "DeepSpeed with offload_optimizer",
    "split": "Megatron-LM, torchtitan",
    "split_zero": "Megatron-LM with --use-distributed-optimizer (stage 1), torchtitan (FSDP2 with tensor, pipeline and "
                  "context parallelism)",
    "split_offload": "Megatron-LM with --optimizer-cpu-offload",
    "pstar": "pstar; ColossalAI's Gemini descends from the same idea",
}
RECOMPUTE = {"00_single": "--recompute block", "02_ddp": "--recompute block", "04_apex": "--recompute block"}
"""The flag of chapters that recompute by the package's own code; the others have --activation-checkpointing."""


@dataclass(frozen=True)
class Command:
    """How to run a layout.

    Attributes:
        chapter: the folder below chapters/; '' if no chapter comes near.
        lines: commands, in order.
        runs: whether the chapter runs this layout; if not, `lines` run what comes nearest.
        library: a key of LIBRARIES.
        notes: what to know: cut_vocabulary (chapter 05 needs a vocabulary that --tp divides), nodes (a line on each node),
            order (chapter 05 numbers data parallel ranks last, this plan pipeline ranks).
    """

    chapter: str
    lines: tuple[str, ...]
    runs: bool
    library: str
    notes: tuple[str, ...]


def runs_here(layout: Layout) -> bool:
    """Whether a chapter runs the layout: none splits sequences, and none combines ZeRO with a split model."""
    return not (layout.context > 1 or (layout.splits_the_model and (layout.zero or layout.offload)))


def library_of(layout: Layout) -> str:
    """The key of LIBRARIES for a layout."""
    if layout.pstar:
        return "pstar"
    if layout.splits_the_model:
        return "split_offload" if layout.offload else "split_zero" if layout.zero else "split"
    if layout.offload:
        return "offload"
    return f"zero{layout.zero}" if layout.zero else "ddp" if layout.data > 1 else "plain"


def command_of(cluster: Cluster, job: LayoutJob, layout: Layout) -> Command:
    """The course's command for a layout."""
    micros, own, notes, runs = layout.micro_batches(job), [], [], runs_here(layout)
    if job.batch % layout.shards:    # ranks that split a sequence become data parallel ones in what comes nearest
        return Command("", (), False, library_of(layout), ())
    if layout.context > 1:
        micros = gcd(micros, job.batch // layout.shards)
    if layout.pstar:
        chapter = "07_patrickstar"
        own = [f"--near-memory {cluster.usable_gpu_bytes // 2**20}MiB"]
        own += ["--ownership node"] * (layout.replicas > 1)
        own += ["--near-states fill"] if pstar_bytes(cluster, job, layout)[1] else []
    elif layout.tensor * layout.pipeline > 1:
        chapter = "05_model_parallel"
        own = [f"--tp {layout.tensor} --pp {layout.pipeline}"]
        notes += ["cut_vocabulary"] * (layout.tensor > 1) + ["order"] * (layout.pipeline > 1 and layout.shards > 1)
    elif layout.zero or layout.context > 1:
        chapter = "06_zero"
        own = [f"--zero-stage {layout.zero}" + (" --offload optimizer" if layout.offload else "")]
    elif job.precision == "fp32":
        chapter = "00_single" if cluster.gpus == 1 else "02_ddp"
    else:
        chapter, own = "04_apex", ["--opt-level O2"]
    if layout.recompute:
        own.append(RECOMPUTE.get(chapter, "--activation-checkpointing"))
    config, first = _config(job.shape)
    flags = " ".join([f"--model-config {config} --seq-len {job.seq_len} --batch-size {job.batch} --grad-accum {micros}",
                      f"--precision {job.precision}", *own])  # fmt: skip
    if cluster.nodes > 1:
        notes.append("nodes")
        start = (f"bash scripts/torchrun.sh --nnodes={cluster.nodes} --node-rank=0 --nproc-per-node={cluster.per_node} "
                 f"--master-addr=node1 --master-port=29500 chapters/{chapter}/train.py {flags}")
    else:
        ranks = "" if chapter == "00_single" else f"--nproc {cluster.gpus} "
        start = f"bash chapters/{chapter}/train.sh {ranks}{flags}"
    return Command(chapter, (*first, start), runs, library_of(layout), tuple(notes))


def _config(shape: GptShape) -> tuple[str, list[str]]:
    """(the value of --model-config, a line that makes the file if it is one)."""
    sizes = shape.layers, shape.hidden, shape.heads, shape.positions
    if sizes in CONFIGS:
        return CONFIGS[sizes], []
    content = json.dumps(dict(zip(("n_layer", "n_embd", "n_head", "n_positions"), sizes, strict=True)))
    return "model.json", [f"echo '{content}' > model.json"]
