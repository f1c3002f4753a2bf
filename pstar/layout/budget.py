"""The bytes that each tier must hold, and the optimizer states that also fit into near: pure functions of numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pstar.layout.layout import CODE_BLOCK, HOST_PACKING, Group, Layout, ModuleSpec, Packing, Unit, candidate_layouts

AUTO_NEAR = 0.4
"""Share of a GPU's free memory that chunks may take with near_budget auto."""


@dataclass(frozen=True)
class Costs:
    """Bytes per element of each kind of model data."""

    param: int
    grad: int
    states: int
    """Optimizer states: moments, and the part of an fp32 master that is not in the parameter."""
    scales: int = 0
    """Bytes of the scales of each block of STATE_BLOCK elements: 8 with 8-bit moments."""
    frozen_bits: int = 32
    """Bits of an element of a coded group, except near: 8 or 4; 32: no group is coded."""
    page_bytes: int = 1
    """A buffer of far takes a multiple of this: the size of a page where pages are locked for a GPU (memory/pinned.py)."""

    @property
    def in_codes(self) -> bool:
        """Whether frozen matrices are in coded groups."""
        return self.frozen_bits < 16

    @property
    def block_bytes(self) -> int:
        """Bytes of CODE_BLOCK elements of a coded group, except near: codes, and one scale of 2 bytes."""
        return 2 + CODE_BLOCK * self.frozen_bits // 8

    def param_bytes(self, elems: int, coded: bool) -> int:
        """Bytes of so many parameters of a group, except near."""
        return elems // CODE_BLOCK * self.block_bytes if coded else self.param * elems

    @property
    def total(self) -> int:
        """Without scales: 16 for fp32, 14 for bf16 with a split master, 16 for fp16; in 16 bit 2 more with fp32
        accumulation, with 8-bit moments 6 less."""
        return self.param + self.grad + self.states

    def state_bytes(self, group: Group) -> int:
        """Bytes of the optimizer states of one rank's piece of a trained group."""
        return self.states * group.piece_elems + (self.scales * group.piece_blocks if self.scales else 0)

    def piece_bytes(self, group: Group) -> int:
        """Bytes of one rank's piece of a group with all its model data; a frozen group has parameters only."""
        if group.frozen:
            return self.param_bytes(group.piece_elems, group.coded)
        return (self.param + self.grad) * group.piece_elems + self.state_bytes(group)

    def buffer_bytes(self, group: Group) -> list[int]:
        """The parts of piece_bytes: of parameters, and of a trained group of gradients and of each kind of states."""
        if group.frozen:
            return [self.piece_bytes(group)]
        moment = 1 if self.scales else 4
        of_elem = (self.param, self.grad, moment, moment, self.states - 2 * moment)    # the last: of the master
        scales = [self.scales * group.piece_blocks] if self.scales else []
        return [num_bytes * group.piece_elems for num_bytes in of_elem if num_bytes] + scales

    def far_bytes(self, *buffers: int) -> int:
        """The bytes that buffers of so many bytes take in far."""
        return sum(-(-num_bytes // self.page_bytes) * self.page_bytes for num_bytes in buffers)


def default_near_bytes(free_bytes: Sequence[int]) -> int:
    """The near budget of a GPU if the configuration says auto; the rest is for activations.

    free_bytes: what is free on the GPU of each rank. The least of them counts for all: ranks must evict the same chunks.
    """
    return int(AUTO_NEAR * min(free_bytes))


def model_data_bytes(layout: Layout, costs: Costs) -> int:
    """Bytes of all model data of all ranks, padding included."""
    return layout.num_ranks * sum(costs.piece_bytes(group) for group in layout.groups)


def near_data_bytes(layout: Layout, costs: Costs) -> int:
    """model_data_bytes if all of it were near, where parameters in codes are whole: 100% of a near budget."""
    coded = [group for group in layout.frozen if group.coded]
    more = sum(costs.param * group.elems - costs.param_bytes(group.elems, True) for group in coded)
    return model_data_bytes(layout, costs) + more


def frozen_bytes(layout: Layout, costs: Costs) -> int:
    """Bytes of the frozen parameters of all ranks, padding included. They are in far, or on disk, all the time."""
    return layout.num_ranks * sum(costs.piece_bytes(group) for group in layout.frozen)


def _grad_bytes(unit: Unit, layout: Layout, costs: Costs) -> int:
    """Near bytes while a unit's gradients are collected and reduced: all of them plus the reduced piece of a group (a chunk
    is reduced in place). 0 for frozen parameters."""
    if layout.groups[unit.group].frozen:
        return 0
    reduced = layout.groups[unit.group].piece_elems if layout.num_ranks > 1 and unit.owner is None else 0
    return costs.grad * (unit.elems + reduced)


def smallest_near_budget(layout: Layout, uses: Mapping[str, tuple[str, ...]], costs: Costs,
                         communication: str = "group") -> tuple[int, str]:
    """(bytes, module): the least near budget with which every module can run, and the module that needs it.

    uses: for each module the names of its own parameters, tied ones in every module that uses them. A module's working set
    is every unit (group, or chunk) with one of its parameters. Units of the modules that contain it are in use at the same
    time, and count too. In backward the gradients of one of these units are added.
    """
    units = layout.units(communication)
    unit_of = {slot.name: unit.index for unit in units for slot in unit.slots}
    units_of = {module: {unit_of[name] for name in names} for module, names in uses.items()}
    need, neediest = 0, ""
    for module, own in units_of.items():
        path = module.split(".")
        around = [".".join(path[:depth]) for depth in range(len(path))]
        together = [units[index] for index in own.union(*(units_of.get(name, ()) for name in around))]
        if not own:
            continue
        bytes_needed = (costs.param * sum(unit.elems for unit in together)
                        + max(_grad_bytes(unit, layout, costs) for unit in together))
        if bytes_needed > need:
            need, neediest = bytes_needed, module
    return need, neediest


def largest_chunk_elems(near_budget: int, num_ranks: int, costs: Costs, near_groups: int = 0) -> int:
    """The largest chunk with which two groups, one with its gradients, and the parameters of near_groups groups fit into the
    near budget."""
    two = 2 * costs.param * num_ranks + costs.grad * (num_ranks + (num_ranks > 1))
    return near_budget // max(two, near_groups * costs.param * num_ranks)


def auto_layouts(modules: Sequence[ModuleSpec], num_ranks: int, costs: Costs, near_budget: int | None, ownership: str,
                 communication: str, packing: Packing = HOST_PACKING) -> list[Layout]:
    """The layouts that chunk size auto chooses from. near_budget None sets no limit.

    At least four groups, so that one can travel while another works, and never more than 64 Mi elements a chunk.
    """
    params = sum(size for module in modules for _, size in module.parameters)
    chunks_a_group = num_ranks if ownership == "whole" and communication == "group" else 1
    most = min(params // (4 * chunks_a_group), 64 * 2**20)
    if near_budget is not None:
        largest = largest_chunk_elems(near_budget, num_ranks, costs, packing.near_groups)
        most = min(most, largest * num_ranks // chunks_a_group)
    return candidate_layouts(modules, num_ranks, most, ownership, whole_blocks=costs.scales > 0, in_codes=costs.in_codes,
                             align_elems=packing.align_elems)


def groups_with_near_states(layout: Layout, near_budget: int, costs: Costs, communication: str = "group",
                            kept_free: int | None = None, grads_wait: bool = False) -> list[int]:
    """The groups whose optimizer states may be in near, so that their update is computed there: the first ones that fit.

    With states in near a group's gradients need not be copied to far, nor its parameters back.

    kept_free: None: states only get the margin, the part of the budget that is left when all parameters (gathered) are near
        at once, and the gradients that are there at the same time (PatrickStar, section 8.2): no parameter is copied more
        often for it. Gradients of other groups leave near when they are complete, and their parameters with them; those of
        two groups may be there at once. Else states get all but so many bytes: then the parameters of other groups are
        copied in backward too, from far to near, a direction in which the link is idle then.
    grads_wait: all gradients are in near at the end of backward.
    """
    single = layout.num_ranks == 1
    if kept_free is not None:
        return _first_that_fit(layout, near_budget - kept_free, costs.piece_bytes)
    margin = near_budget - costs.param * layout.total_elems
    if not single:
        gradients = max(_grad_bytes(unit, layout, costs) for unit in layout.units(communication))
        return _first_that_fit(layout, margin - gradients, costs.piece_bytes)
    # What fits next to all gradients fits in any case: with the whole budget, all groups.
    all_there = _first_that_fit(layout, margin - costs.grad * layout.trained_elems, costs.state_bytes)
    if grads_wait:
        return all_there
    two = sum(sorted(costs.grad * group.elems for group in layout.trained)[-2:])
    return max(all_there, _first_that_fit(layout, margin - two, lambda group: costs.state_bytes(group)
                                          + costs.grad * group.elems), key=len)


def _first_that_fit(layout: Layout, num_bytes: int, bytes_of: Callable[[Group], int]) -> list[int]:
    found = []
    for group in layout.trained:
        if bytes_of(group) <= num_bytes:
            num_bytes -= bytes_of(group)
            found.append(group.index)
    return found


def choose_near_states(near_states: str, layout: Layout, near_budget: int, costs: Costs, communication: str, least_near: int,
                       prefetch: int, grads_wait: bool = False) -> list[int]:
    """groups_with_near_states for a value of the configuration's near_states, margin or fill.

    least_near: the layout's smallest_near_budget. With fill these bytes are kept free, plus those of copies under way: the
    parameters of `prefetch` units, and one unit's gradients that leave near while the next unit's arrive.
    grads_wait: gradients are not complete before the end of backward (find_unused_parameters).
    """
    margin = groups_with_near_states(layout, near_budget, costs, communication, grads_wait=grads_wait)
    if near_states == "margin":
        return margin
    units = layout.units(communication)
    on_the_way = (prefetch * costs.param * max(unit.elems for unit in units)
                  + max(_grad_bytes(unit, layout, costs) for unit in units))
    filled = groups_with_near_states(layout, near_budget, costs, communication, least_near + on_the_way)

    def elems(groups: list[int]) -> int:
        return sum(layout.groups[index].piece_elems for index in groups)

    return max(margin, filled, key=elems)


def smallest_streaming_budget(layout: Layout, costs: Costs) -> int:
    """Bytes that near needs for the update of a group whose states are streamed through it: all model data of the largest
    group."""
    return max(costs.piece_bytes(group) for group in layout.groups)


def smallest_far_budget_with_disk(layout: Layout, costs: Costs, communication: str = "group") -> int:
    """Bytes that far needs if there is a disk: all model data of the largest group, or the two largest buffers, if those are
    more: one on its way to near, and one that leaves near for it. With several ranks that may be a unit's gradients that
    wait for their reduction."""
    groups = [costs.buffer_bytes(group) for group in layout.groups]
    waiting = [costs.grad * unit.elems for unit in layout.units(communication)
               if layout.num_ranks > 1 and not layout.groups[unit.group].frozen]
    two = sorted(costs.far_bytes(each) for each in [*waiting, *(each for group in groups for each in group)])[-2:]
    return max(sum(two), *(costs.far_bytes(*group) for group in groups))


def near_states_for_capacity(layout: Layout, near_budget: int, working_bytes: int, costs: Costs) -> list[int]:
    """The groups whose optimizer states may be in near when far is too small: as many as fit next to the working set.

    Unlike groups_with_near_states this keeps no room for parameters that are not in use: they are copied more often. One
    group's gradients and parameters, which its update needs in addition to the states, must fit as well.

    Args:
        working_bytes: the layout's smallest_near_budget; where states are streamed at least its smallest_streaming_budget.
    """
    largest = max((group.piece_elems for group in layout.trained), default=0)
    margin = near_budget - max(working_bytes, (costs.param + costs.grad) * largest)
    return _first_that_fit(layout, margin, costs.state_bytes)


def smallest_far_budget(layout: Layout, near_state_groups: Sequence[int], costs: Costs, accumulates: bool,
                        grads_wait_far: bool = False) -> int:
    """Bytes that far must hold on each rank without a disk, whatever the near budget: all that near need not keep, in whole
    pages (costs.page_bytes).

    These are this rank's pieces of all parameters, frozen ones too (their far copy stays valid while they are near), and of
    the gradients and states of groups that are updated far. With
    several ranks gradients that wait for their reduction are added (all of them while micro-steps are accumulated). With one
    rank a micro-step's gradients of one group are added, which are summed in far.

    grads_wait_far: near has states but no guaranteed room for their gradients (near_states_for_capacity): add those.
    """
    near = set(near_state_groups)
    pieces = 0
    for group in layout.groups:
        buffers = costs.buffer_bytes(group)
        if group.index in near:    # parameters, and gradients
            buffers = buffers[: 1 + grads_wait_far]
        pieces += costs.far_bytes(*buffers)
    if layout.num_ranks == 1:
        added = [costs.far_bytes(costs.param * group.piece_elems) for group in layout.trained if group.index not in near]
        return pieces + (max(added, default=0) if accumulates else 0)
    # A group's gradients are one buffer, or one for each of its chunks.
    waiting = [layout.num_ranks * costs.far_bytes(costs.grad * group.piece_elems) for group in layout.trained]
    return pieces + (sum(waiting) if accumulates else max(waiting, default=0))
