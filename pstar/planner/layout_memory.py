"""Layouts of a training job over GPUs, and the bytes that a rank holds under each. Pure numbers.

A layout says how many ranks split the batch (data), each block (tensor), the blocks (pipeline) and the sequence (context);
what is sharded over data x context (ZeRO stage); whether activations are computed again; where the optimizer's states are.
"""

from dataclasses import dataclass

from pstar.planner.gpt_shape import GptShape
from pstar.planner.gpus import Cluster
from pstar.planner.shares import (
    HOST_KINDS,
    KINDS,
    Bytes,
    activation_bytes,
    activation_costs,
    block_parameters,
    ceil_div,
    parameter_costs,
    pstar_shares,
    stage_outside,
    value_bytes,
    zero_shares,
)


@dataclass(frozen=True)
class LayoutJob:
    """The training to plan: a GPT-2, and the tokens of one optimizer step of all ranks."""

    shape: GptShape
    seq_len: int
    batch: int
    """The GLOBAL batch in sequences."""
    precision: str
    """fp32, bf16 or fp16."""


@dataclass(frozen=True)
class Layout:
    """One way to share a job. data x tensor x pipeline x context is the number of GPUs."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    """1F1B, as many stages as ranks."""
    context: int = 1
    """Ranks that split each sequence; they hold the same weights, like data parallel ranks."""
    zero: int = 0
    recompute: bool = False
    """Full recomputation of each block."""
    offload: bool = False
    """Optimizer states, and the gradients that they need, in host memory."""
    pstar: bool = False
    micro_batch: int = 1
    """Sequences of one forward pass of a replica."""
    replicas: int = 1
    """Under pstar: how often the cluster holds all chunks; once, or once on each node (ownership node)."""

    @property
    def shards(self) -> int:
        """Ranks with the same part of the model."""
        return self.data * self.context

    @property
    def owners(self) -> int:
        """Ranks that share pstar's chunks."""
        return self.data // self.replicas

    @property
    def splits_the_model(self) -> bool:
        return self.tensor * self.pipeline * self.context > 1

    def micro_batches(self, job: LayoutJob) -> int:
        """Micro-batches of a replica in one step."""
        return job.batch // (self.data * self.micro_batch)


def costs_of(job: LayoutJob, layout: Layout) -> tuple[Bytes, Bytes, int]:
    """(bytes per parameter, activation bytes per token and channel, bytes of a value in products) as programs hold them.

    In 16 bit: replicas as chapter 04's O2; ZeRO as chapter 06; a model that is split without ZeRO as chapter 05 under
    autocast (O1), with ZeRO as Megatron's distributed optimizer, which reduces fp32 gradients: 2 + 4 + 12. pstar sums the
    gradients of several micro-batches in fp32.
    """
    precision, value = job.precision, value_bytes(job.precision)
    if precision == "fp32":
        return parameter_costs("ddp", "fp32"), activation_costs("fp32"), value
    if layout.pstar:
        sums = {"gradients": 4} if layout.micro_batches(job) > 1 else {}
        return parameter_costs("pstar", precision) | sums, activation_costs(precision), value
    if layout.zero:
        sums = {"gradients": 4} if layout.splits_the_model else {}
        return parameter_costs("zero", precision) | sums, activation_costs(precision), value
    level = "O1" if layout.splits_the_model else "O2"
    return parameter_costs("ddp", level), activation_costs(level), value


def stage_parameters(job: LayoutJob, layout: Layout, rank: int) -> tuple[int, int, int]:
    """(parameters in no block, in one block, number of blocks) of pipeline rank `rank`."""
    shape, tensor = job.shape, layout.tensor
    outside = stage_outside(shape.hidden, shape.positions, shape.vocab, tensor, layout.pipeline, rank)
    return outside, block_parameters(shape.hidden, tensor), shape.layers // layout.pipeline


def activations(job: LayoutJob, layout: Layout, rank: int) -> int:
    """Bytes of activations of a pipeline rank at the worst moment; 1F1B keeps min(m, p - rank) micro-batches."""
    shape, tensor = job.shape, layout.tensor
    _, costs, value = costs_of(job, layout)
    tokens = layout.micro_batch * job.seq_len // layout.context
    live = min(layout.micro_batches(job), layout.pipeline - rank)
    return activation_bytes(costs, 4 * live + 4 + 2 * value, tokens * shape.hidden, tokens * ceil_div(shape.vocab, tensor),
                            shape.layers // layout.pipeline, tensor, live, live, rank == 0, rank == layout.pipeline - 1,
                            layout.recompute)  # fmt: skip


def rank_bytes(job: LayoutJob, layout: Layout, rank: int) -> Bytes:
    """Bytes of a pipeline rank by kind, for any layout but pstar's; kinds called host_... are in host memory."""
    costs = costs_of(job, layout)[0]
    outside, block, layers = stage_parameters(job, layout, rank)
    offload = "optimizer" if layout.offload else "none"
    found = zero_shares(costs, outside, block, layers, layout.shards, layout.zero, offload)
    found["activations"] = activations(job, layout, rank)
    return found


def pstar_bytes(cluster: Cluster, job: LayoutJob, layout: Layout) -> tuple[Bytes, int]:
    """(bytes of a rank by kind, bytes of the device that states fill in place of parameters), under pstar.

    As pstar.planner.predict: states are on the device in the room that parameters and gradients leave, or, where the host
    has no room for the rest, in all room but least_near; then parameters and gradients travel and the host has room for all.
    host_buffers: its copies of parameters (and gradients) that are on the device, too.
    """
    costs, kept = costs_of(job, layout)[0], activations(job, layout, 0)
    outside, block, layers = stage_parameters(job, layout, 0)
    total, room, filled = outside + layers * block, max(0, cluster.usable_gpu_bytes - kept), 0
    found = pstar_shares(costs, total, layout.owners, room)
    found["host_buffers"] = found["parameters"]
    if sum(found[kind] for kind in HOST_KINDS) > cluster.usable_host_bytes:
        states = (costs["masters"] + costs["moments"]) * ceil_div(total, layout.owners)
        filled = min(states, max(0, room - least_near(job, layout)))
        found = pstar_shares(costs, total, layout.owners, room - filled)
        found["optimizer"] = min(states, filled + found["optimizer"])
        found["host_optimizer"] = states - found["optimizer"]
        found["host_buffers"] = found["parameters"] + found["gradients"]
    found["activations"] = kept
    return found, filled


def least_near(job: LayoutJob, layout: Layout) -> int:
    """Bytes that pstar needs on the device in any case: parameters and gradients of the embedding and of one block."""
    costs = costs_of(job, layout)[0]
    working = job.shape.vocab * job.shape.hidden + block_parameters(job.shape.hidden)
    return (costs["parameters"] + costs["gradients"]) * working


@dataclass(frozen=True)
class Need:
    """What the fullest rank needs, and what it has."""

    kinds: Bytes
    device: int
    host: int
    device_room: int
    host_room: int

    @property
    def device_missing(self) -> int:
        return max(0, self.device - self.device_room)

    @property
    def host_missing(self) -> int:
        return max(0, self.host - self.host_room)

    @property
    def fits(self) -> bool:
        return self.device <= self.device_room and self.host <= self.host_room


def need_of(cluster: Cluster, job: LayoutJob, layout: Layout) -> Need:
    """The need of the fullest rank of a pipeline: its first or its last. Those between hold less than the first."""
    device_room, host_room = cluster.usable_gpu_bytes, cluster.usable_host_bytes
    if layout.pstar:
        kinds = pstar_bytes(cluster, job, layout)[0]
        device = max(sum(kinds[kind] for kind in KINDS), kinds["activations"] + least_near(job, layout))
        return Need(kinds, device, sum(kinds[kind] for kind in HOST_KINDS), device_room, host_room)
    ends = []
    for rank in sorted({0, layout.pipeline - 1}):
        kinds = rank_bytes(job, layout, rank)
        ends.append((sum(kinds[kind] for kind in KINDS), sum(kinds[kind] for kind in HOST_KINDS), kinds))
    device, _, kinds = max(ends, key=lambda end: end[0])
    return Need(kinds, device, max(host for _, host, _ in ends), device_room, host_room)
