"""What a training step of a GPT on a machine will take: bytes in each tier, bytes moved, seconds. Pure numbers.

The layout, the budgets and the homes of the optimizer's states come from the functions that the engine itself uses, so
that a plan is what the engine does. The simplest mode that fits is taken:

| mode | parameters | optimizer states |
|---|---|---|
| near | stay near, a copy far until the first update | near |
| hybrid | fit near together, the rest of near holds states | some groups' near, the rest far |
| far | travel | far |
| full | travel | near is filled with states, because far alone is too small |
| disk | travel, from the disk where far cannot hold them | far, and what far cannot hold on disk |
"""

from dataclasses import dataclass, field, replace
from math import inf

from pstar.config import Config
from pstar.errors import ConfigError
from pstar.layout.budget import (
    Costs,
    auto_layouts,
    homes_by,
    homes_for_capacity,
    smallest_far_budget,
    smallest_near_budget,
)
from pstar.layout.layout import Layout, least_waste, make_layout
from pstar.planner.adam_choice import AdamChoice, Speeds, adam_traffic_bytes, choose_adam
from pstar.planner.gpt_shape import GptShape
from pstar.planner.machines import Machine

PRECISIONS = ("fp32", "bf16", "fp16")
MODES = ("near", "hybrid", "far", "full", "disk")


def costs_of(precision: str, accumulates: bool = False) -> Costs:
    """Bytes per element of each kind of model data: 16 in fp32, 14 in bf16 (split master), 16 in fp16; 2 more with
    accumulation in 16 bit. The numbers of pstar.numerics.precision, which a test compares. Raises ConfigError."""
    if precision not in PRECISIONS:
        raise ConfigError(f"precision is {precision!r}; choose one of {', '.join(PRECISIONS)}")
    param, states = {"fp32": (4, 8), "bf16": (2, 10), "fp16": (2, 12)}[precision]
    return Costs(param, 4 if accumulates else param, states)


@dataclass(frozen=True)
class Job:
    """How a model is trained. Batch and sequence are those of one micro-step on one GPU."""

    batch: int = 1
    seq_len: int = 1024
    precision: str = "bf16"
    recompute: bool = True
    """Full activation checkpointing, a layer at a time."""
    micro_steps: int = 1
    chunk_elems: int | str = "auto"
    ownership: str = "whole"
    communication: str = "group"
    offload_activations: bool = False
    """What backward needs waits far meanwhile (pstar.chunks.activation_offload)."""
    near_states: str = "margin"
    """margin or fill, as in pstar's configuration."""

    def __post_init__(self) -> None:
        for name in ("batch", "seq_len", "micro_steps"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give a whole number of at least 1")
        for name in ("recompute", "offload_activations"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give true or false")
        if self.near_states not in ("margin", "fill"):
            raise ConfigError(f"near_states is {self.near_states!r}; choose margin or fill")
        size = self.chunk_elems
        if size != "auto" and (type(size) is not int or size < 1):
            raise ConfigError(f"chunk size is {size!r}; give a positive number of elements, or auto")
        costs_of(self.precision)

    @property
    def costs(self) -> Costs:
        return costs_of(self.precision, self.micro_steps > 1)

    @property
    def bytes_per_value(self) -> int:
        """Of an activation."""
        return 4 if self.precision == "fp32" else 2

    def activations_of(self, shape: GptShape) -> tuple[int, int, int]:
        """(bytes near at the worst moment, bytes far at the end of forward, bytes that come back) of one micro-step."""
        numbers = (self.batch, self.seq_len, self.bytes_per_value, self.recompute)
        away, back = shape.offloaded_bytes(*numbers) if self.offload_activations else (0, 0)
        return shape.activation_bytes(*numbers, self.offload_activations), away, back


@dataclass(frozen=True)
class Prediction:
    """The answer. Bytes and seconds are those of one rank and one optimizer step; see predict."""

    shape: GptShape
    machine: Machine
    job: Job
    num_params: int
    mode: str | None
    """One of MODES; None where it does not fit."""
    layout: Layout
    near_budget: int
    """For chunks: what the GPU has left beside activations and reserves."""
    activation_bytes: int
    near_bytes: int
    """Most model data near at once; a bound, reached where the budget does not bind."""
    far_bytes: int
    """Most far at once: chunks, and activations that are offloaded."""
    disk_bytes: int
    far_room: int
    disk_room: int
    near_groups: int
    """Groups whose states live near."""
    short_of: dict[str, int] = field(default_factory=dict)
    """Bytes that are missing, by tier, where it does not fit."""
    moved: dict[str, int] = field(default_factory=dict)
    """As in the engine's ledger: far to near, near to far, gather, reduce; and the disk's."""
    seconds: dict[str, float] = field(default_factory=dict)
    adam: AdamChoice | None = None
    offloaded_bytes: int = 0
    """Activations far at the end of forward."""

    @property
    def fits(self) -> bool:
        return self.mode is not None

    @property
    def gpu_peak_bytes(self) -> int:
        """Of one GPU: model data, activations, and what the machine reserves."""
        return self.near_bytes + self.activation_bytes + self.machine.gpu_bytes - self.machine.usable_gpu_bytes

    @property
    def tokens_per_s(self) -> float:
        """Of all GPUs together."""
        tokens = self.job.batch * self.job.seq_len * self.job.micro_steps * self.machine.num_gpus
        return tokens / self.seconds["step"] if self.seconds else 0.0


def choose_layout(shape: GptShape, costs: Costs, num_ranks: int, near_budget: int, job: Job) -> tuple[Layout, int, str]:
    """(layout, the least near bytes it needs, the module that needs them), as pstar.planner.plan.Plan chooses it.

    Where nothing fits into near_budget it is the layout that needs least.
    """
    modules = shape.modules()
    if job.chunk_elems != "auto":
        layouts = [make_layout(modules, min(job.chunk_elems, shape.num_params), num_ranks, job.ownership)]
    else:
        layouts = auto_layouts(modules, num_ranks, costs, near_budget, job.ownership, job.communication)
    uses = shape.uses()
    needs: dict[int, tuple[int, str]] = {}

    def need(layout: Layout) -> int:
        """Asked of a few layouts only: it takes as long as making one."""
        if layout.chunk_elems not in needs:
            needs[layout.chunk_elems] = smallest_near_budget(layout, uses, costs, job.communication)
        return needs[layout.chunk_elems][0]

    best = least_waste(layouts, lambda layout: need(layout) <= near_budget) or min(layouts, key=need)
    return best, *needs[best.chunk_elems]


def predict(shape: GptShape, machine: Machine, job: Job | None = None, modes: tuple[str, ...] = MODES) -> Prediction:
    """Whether a model trains on a machine, in the first of `modes` in which it does, with which bytes and how fast.

    A chunk is in each tier once at most but for what the engine keeps as an equal copy. Far and disk are divided equally
    among the ranks of a node. Raises ConfigError for a sequence longer than the model has positions.
    """
    job = job or Job()
    if job.seq_len > shape.positions:
        raise ConfigError(f"seq_len is {job.seq_len}, the model has {shape.positions} positions; give at most that")
    costs = job.costs
    activations, away, back = job.activations_of(shape)
    near_budget = machine.usable_gpu_bytes - activations
    layout, need, _ = choose_layout(shape, costs, machine.num_gpus, max(near_budget, 0), job)
    far_room, disk_room = machine.usable_host_bytes, machine.usable_disk_bytes
    chunk_room = far_room - away    # the engine offloads what far has room for beside all that chunks may need there
    near_homes = homes_by(job.near_states, layout, near_budget, costs, job.communication, need, Config.prefetch)

    mode, homes, far, disk, short = None, [], 0, 0, {}
    if need > near_budget:
        short["near"] = need - near_budget
        far = smallest_far_budget(layout, [], costs, job.micro_steps > 1)
    else:
        for candidate in modes:
            homes, far, disk = _tiers(candidate, layout, near_homes, near_budget, need, costs, job, chunk_room)
            right = {"near": len(homes) == len(layout.groups), "hybrid": 0 < len(homes) < len(layout.groups)}
            if right.get(candidate, True) and far <= chunk_room and disk <= disk_room:
                mode = candidate
                break
        else:
            short = {tier: miss for tier, miss in (("far", far - chunk_room), ("disk", disk - disk_room)) if miss > 0}
    near = _near_bytes(layout, homes, near_budget, costs, job) if not short.get("near") else need
    answer = {"shape": shape, "machine": machine, "job": job, "num_params": layout.num_params, "layout": layout,
              "near_budget": near_budget, "activation_bytes": activations, "near_bytes": near,
              "far_bytes": _far_peak(layout, homes, far, away, mode, costs, job), "offloaded_bytes": away,
              "disk_bytes": disk, "far_room": far_room, "disk_room": disk_room, "near_groups": len(homes), "mode": mode,
              "short_of": short}
    if mode is None:
        return Prediction(**answer)
    moved = moved_bytes(layout, homes, near_budget, costs, job) | {"disk to far": disk, "far to disk": disk}
    away, back = job.micro_steps * away, job.micro_steps * back
    moved |= {"near to far": moved["near to far"] + away, "far to near": moved["far to near"] + back}
    adam, seconds = _seconds(shape, machine, job, layout, homes, moved, away + back)
    return Prediction(**answer, moved=moved, adam=adam, seconds=seconds)


def _tiers(mode: str, layout: Layout, near_homes: list[int], near_budget: int, need: int, costs: Costs, job: Job,
           far_room: int) -> tuple[list[int], int, int]:
    """(groups whose states are near, far bytes, disk bytes) of one rank in one mode."""
    accumulates = job.micro_steps > 1
    if mode in ("near", "hybrid", "far"):
        homes = [] if mode == "far" else near_homes
        return homes, smallest_far_budget(layout, homes, costs, accumulates), 0
    homes = homes_for_capacity(layout, near_budget, need, costs)
    far = smallest_far_budget(layout, homes, costs, accumulates, grads_wait_far=True)
    if mode == "full" or far <= far_room:
        return homes, far, 0
    # Disk: states of as many groups as must, then gradients and parameters; two groups' worth of them pass through far.
    elsewhere = [group.piece_elems for group in layout.groups if group.index not in set(homes)]
    states = sum(elsewhere) * costs.states
    passing = 2 * max(elsewhere, default=0) * costs.total
    disk = min(far + passing - far_room, states + layout.elems_per_rank * (costs.param + costs.grad))
    return homes, far + passing - disk, disk


def _far_peak(layout: Layout, homes: list[int], chunks: int, away: int, mode: str | None, costs: Costs, job: Job) -> int:
    """Most bytes far at once: of chunks, which are complete when all gradients are there, and of offloaded activations.

    Activations are complete when the last backward begins. On one rank, without accumulation, no gradient is far by then,
    and as these come activations go. Else gradients may wait there from before; so may states, in place of those that lie
    on disk.
    """
    if layout.num_ranks > 1 or job.micro_steps > 1 or mode in ("disk", "full", None):
        return chunks + away
    at_home = set(homes)
    grads = costs.grad * sum(group.piece_elems for group in layout.groups if group.index not in at_home)
    return max(chunks, chunks - grads + away)


def _grads_in_flight(layout: Layout, homes: list[int], costs: Costs, job: Job, at_once: int) -> int:
    """Near bytes of gradients that are being collected or reduced: of the largest units, and of their reduced pieces.

    None on one rank whose groups are all at home near: their gradients are counted there.
    """
    beside = layout.num_ranks > 1
    if not beside and len(homes) == len(layout.groups):
        return 0
    grad = costs.grad if beside or job.micro_steps == 1 else costs.param    # micro-steps are summed far
    sizes = sorted((grad * (unit.elems + (layout.groups[unit.group].piece_elems if beside else 0))
                    for unit in layout.units(job.communication)), reverse=True)
    return sum(sizes[:at_once])


def _resident_bytes(layout: Layout, homes: list[int], costs: Costs) -> int:
    """Near bytes of the groups at home there: states and gradients, and with several ranks the own pieces."""
    per_elem = costs.states + costs.grad + (costs.param if layout.num_ranks > 1 else 0)
    return per_elem * sum(layout.groups[index].piece_elems for index in homes)


def _near_bytes(layout: Layout, homes: list[int], near_budget: int, costs: Costs, job: Job) -> int:
    # A bound: the next unit's gradients may begin before the last one's are all there.
    wanted = (costs.param * layout.total_elems + _resident_bytes(layout, homes, costs)
              + _grads_in_flight(layout, homes, costs, job, at_once=2))
    return min(near_budget, wanted)


def moved_bytes(layout: Layout, homes: list[int], near_budget: int, costs: Costs, job: Job) -> dict[str, int]:
    """Bytes of one rank and step after the first, as the engine's ledger counts them.

    With room near for R elements of parameters out of T, a forward and a backward over them bring each of the T - R twice
    (2(n - C) loads, in the words of the maths), but what was updated far is brought in forward however much
    room there is. Over p ranks all T are gathered after an update, whereby (p - 1) / p of each comes from others.
    """
    ranks, total = layout.num_ranks, layout.total_elems
    near_elems = sum(layout.groups[index].elems for index in homes)
    resident, in_flight = _resident_bytes(layout, homes, costs), _grads_in_flight(layout, homes, costs, job, at_once=1)
    crowded = resident + in_flight > near_budget    # mode full: states stay near, gradients and parameters come and go
    if crowded:
        resident = costs.states * near_elems // ranks
    far_elems = total if crowded else total - near_elems
    away = total - min(total, max((near_budget - resident - in_flight) // costs.param, 0))
    again = away * (2 * job.micro_steps - 1)
    fetched = (total if ranks > 1 else max(far_elems, away)) + again
    share = far_elems / total if ranks > 1 else 1.0
    dirty = near_elems if crowded else max(0, away - far_elems) if ranks == 1 else 0    # updated near, and have to leave
    for_update = (costs.grad + costs.param) * near_elems if crowded else 0
    left = costs.grad * far_elems
    if ranks == 1 and job.micro_steps > 1:    # what is updated far is summed there, from each micro-step's gradients
        left = costs.param * job.micro_steps * (total - near_elems) + costs.grad * (far_elems - (total - near_elems))
    return {
        "far to near": int(costs.param * fetched * share + for_update) // ranks,
        "near to far": (left + costs.param * dirty) // ranks,
        "gather": costs.param * fetched * (ranks - 1) // ranks,
        "reduce": costs.grad * total * (ranks - 1) // ranks,
    }


def _seconds(shape: GptShape, machine: Machine, job: Job, layout: Layout, homes: list[int],
             moved: dict[str, int], offloaded: int) -> tuple[AdamChoice, dict[str, float]]:
    """What a step takes. Copies each way, collectives and compute overlap within forward plus backward, so the longest
    counts; but compute waits for the copies of activations, `offloaded` bytes both ways together. Then comes Adam: near and
    far at the same time, and the disk with them."""
    costs = job.costs
    layers, head = shape.forward_flops(job.batch, job.seq_len)
    flops = machine.gpu_flops / (2 if job.precision == "fp32" else 1)    # TF32
    compute = job.micro_steps * (layers * (4 if job.recompute else 3) + head * 3) / flops
    offload = offloaded / machine.link_bytes_per_s
    link = max(moved["far to near"], moved["near to far"]) / machine.link_bytes_per_s
    received = moved["gather"] + moved["reduce"]
    collectives = received / machine.gpu_link_bytes_per_s if received else 0.0
    near_elems = sum(layout.groups[index].piece_elems for index in homes)
    traffic = adam_traffic_bytes(costs)
    speeds = Speeds((machine.host_adam_params_per_s or machine.host_memory_bytes_per_s / traffic) / machine.gpus_per_node,
                    machine.link_bytes_per_s, machine.gpu_memory_bytes_per_s,
                    machine.host_memory_bytes_per_s / machine.gpus_per_node)
    adam = choose_adam(speeds, costs, layout.elems_per_rank - near_elems)
    near_adam = near_elems * traffic / machine.gpu_memory_bytes_per_s
    rate = machine.disk_bytes_per_s / machine.gpus_per_node
    disk = (moved["disk to far"] + moved["far to disk"]) / rate if moved["disk to far"] else 0.0
    passes, update = max(compute + offload, link, collectives), max(near_adam, adam.seconds, disk)
    return adam, {"compute": compute, "offload": offload, "link": link, "collectives": collectives, "adam near": near_adam,
                  "adam far": adam.seconds, "disk": disk, "passes": passes, "update": update, "step": passes + update}


def what_would_fit(answer: Prediction) -> list[str]:
    """For one that does not fit: each change that alone would do, in words; empty where none was found."""
    shape, machine = answer.shape, answer.machine
    job = replace(answer.job, chunk_elems=answer.layout.chunk_elems)    # one layout, not a search, for each trial
    trials = []
    if not job.recompute:
        trials.append(("--recompute", machine, replace(job, recompute=True)))
    if not job.offload_activations:
        trials.append(("--offload-activations", machine, replace(job, offload_activations=True)))
    if job.precision != "bf16" and machine.has_bf16:
        trials.append(("--precision bf16", machine, replace(job, precision="bf16")))
    for batch in (job.batch // 2, job.batch // 4, 1):
        if 1 <= batch < job.batch:
            trials.append((f"--batch {batch}", machine, replace(job, batch=batch)))
    found = [words for words, other, changed in trials if predict(shape, other, changed).fits][:3]
    for words, names in (("--host-memory {}GiB a node", ("host_bytes",)), ("--gpu-memory {}GiB", ("gpu_bytes",)),
                         ("--disk {}GiB a node", ("disk_bytes",))):
        amount = _least(shape, machine, job, names[0])
        if amount < inf:
            found.append(words.format(-(-int(amount) // 2**30)))
    return found


def _least(shape: GptShape, machine: Machine, job: Job, name: str) -> float:
    """The least bytes of one tier, to a part in 32, with which the model fits on the machine otherwise as it is."""
    def fits(amount: int) -> bool:
        speed = {"disk_bytes_per_s": machine.disk_bytes_per_s or 1e9} if name == "disk_bytes" else {}
        return predict(shape, replace(machine, **{name: amount}, **speed), job).fits

    low = max(getattr(machine, name), 2**30)
    high = next((low * 2**power for power in range(1, 9) if fits(low * 2**power)), None)
    if high is None:
        return inf
    low = high // 2
    for _ in range(5):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
