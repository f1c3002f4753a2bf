"""Which layout is the fastest that fits: enumerates all layouts of a job over a cluster, and explains those that do not fit.

Enumerated: tensor parallelism inside a node (it divides the heads and a node's GPUs), pipelines (1F1B; stages divide the
layers), context parallelism (2 x ranks divide the sequence, so that each has an early and a late piece), data parallelism
(divides the global batch) with ZeRO 0 to 3; each with and without full recomputation, and with sharded optimizer states also
in host memory; pstar over data parallel ranks, with all chunks once or on each node; every size of micro-batch. Left out:
interleaved schedules, sequence and expert parallelism.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from pstar.errors import ConfigError
from pstar.planner.course_commands import runs_here
from pstar.planner.gpt_shape import GptShape
from pstar.planner.gpus import Cluster
from pstar.planner.layout_memory import Layout, LayoutJob, Need, need_of
from pstar.planner.layout_time import PARTS, Seconds, seconds_of

PRECISIONS = ("fp32", "bf16", "fp16")
TECHNIQUES = ("ddp", "zero1", "zero2", "zero3", "offload", "tensor", "pipeline", "3d", "context", "pstar")
CLOSE = 1.02
"""Times that differ by less than 2 % count as equal: then the layout with fewer techniques is better."""
MOST_GPUS, MOST_BATCH = 4096, 65536


def technique_of(layout: Layout) -> str:
    """The one of TECHNIQUES that names a layout best. ddp on one GPU is plain training."""
    if layout.pstar:
        return "pstar"
    if layout.context > 1:
        return "context"
    if layout.tensor > 1 or layout.pipeline > 1:
        return "3d" if layout.tensor > 1 and layout.pipeline > 1 else "tensor" if layout.tensor > 1 else "pipeline"
    if layout.offload:
        return "offload"
    return f"zero{layout.zero}" if layout.zero else "ddp"


def divisors(number: int) -> list[int]:
    """All divisors, in ascending order."""
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def layouts_of(cluster: Cluster, job: LayoutJob) -> Iterator[Layout]:
    """Every layout of the job over all GPUs of the cluster, whether it fits or not."""
    shape, gpus = job.shape, cluster.gpus
    for tensor in divisors(gcd(shape.heads, cluster.per_node)):
        for pipeline in divisors(gcd(shape.layers, gpus // tensor)):
            for context in divisors(gpus // (tensor * pipeline)):
                data = gpus // (tensor * pipeline * context)
                if job.batch % data or (context > 1 and job.seq_len % (2 * context)):
                    continue
                split = (data, tensor, pipeline, context)
                for micro_batch in divisors(job.batch // data):
                    for recompute in (False, True):
                        for zero, offload in _states(data * context):
                            yield Layout(*split, zero, recompute, offload, False, micro_batch)
                        if data == gpus:
                            for replicas in sorted({1, cluster.nodes if cluster.per_node > 1 else 1}):
                                yield Layout(*split, 0, recompute, False, True, micro_batch, replicas)


def _states(shards: int) -> list[tuple[int, bool]]:
    """(ZeRO stage, offload): on one rank no stage shards anything, and ZeRO-Offload is stage 2."""
    if shards == 1:
        return [(0, False), (2, True)]
    return [(0, False), *((zero, offload) for offload in (False, True) for zero in (1, 2, 3))]


@dataclass(frozen=True)
class Candidate:
    """A layout with what it needs and how long a step takes."""

    layout: Layout
    need: Need
    seconds: Seconds

    @property
    def step(self) -> float:
        total = 0.0
        for part in PARTS:
            total += self.seconds[part]
        return total

    @property
    def order(self) -> tuple[int, ...]:
        """Fewer techniques first; then a total order, so that the answer depends on no order of enumeration."""
        it = self.layout
        weight = (it.zero + 2 * (it.tensor > 1) + 3 * (it.pipeline > 1) + 3 * (it.context > 1) + 2 * it.offload
                  + 4 * it.pstar + (it.replicas > 1) + it.recompute)  # fmt: skip
        return weight, it.tensor, it.pipeline, it.context, it.zero, int(it.recompute), int(it.offload), -it.micro_batch


def choose(candidates: list[Candidate]) -> Candidate:
    """The simplest of the candidates that are as fast as the fastest, up to CLOSE."""
    limit = CLOSE * min(candidate.step for candidate in candidates)
    return min((candidate for candidate in candidates if candidate.step <= limit), key=lambda it: it.order)


@dataclass(frozen=True)
class Refusal:
    """Why no layout of a technique works. reason: device, host, one_gpu, batch, heads, layers, heads_layers or length.

    nearest: for device and host the layout that misses the fewest bytes; those and the largest term follow.
    """

    technique: str
    reason: str
    nearest: Candidate | None = None
    missing: int = 0
    term: str = ""
    term_bytes: int = 0


@dataclass(frozen=True)
class Answer:
    """The best layout, the best of each technique that fits (the best one first), and why the others do not."""

    cluster: Cluster
    job: LayoutJob
    rows: list[Candidate]
    refusals: list[Refusal]
    tried: int
    """Number of layouts."""
    fitting: int
    here: Candidate | None
    """The best of the layouts that fit and that a chapter of the course runs."""

    @property
    def best(self) -> Candidate | None:
        return self.rows[0] if self.rows else None

    def tokens_per_s(self, candidate: Candidate) -> float:
        """Tokens per second of all GPUs together."""
        return self.job.batch * self.job.seq_len / candidate.step

    def mfu(self, candidate: Candidate) -> float:
        """Share of all GPUs' peak; what is computed again does not count (Chowdhery et al. 2022, appendix B)."""
        shape, tokens = self.job.shape, self.job.batch * self.job.seq_len
        layer = 24.0 * tokens * shape.hidden * shape.hidden + 4.0 * tokens * self.job.seq_len * shape.hidden
        flops = 3 * (shape.layers * layer + 2.0 * tokens * shape.hidden * shape.vocab)
        peak = self.cluster.flops / (2 if self.job.precision == "fp32" else 1)
        return flops / candidate.step / self.cluster.gpus / peak


def plan_layouts(cluster: Cluster, job: LayoutJob) -> Answer:
    """Enumerates, drops what does not fit, ranks by predicted seconds. Raises ConfigError for a job that is impossible."""
    check(cluster, job)
    fitting: dict[str, list[Candidate]] = {}
    nearest: dict[str, Candidate] = {}
    tried = 0
    for layout in layouts_of(cluster, job):
        tried += 1
        name, need = technique_of(layout), need_of(cluster, job, layout)
        if need.fits:
            fitting.setdefault(name, []).append(Candidate(layout, need, seconds_of(cluster, job, layout)))
        elif name not in fitting:
            other = Candidate(layout, need, {})
            nearest[name] = min(nearest.get(name, other), other, key=_misses)
    everything = [candidate for found in fitting.values() for candidate in found]
    rows: list[Candidate] = []
    if everything:
        best = choose(everything)
        others = [choose(found) for name, found in fitting.items() if name != technique_of(best.layout)]
        rows = [best, *sorted(others, key=lambda it: (it.step, it.order))]
    refusals = [_refusal(cluster, job, name, nearest.get(name)) for name in TECHNIQUES if name not in fitting]
    here = [candidate for candidate in everything if runs_here(candidate.layout)]
    return Answer(cluster, job, rows, refusals, tried, len(everything), choose(here) if here else None)


def check(cluster: Cluster, job: LayoutJob) -> None:
    """Raises ConfigError, which names the flag, for numbers outside their limits."""
    for flag, number, most in (("--gpus", cluster.gpus, MOST_GPUS), ("--global-batch", job.batch, MOST_BATCH),
                               ("--seq-len", job.seq_len, 10**6)):
        if not 1 <= number <= most:
            raise ConfigError(f"{flag} {number}: give a whole number from 1 to {most}")
    if job.precision not in PRECISIONS:
        raise ConfigError(f"--precision {job.precision}: give one of {', '.join(PRECISIONS)}")
    if job.seq_len > job.shape.positions:
        raise ConfigError(f"--seq-len {job.seq_len}: the model has {job.shape.positions} positions; give at most that")
    if job.shape.mlp != 4 * job.shape.hidden or job.shape.lora_rank:
        raise ConfigError("--layouts counts models whose MLP is 4 times as wide as the model, with all parameters trained: "
                          "leave n_inner out, and --trainable all")


def _misses(candidate: Candidate) -> tuple[int, ...]:
    return candidate.need.device_missing + candidate.need.host_missing, *candidate.order


def _refusal(cluster: Cluster, job: LayoutJob, name: str, nearest: Candidate | None) -> Refusal:
    if nearest is None:
        return Refusal(name, _no_split(cluster, job, name))
    need = nearest.need
    reason = "device" if need.device_missing >= need.host_missing else "host"
    missing = max(need.device_missing, need.host_missing)
    kinds = {kind: size for kind, size in need.kinds.items() if kind.startswith("host_") == (reason == "host")}
    term = max(kinds, key=lambda kind: kinds[kind])    # the first one of equal ones
    return Refusal(name, reason, nearest, missing, term, kinds[term])


def _no_split(cluster: Cluster, job: LayoutJob, name: str) -> str:
    """Why there is no layout of a technique at all."""
    shape: GptShape = job.shape
    if cluster.gpus == 1:
        return "one_gpu"
    heads, layers = gcd(shape.heads, cluster.per_node) > 1, gcd(shape.layers, cluster.gpus) > 1
    if name == "tensor" and not heads:
        return "heads"
    if name == "pipeline" and not layers:
        return "layers"
    if name == "3d" and not (heads and layers):
        return "heads_layers"
    if name == "context" and all(job.seq_len % (2 * n) for n in divisors(cluster.gpus)[1:]):
        return "length"
    return "batch"
