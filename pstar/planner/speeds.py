"""Measures this rank's host, link and near memory, and chooses where groups with states in far are updated.

Speeds are measured once, when an engine starts, in a fraction of a second, and only if the choice depends on them. The
measurement runs the update's code: the Adam kernel with the precision's dtypes, and the engine's Links, so that a simulated
link has its simulated speed. All ranks measure at the same time, as they also update at the same time.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from pstar.comm.collectives import Collectives
from pstar.kernels import AdamOptions, adam_steps
from pstar.layout.budget import Costs, smallest_far_budget, smallest_streaming_budget
from pstar.layout.layout import num_blocks
from pstar.memory import accelerator
from pstar.memory.links import Links
from pstar.memory.pinned import registration_for
from pstar.memory.tier import FAR, NEAR, Tier, format_bytes
from pstar.numerics.precision import Precision
from pstar.planner.adam_choice import Speeds, adam_traffic_bytes, choose_adam
from pstar.planner.plan import Plan

REPETITIONS = 5
MOST_S = 0.05
"""Repetitions end after this time, so that a slow link does not delay the start."""
LONG_ENOUGH_S = 0.002
"""A copy must take so long to count: shorter ones measure mostly the cost of their start."""
FIRST_COPY_BYTES, MOST_COPY_BYTES = 2**12, 2**26
MOST_ADAM_ELEMS = 2**23
"""Of one update; 14 to 18 bytes each, 144 MiB at most."""
MOST_ADAM_BYTES = 2**30
"""Updates go around so many bytes: more than the processor's caches, like the states of a model that needs far. On 16 cores
beside an H200, updates of the same 112 MiB ran at 10 G parameters/s, of ten times as much at 4.6, as in a step."""
NEAR_COPIES = 8
"""Copies in one measurement: a GPU copies 64 MiB in less time than the launch takes."""

ASKED = "as far_states says"
NOTHING_FAR, ONE_MEMORY = "no group's states are far", "near is host memory too"
NO_CHOICE = (NOTHING_FAR, ONE_MEMORY)
"""Reasons with which there is no choice, and so no line in the report."""


def choose_far_states(plan: Plan, links: Links, collectives: Collectives, device: torch.device) -> tuple[str, str]:
    """("host" or "stream", why): the configuration's far_states, or for auto the faster one; the same on all ranks.

    Every rank calls it, before training. Both give the same numbers, only the speed differs. auto takes stream only if it
    can never raise a BudgetError that host would not raise.
    """
    if plan.config.far_states != "auto":
        return plan.config.far_states, ASKED
    reason = _known(plan, device)
    if reason:
        return "host", reason
    near = set(plan.near_state_groups)
    far_pieces = [group.piece_elems for group in plan.layout.trained if group.index not in near]
    collectives.from_all(None)    # so that all begin at once
    mine = measure_speeds(plan.precision, plan.grad_dtype, plan.costs, links, device, max(far_pieces), sum(far_pieces))
    speeds = slowest(collectives.from_all(mine))
    choice = choose_adam(speeds, plan.costs, sum(far_pieces))
    return choice.where, (f"{choice.host_seconds:.2g} s by the host, {choice.stream_seconds:.2g} s streamed: "
                          f"{in_words(speeds)}")


def _known(plan: Plan, device: torch.device) -> str:
    """The reason why the host updates groups in far, whatever the speeds; empty if the speeds decide."""
    config, costs, layout = plan.config, plan.costs, plan.layout
    if len(plan.near_state_groups) == len(layout.trained):
        return NOTHING_FAR
    if config.disk_path is not None:
        return "states may be on disk"    # they would cross two links
    if not config.optimizer.params.use_hybrid_adam:
        return "use_hybrid_adam is false"
    if config.overlap_update:
        return "overlap_update runs the update during the next forward"    # only the host can do that
    if config.speculative_update:
        return "speculative_update runs updates during backward"    # likewise
    # Near and far are the same memory and processor here: streaming only adds copies. That is also true with a simulated
    # link, but then speeds are measured and printed, to show the choice without a GPU.
    if device.type == "cpu" and not config.simulated_link:
        return ONE_MEMORY
    near = set(plan.near_state_groups)
    held = sum(costs.state_bytes(group) for group in layout.groups if group.index in near)
    # If activations share near's memory, only the least that chunks need is guaranteed.
    room = plan.near_budget - held if plan.near_memory is None else plan.least_near
    if room < smallest_streaming_budget(layout, costs):
        return "near has no certain room for all model data of a group"
    # Any block may be evicted for a group's states, also gradients of groups with states in near.
    late = plan.accumulates or config.find_unused_parameters
    if plan.far_budget is not None and plan.far_budget < smallest_far_budget(layout, [], costs, late):
        return "far has no certain room for what would make way"
    return ""


def slowest(speeds: list[Speeds]) -> Speeds:
    """The lowest of each speed: the update is over when the last rank has finished."""
    return Speeds(*(min(values) for values in zip(*(vars(each).values() for each in speeds), strict=True)))


def in_words(speeds: Speeds) -> str:
    """The speeds as text."""
    link, memory = format_bytes(speeds.link_bytes_per_s), format_bytes(speeds.gpu_memory_bytes_per_s)
    return (f"host Adam {speeds.host_adam_params_per_s / 1e9:.3g} G parameters/s, link {link}/s each way, near memory "
            f"{memory}/s")


def measure_speeds(precision: Precision, grad_dtype: torch.dtype, costs: Costs, links: Links, device: torch.device,
                   piece_elems: int, far_elems: int) -> Speeds:
    """The Speeds of this rank.

    Its buffers are temporary, outside the tiers and their budgets: a little more than 1 GiB at most, freed on return. It
    changes no random generator and no ledger.

    Args:
        precision, grad_dtype, costs: of the model data, all three from one plan.
        links: the engine's, without copies under way.
        device: near's device.
        piece_elems: elements of this rank's piece of the largest group, the most that one update or copy handles.
        far_elems: elements of all its pieces with states in far.
    """
    piece_elems = max(piece_elems, 1)
    elems = min(piece_elems, MOST_ADAM_ELEMS)
    num_updates = max(1, min(far_elems // elems, MOST_ADAM_BYTES // (elems * costs.total)))
    host = round(_host_adam(precision, grad_dtype, elems, num_updates))    # an integer: `near` below is exact
    link = _link(links, device, min(4 * piece_elems, MOST_COPY_BYTES))
    # Without a GPU near is the same memory, and Adam runs the same kernel on the same cores. It is exactly as fast, and so
    # "host" is chosen, however fast the link is. If a copy's speed were measured instead, noise would decide on CPUs.
    near = _near_memory(device) if accelerator.is_accelerator(device) else host * adam_traffic_bytes(costs)
    if accelerator.is_accelerator(device):
        accelerator.empty_caches()
    # Host memory is not measured separately: both directions of the link are measured at once, so it limits their speed.
    return Speeds(float(host), link, float(near))


def measure_here(precision: str, state_bits: int = 32) -> Speeds:
    """The Speeds of this machine for one process with one GPU or none, for fp32, bf16 or fp16."""
    device = accelerator.near_device(None)
    layout, links = Precision(precision, state_bits=state_bits), Links(device=device)
    grad_dtype = layout.grad_dtype(accumulates=False)
    costs = Costs(layout.param_dtype.itemsize, grad_dtype.itemsize, layout.state_bytes, layout.scale_bytes)
    try:
        return measure_speeds(layout, grad_dtype, costs, links, device, MOST_ADAM_ELEMS, MOST_ADAM_BYTES // costs.total)
    finally:
        links.close()


def _median_s(run: Callable[[], object]) -> float:
    """Median of the seconds that run takes, after one call to warm up."""
    run()
    taken: list[float] = []
    while len(taken) < REPETITIONS and sum(taken) < MOST_S:
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def _host_adam(precision: Precision, grad_dtype: torch.dtype, elems: int, num_updates: int) -> float:
    """Parameters per second of the host's Adam kernel, which goes around so many updates."""
    options = AdamOptions(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    updates = []
    for _ in range(num_updates):
        # Ones, not zeros: the system maps all pages that were never written to one page, which is in the cache.
        buffers = {kind: torch.ones(precision.numel_of(kind, elems, num_blocks(elems)), device="cpu",
                                    dtype=precision.states.get(kind, precision.param_dtype)) for kind in precision.kinds}
        buffers = precision.part_of(buffers, slice(None), slice(None))
        updates.append(precision.update(torch.ones(elems, dtype=grad_dtype, device="cpu"), buffers, step=1, options=options))
    around = itertools.cycle(updates)
    return elems / _median_s(lambda: adam_steps([next(around)]))


def _link(links: Links, device: torch.device, num_bytes: int) -> float:
    """Bytes per second between host and near, for each direction while both copy; copies of num_bytes or less."""
    far = Tier(FAR, torch.device("cpu"), registration=registration_for(device))    # buffers as the engine's
    near_in, near_out = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    far_in, far_out = (far.allocate(num_bytes, torch.uint8, "speed").fill_(1) for _ in range(2))

    def both(size: int) -> None:
        ways = [links.submit(FAR, NEAR, lambda: links.copy(near_in[:size], far_in[:size]), size),
                links.submit(NEAR, FAR, lambda: links.copy(far_out[:size], near_out[:size]), size)]
        for handle in ways:
            handle.wait()

    size = min(FIRST_COPY_BYTES, num_bytes)
    while True:    # larger copies until one takes long enough; for a slow link a small copy suffices
        seconds = _median_s(partial(both, size))
        if seconds >= LONG_ENOUGH_S or size == num_bytes:
            return size / seconds
        size = min(4 * size, num_bytes)


def _near_memory(device: torch.device) -> float:
    """Bytes per second that a GPU reads and writes in its own memory."""
    source, target = (torch.ones(MOST_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))

    def copies() -> None:
        for _ in range(NEAR_COPIES):
            target.copy_(source)
        torch.accelerator.synchronize(device)

    return NEAR_COPIES * 2 * MOST_COPY_BYTES / _median_s(copies)
