"""Predicts a training step of a GPT on a machine: bytes in each tier, bytes moved, seconds. Pure numbers.

The layout, the budgets and the tiers of the optimizer states come from the functions that the engine itself uses, so the
engine does what a plan says. The first mode that fits is taken:

| mode | parameters | optimizer states |
|---|---|---|
| near | stay in near, with a copy in far until the first update | in near |
| hybrid | all fit into near, the rest of near holds states | some groups' in near, the rest in far |
| far | are copied and evicted | in far |
| full | are copied and evicted | near is filled with states, because far alone is too small |
| disk | are copied and evicted; on disk if far cannot hold them | in far, the rest on disk |
"""

from dataclasses import dataclass, field, replace
from math import inf

from pstar.config import Config
from pstar.errors import ConfigError
from pstar.layout.budget import (
    Costs,
    auto_layouts,
    choose_near_states,
    frozen_bytes,
    near_states_for_capacity,
    smallest_far_budget,
    smallest_near_budget,
)
from pstar.layout.layout import CODE_BLOCK, HOST_PACKING, Layout, Packing, least_waste, make_layout
from pstar.planner.adam_choice import AdamChoice, Speeds, adam_traffic_bytes, choose_adam
from pstar.planner.disk_traffic import disk_traffic
from pstar.planner.gpt_shape import GptShape
from pstar.planner.machines import Machine

PRECISIONS = ("fp32", "bf16", "fp16")
MODES = ("near", "hybrid", "far", "full", "disk")


def costs_of(precision: str, accumulates: bool = False, state_bits: int = 32, frozen_bits: int = 32) -> Costs:
    """Bytes per element of each kind of model data: 16 in fp32, 14 in bf16 (split master), 16 in fp16; 2 more with
    accumulation in 16 bit; with 8-bit states 6 less, and 8 for the scales of each block. A test compares them with
    pstar.numerics.precision. Raises ConfigError."""
    if state_bits not in (8, 32):
        raise ConfigError(f"state_bits is {state_bits!r}; choose 8 or 32")
    if frozen_bits not in (4, 8, 32):
        raise ConfigError(f"frozen_bits is {frozen_bits!r}; choose 4, 8 or 32 (no codes)")
    if precision not in PRECISIONS:
        raise ConfigError(f"precision is {precision!r}; choose one of {', '.join(PRECISIONS)}")
    param, states = {"fp32": (4, 8), "bf16": (2, 10), "fp16": (2, 12)}[precision]
    if state_bits == 8:
        return Costs(param, 4 if accumulates else param, states - 6, 8, frozen_bits)
    return Costs(param, 4 if accumulates else param, states, 0, frozen_bits)


@dataclass(frozen=True)
class Job:
    """How a model is trained. batch and seq_len: of one micro-step on one GPU."""

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
    """Activations wait in far for their backward (pstar.chunks.activation_offload)."""
    near_states: str = "margin"
    """margin or fill, as in pstar's configuration."""
    state_bits: int = 32
    """32 or 8, as optimizer.params.state_bits."""
    frozen_bits: int = 32
    """32, 8 or 4, as in pstar's configuration."""

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
        costs_of(self.precision, state_bits=self.state_bits, frozen_bits=self.frozen_bits)

    @property
    def costs(self) -> Costs:
        return costs_of(self.precision, self.micro_steps > 1, self.state_bits, self.frozen_bits)

    @property
    def bytes_per_value(self) -> int:
        """Bytes of one value of an activation."""
        return 4 if self.precision == "fp32" else 2

    def activations_of(self, shape: GptShape) -> tuple[int, int, int]:
        """(bytes near at the worst moment, bytes far at the end of forward, bytes copied back) of one micro-step."""
        numbers = (self.batch, self.seq_len, self.bytes_per_value, self.recompute)
        away, back = shape.offloaded_bytes(*numbers) if self.offload_activations else (0, 0)
        return shape.activation_bytes(*numbers, self.offload_activations), away, back


@dataclass(frozen=True)
class Prediction:
    """The result of predict. Bytes and seconds are for one rank and one optimizer step."""

    shape: GptShape
    machine: Machine
    job: Job
    mode: str | None
    """One of MODES; None if the model does not fit."""
    layout: Layout
    activation_bytes: int
    near_bytes: int
    """Peak of model data in near; an upper bound, which is reached if the budget does not limit it."""
    far_bytes: int
    """Peak of far: chunks and offloaded activations."""
    disk_bytes: int
    near_groups: int
    """Number of groups whose states are in near."""
    short_of: dict[str, int] = field(default_factory=dict)
    """Missing bytes by tier, if the model does not fit."""
    moved: dict[str, int] = field(default_factory=dict)
    """Bytes moved, as in the engine's ledger: far to near, near to far, gather, reduce; and to and from disk."""
    seconds: dict[str, float] = field(default_factory=dict)
    adam: AdamChoice | None = None
    offloaded_bytes: int = 0
    """Bytes of activations in far at the end of forward."""
    @property
    def fits(self) -> bool:
        return self.mode is not None

    @property
    def num_params(self) -> int:
        return self.layout.num_params

    @property
    def near_budget(self) -> int:
        """Bytes for chunks: the GPU's memory less activations and reserves."""
        return self.machine.usable_gpu_bytes - self.activation_bytes

    @property
    def far_room(self) -> int:
        return self.machine.usable_host_bytes

    @property
    def disk_room(self) -> int:
        return self.machine.usable_disk_bytes

    @property
    def frozen_bytes(self) -> int:
        """Bytes of frozen parameters of all ranks, padding included; in far, or on disk, all the time."""
        return frozen_bytes(self.layout, self.job.costs)

    @property
    def gpu_peak_bytes(self) -> int:
        """Bytes of one GPU: model data, activations, and the machine's reserves."""
        return self.near_bytes + self.activation_bytes + self.machine.gpu_bytes - self.machine.usable_gpu_bytes

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all GPUs together."""
        tokens = self.job.batch * self.job.seq_len * self.job.micro_steps * self.machine.num_gpus
        return tokens / self.seconds["step"] if self.seconds else 0.0


def choose_layout(shape: GptShape, costs: Costs, num_ranks: int, near_budget: int, job: Job,
                  packing: Packing = HOST_PACKING) -> tuple[Layout, int, str]:
    """(layout, the least near bytes it needs, the module that needs them), as pstar.planner.plan.Plan chooses it.

    If no layout fits into near_budget, the one that needs least.
    """
    modules = shape.modules()
    if job.chunk_elems != "auto":
        layouts = [make_layout(modules, min(job.chunk_elems, shape.num_params), num_ranks, job.ownership, costs.scales > 0,
                               costs.in_codes, packing.align_elems)]
    else:
        layouts = auto_layouts(modules, num_ranks, costs, near_budget, job.ownership, job.communication, packing)
    uses = shape.uses()
    needs: dict[int, tuple[int, str]] = {}

    def need(layout: Layout) -> int:
        """Called for few layouts only: it takes as long as making a layout."""
        if layout.chunk_elems not in needs:
            needs[layout.chunk_elems] = smallest_near_budget(layout, uses, costs, job.communication)
        return needs[layout.chunk_elems][0]

    best = least_waste(layouts, lambda layout: need(layout) <= near_budget, packing.group_cost_elems)
    best = best or min(layouts, key=need)
    return best, *needs[best.chunk_elems]


def predict(shape: GptShape, machine: Machine, job: Job | None = None, modes: tuple[str, ...] = MODES) -> Prediction:
    """Predicts whether a model fits a machine, in the first of `modes` that fits, with its bytes and seconds.

    Each byte of model data counts in one tier, except for equal copies that the engine keeps. Far and disk are divided
    equally among the ranks of a node. Raises ConfigError for a sequence longer than the model has positions.
    """
    job = job or Job()
    costs = replace(job.costs, page_bytes=machine.reserves.host_page_bytes)
    if job.seq_len > shape.positions:
        raise ConfigError(f"seq_len is {job.seq_len}, the model has {shape.positions} positions; give at most that")
    activations, away, back = job.activations_of(shape)
    near_budget = machine.usable_gpu_bytes - activations
    layout, need, _ = choose_layout(shape, costs, machine.num_gpus, max(near_budget, 0), job, machine.packing)
    far_room, disk_room = machine.usable_host_bytes, machine.usable_disk_bytes
    chunk_room = far_room - away    # the engine offloads only into room of far that chunks never need
    near_state_groups = choose_near_states(job.near_states, layout, near_budget, costs, job.communication, need,
                                           Config.prefetch)

    mode, updated_near, far, disk, short = None, [], 0, 0, {}
    if need > near_budget:
        short["near"] = need - near_budget
        far = smallest_far_budget(layout, [], costs, job.micro_steps > 1)
    else:
        for candidate in modes:
            updated_near, far, disk = _tiers(candidate, layout, near_state_groups, near_budget, need, costs, job, chunk_room)
            num = len(layout.trained)
            right = {"near": len(updated_near) == num, "hybrid": 0 < len(updated_near) < num}
            if right.get(candidate, True) and far <= chunk_room and disk <= disk_room:
                mode = candidate
                break
        else:
            short = {tier: miss for tier, miss in (("far", far - chunk_room), ("disk", disk - disk_room)) if miss > 0}
    near = _near_bytes(layout, updated_near, near_budget, costs, job) if not short.get("near") else need
    answer = {"shape": shape, "machine": machine, "job": job, "layout": layout, "activation_bytes": activations,
              "near_bytes": near, "far_bytes": _far_peak(layout, updated_near, far, away, mode, costs, job),
              "offloaded_bytes": away, "disk_bytes": disk, "near_groups": len(updated_near),
              "mode": mode, "short_of": short}
    if mode is None:
        return Prediction(**answer)
    moved = moved_bytes(layout, updated_near, near_budget, costs, job) | {"disk to far": 0, "far to disk": 0}
    if disk:
        moved |= disk_traffic(layout, updated_near, costs, near_budget, chunk_room, job.micro_steps)
    away, back = job.micro_steps * away, job.micro_steps * back
    moved |= {"near to far": moved["near to far"] + away, "far to near": moved["far to near"] + back}
    adam, seconds = _seconds(shape, machine, job, layout, updated_near, moved, away + back)
    return Prediction(**answer, moved=moved, adam=adam, seconds=seconds)


def _tiers(mode: str, layout: Layout, near_state_groups: list[int], near_budget: int, need: int, costs: Costs, job: Job,
           far_room: int) -> tuple[list[int], int, int]:
    """(groups whose states are near, far bytes, disk bytes) of one rank in one mode."""
    accumulates = job.micro_steps > 1
    if mode in ("near", "hybrid", "far"):
        updated_near = [] if mode == "far" else near_state_groups
        return updated_near, smallest_far_budget(layout, updated_near, costs, accumulates), 0
    updated_near = near_states_for_capacity(layout, near_budget, need, costs)
    far = smallest_far_budget(layout, updated_near, costs, accumulates, grads_wait_far=True)
    if mode == "full" or far <= far_room:
        return updated_near, far, 0
    # On disk: states of as many groups as necessary, then gradients and parameters. Two groups at a time pass through far.
    elsewhere = [group for group in layout.groups if group.index not in set(updated_near)]
    states = sum(costs.state_bytes(group) for group in elsewhere if not group.frozen)
    passing = 2 * max((costs.far_bytes(*costs.buffer_bytes(group)) for group in elsewhere), default=0)
    params = sum(costs.param_bytes(group.piece_elems, group.coded) for group in layout.groups)
    disk = min(far + passing - far_room, states + params + costs.grad * layout.trained_elems // layout.num_ranks)
    return updated_near, far + passing - disk, disk


def _far_peak(layout: Layout, updated_near: list[int], chunks: int, away: int, mode: str | None, costs: Costs,
              job: Job) -> int:
    """Peak bytes of far: chunks, whose peak is when all gradients have arrived, and offloaded activations.

    The peak of activations is at the begin of the last backward. On one rank, without accumulation, no gradient is in far
    at that moment; then gradients arrive while activations are freed. Otherwise gradients may be in far before that, and so
    may states instead of those on disk.
    """
    if layout.num_ranks > 1 or job.micro_steps > 1 or mode in ("disk", "full", None):
        return chunks + away
    near = set(updated_near)
    grads = costs.far_bytes(*(costs.grad * group.piece_elems for group in layout.trained if group.index not in near))
    return max(chunks, chunks - grads + away)


def _grads_in_flight(layout: Layout, updated_near: list[int], costs: Costs, job: Job, at_once: int) -> int:
    """Near bytes of gradients that are being collected or reduced: of the largest units, with their reduced pieces.

    0 on one rank if all groups' states are in near: _resident_bytes counts their gradients.
    """
    several_ranks = layout.num_ranks > 1
    if not several_ranks and len(updated_near) == len(layout.trained):
        return 0
    grad = costs.grad if several_ranks or job.micro_steps == 1 else costs.param    # micro-steps are summed far
    sizes = sorted((grad * (unit.elems + (layout.groups[unit.group].piece_elems if several_ranks else 0))
                    for unit in layout.units(job.communication) if not layout.groups[unit.group].frozen), reverse=True)
    return sum(sizes[:at_once])


def _resident_bytes(layout: Layout, updated_near: list[int], costs: Costs) -> int:
    """Near bytes of the groups with states in near: states and gradients, and with several ranks this rank's pieces."""
    per_elem = costs.grad + (costs.param if layout.num_ranks > 1 else 0)
    groups = [layout.groups[index] for index in updated_near]
    return sum(per_elem * group.piece_elems + costs.state_bytes(group) for group in groups)


def _near_bytes(layout: Layout, updated_near: list[int], near_budget: int, costs: Costs, job: Job) -> int:
    # An upper bound: gradients of the next unit may arrive before those of the last unit are complete.
    wanted = (costs.param * layout.total_elems + _resident_bytes(layout, updated_near, costs)
              + _grads_in_flight(layout, updated_near, costs, job, at_once=2))
    if layout.num_ranks == 1 and len(updated_near) == len(layout.trained) and costs.grad == costs.param:
        # Plan.keeps_gradients: they are tensors of autograd, without a chunk's padding.
        wanted -= costs.grad * sum(group.elems - sum(slot.numel for slot in group.slots) for group in layout.trained)
    return min(near_budget, wanted)


def moved_bytes(layout: Layout, updated_near: list[int], near_budget: int, costs: Costs, job: Job) -> dict[str, int]:
    """Bytes that one rank moves in a step after the first, as the engine's ledger counts them.

    Near has room for R of T elements of parameters. Forward and backward copy each of the other T - R to near twice:
    2(n - C) loads in the notation of the pages. Parameters that were updated in far are copied in forward in any case.
    With p ranks all trained elements are gathered after an update, and (p - 1) / p of each comes from other ranks. Frozen
    ones stay as long as there is room, are copied to near and never to far. Those in codes cross link and collectives in
    codes; their share of the fetched elements is at first what is not fetched for an update, then their share of all.
    """
    ranks, total, trained = layout.num_ranks, layout.total_elems, layout.trained_elems
    near_elems = sum(layout.groups[index].elems for index in updated_near)
    resident = _resident_bytes(layout, updated_near, costs)
    in_flight = _grads_in_flight(layout, updated_near, costs, job, at_once=1)
    crowded = resident + in_flight > near_budget    # mode full: only states stay near, gradients and parameters are evicted
    if crowded:
        resident = sum(costs.state_bytes(layout.groups[index]) for index in updated_near)
    far_elems = trained if crowded else trained - near_elems
    frozen = total - trained
    away = total - min(total, max((near_budget - resident - in_flight) // costs.param, 0))
    again = away * (2 * job.micro_steps - 1)
    fetched = max(trained if ranks > 1 else far_elems, away) + again
    share = (far_elems + frozen) / total if ranks > 1 else 1.0    # the rest of this rank's pieces is near
    coded = sum(group.elems for group in layout.frozen if group.coded)
    first = max(0, away - (trained if ranks > 1 else far_elems))    # elements fetched in the first forward only for room
    in_codes = min(first, frozen) * coded / max(frozen, 1) + again * coded / total
    params = costs.param * fetched - in_codes * (costs.param - costs.block_bytes / CODE_BLOCK if coded else 0)
    dirty = near_elems if crowded else max(0, away - far_elems - frozen) if ranks == 1 else 0    # updated near, and evicted
    for_update = (costs.grad + costs.param) * near_elems if crowded else 0
    left = costs.grad * far_elems
    if ranks == 1 and job.micro_steps > 1:    # for updates in far, each micro-step's gradients are copied and summed there
        left = costs.param * job.micro_steps * (trained - near_elems) + costs.grad * (far_elems - (trained - near_elems))
    return {
        "far to near": int(params * share + for_update) // ranks,
        "near to far": (left + costs.param * dirty) // ranks,
        "gather": int(params) * (ranks - 1) // ranks,
        "reduce": costs.grad * trained * (ranks - 1) // ranks,
    }


def host_adam_rate(machine: Machine, costs: Costs) -> float:
    """Parameters that the host updates in a second for one rank."""
    rates = machine.speeds
    rate = rates.host_adam_params_per_s or rates.host_memory_bytes_per_s / adam_traffic_bytes(costs)
    return rate / machine.gpus_per_node


def _seconds(shape: GptShape, machine: Machine, job: Job, layout: Layout, updated_near: list[int],
             moved: dict[str, int], offloaded: int) -> tuple[AdamChoice, dict[str, float]]:
    """The choice for updates in far, and the seconds of a step. In forward plus backward, copies in each direction,
    collectives and compute overlap, so the longest counts; but compute waits for the copies of activations (`offloaded`
    bytes in both directions together). Then come Adam in near, Adam in far and the disk, all at the same time."""
    costs = job.costs
    rates = machine.speeds
    flops = rates.gpu_flops / (2 if job.precision == "fp32" else 1)    # TF32
    compute = job.micro_steps * shape.step_flops(job.batch, job.seq_len, job.recompute) / flops
    offload = offloaded / rates.link_bytes_per_s
    link = max(moved["far to near"], moved["near to far"]) / rates.link_bytes_per_s
    received = moved["gather"] + moved["reduce"]
    collectives = received / rates.gpu_link_bytes_per_s if received else 0.0
    near_elems = sum(layout.groups[index].piece_elems for index in updated_near)
    traffic = adam_traffic_bytes(costs)
    speeds = Speeds(host_adam_rate(machine, costs), rates.link_bytes_per_s, rates.gpu_memory_bytes_per_s,
                    rates.host_memory_bytes_per_s / machine.gpus_per_node)
    adam = choose_adam(speeds, costs, layout.trained_elems // layout.num_ranks - near_elems)
    near_adam = near_elems * traffic / rates.gpu_memory_bytes_per_s
    rate = rates.disk_bytes_per_s / machine.gpus_per_node
    through_disk = moved["disk to far"] + moved["far to disk"]
    disk = through_disk / rate if through_disk else 0.0
    passes, update = max(compute + offload, link, collectives), max(near_adam, adam.seconds, disk)
    return adam, {"compute": compute, "offload": offload, "link": link, "collectives": collectives, "adam near": near_adam,
                  "adam far": adam.seconds, "disk": disk, "passes": passes, "update": update, "step": passes + update}


def what_would_fit(answer: Prediction) -> list[str]:
    """For a model that does not fit: single changes with which it would fit, as text; empty if none was found."""
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
    """The least bytes of one tier, to a part in 32, with which the model fits on the otherwise unchanged machine."""
    def fits(amount: int) -> bool:
        speed = {"disk_bytes_per_s": machine.speeds.disk_bytes_per_s or 1e9} if name == "disk_bytes" else {}
        return predict(shape, machine.changed(**{name: amount}, **speed), job).fits

    low = max(getattr(machine, name), 2**30)
    high = next((low * 2**power for power in range(1, 9) if fits(low * 2**power)), None)
    if high is None:
        return inf
    low = high // 2
    for _ in range(5):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
