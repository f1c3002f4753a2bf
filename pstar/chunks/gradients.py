"""Gradients in chunks: they arrive, are summed over micro-steps, reduced over ranks, and copied to the tier of their update.

The reduction of a unit begins when its gradients are complete. It is finished when the next unit is complete, when near
needs room, or when backward ends. These moments depend on the program and the budget only, never on how fast a rank is: the
ranks must agree about evictions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pstar.chunks.parameters import Parameters
from pstar.chunks.unit import Grads, UnitRecord
from pstar.chunks.update_tiers import UpdateTiers
from pstar.comm.collective_log import CollectiveLog
from pstar.comm.collectives import Collectives, Handle
from pstar.errors import StateError
from pstar.kernels import store_squared
from pstar.memory.block import Block, Key
from pstar.memory.block_store import BlockStore
from pstar.memory.tier import DISK, FAR, NEAR
from pstar.numerics.grad_norm import ParameterNorms
from pstar.schedule.schedule import Leaving

KINDS = ("grad", "grad_full", "micro_grad")
"""The kinds of blocks that hold gradients: this rank's sums, a unit's on this rank, a unit's of one micro-step."""


@dataclass(slots=True, eq=False)
class Reduction:
    """A unit's gradients that are being reduced; their blocks are pinned until the reduction is finished."""

    gradients: "Gradients"
    unit: UnitRecord
    handle: Handle
    pins: list[Block]

    def finish(self) -> None:
        self.gradients.finish_reduction(self)


class Gradients:
    """The gradients of the parameters in chunks, on this rank.

    Class attribute `apart`: each gradient is a tensor of its own, in no chunk.

    Args:
        parameters: the parameters of these gradients.
        store, collectives: the layers below.
        log: the log of this rank's collective calls.
        norms: stores a gradient in its slot, and sums its squares.
        tiers: the tier in which each group is updated.
        dtype: dtype of the gradient chunks.
        accumulates: a step has several micro-steps.
        reduce_late: reduce all units after backward, in the order of their numbers, instead of each unit as soon as it is
            complete.
    """

    apart = False

    def __init__(self, parameters: Parameters, store: BlockStore, collectives: Collectives, log: CollectiveLog,
                 norms: ParameterNorms, tiers: UpdateTiers, dtype: torch.dtype, accumulates: bool, reduce_late: bool):
        self.parameters, self.units = parameters, parameters.units
        self.store, self.collectives, self.log = store, collectives, log
        self.norms, self.tiers, self.dtype = norms, tiers, dtype
        self.reduce_late = reduce_late
        self._may_sum_far = accumulates and self.units.one_rank
        self.completed: list[int] = []
        """The groups of the units that were completed in this step, in order."""
        self.ready: list[int] = []
        """Groups whose gradients of this step are complete and reduced; speculative updates take them from here."""

    def arrived(self, name: str) -> bool:
        """Whether the parameter got a gradient in this step, on this rank."""
        return name in self.units.place[name][0].arrived

    def waiting(self) -> bool:
        """Whether any gradient of this step waits for its update."""
        return any(unit.grads is not Grads.NONE for unit in self.units.records)

    def key_of(self, unit: UnitRecord) -> Key:
        """The near block that collects the next gradient of a unit."""
        sums_far = self._may_sum_far and self.tiers.states_tier[unit.spec.group] == FAR
        return ("micro_grad", unit.spec.index) if sums_far else unit.grad_key

    def _sums_far(self, unit: UnitRecord) -> bool:
        """Whether gradients of several micro-steps are summed in far: with one rank, if the unit's states are in far. Each
        micro-step's gradient then crosses the link in the parameters' dtype, not as an fp32 sum, and near keeps none."""
        return self.key_of(unit) != unit.grad_key

    # ---------------------------------------------------------------- gradients arrive

    def add_grad(self, unit: UnitRecord, key: Key, name: str, grad: torch.Tensor, last_micro_step: bool) -> None:
        """Stores or adds a parameter's gradient in its slot; begins the reduction if the unit is complete.

        key: key_of(unit). Raises StateError for a gradient that arrives after the unit's reduction.
        """
        self.collectives.progress()
        if unit.grads is not Grads.ARRIVING:
            if unit.grads is not Grads.NONE:
                self._refuse_late(unit, name)
            unit.move(Grads.ARRIVING)
        store, parameters, sums_far = self.store, self.parameters, key is not unit.grad_key
        if sums_far and name in unit.leaving:    # one after the other, as in near: a sum of sums has other bits
            self._add_far(unit)
        if key in store:
            data = store.ensure(key, NEAR)
        else:
            if sums_far:
                self._keep_room_far(unit.spec.elems)
            data = self._create_near(unit, key, parameters.dtype if sums_far else self.dtype)
        place, stored = parameters.view(name, data), unit.arrived
        if sums_far:
            stored = unit.leaving
            store_squared(place, grad, False, implementation="torch")    # _add_far squares the sum
        else:
            self.norms.store(name, place, grad, name in stored, None)
        store.mark_written(key, NEAR)
        stored.add(name)
        unit.summed.add(name)
        complete = len(unit.summed) == (unit.num_trainable or self._num_trainable(unit))
        if complete and sums_far:
            self._add_far(unit)
            if last_micro_step:
                self.ready.append(unit.spec.group)
        elif complete and last_micro_step and not self.reduce_late:
            self._complete(unit)

    @staticmethod
    def _refuse_late(unit: UnitRecord, name: str) -> None:
        """Raises StateError for a gradient that arrives after its group was reduced."""
        if name in unit.summed:
            raise StateError(f"{name} got a second gradient in one backward, after its group was reduced: on several ranks "
                             "a layer that is used twice needs checkpoint(..., use_reentrant=False), or the configuration "
                             "\"find_unused_parameters\": true")
        raise StateError(f"{name} got a gradient in another backward of this step, after its group was reduced: on several "
                         "ranks give the number of backwards before each step() as gradient_accumulation_steps")

    def _create_near(self, unit: UnitRecord, key: Key, dtype: torch.dtype) -> torch.Tensor:
        """Creates the block that collects a unit's gradients, (elems,). Ranks also sum what is between the slots: zeros."""
        data = self.store.create(key, unit.spec.elems, dtype, NEAR)
        if not self.units.one_rank:
            for gap in unit.spec.gaps:
                data[gap].zero_()
        return data

    def _num_trainable(self, unit: UnitRecord) -> int:
        """Counted once a step: freezing or thawing a parameter takes effect in the next step."""
        if unit.num_trainable is None:
            params = self.parameters.params
            unit.num_trainable = sum(params[slot.name].requires_grad for slot in unit.spec.slots)
        return unit.num_trainable

    def _keep_room_far(self, num_elems: int) -> None:
        """Adds the gradients of incomplete units to their sums if far could not take them and num_elems more: without a disk
        the least far has room for those of one unit."""
        store = self.store
        far = store.tiers[FAR]
        if DISK in store.tiers or far.budget_bytes is None:
            return
        partial = [unit for unit in self.units.records if unit.leaving]
        blocks = [store.blocks["micro_grad", unit.spec.index] for unit in partial]
        num_elems += sum(block.numel for block in blocks if FAR not in block.copies)
        if partial and not far.has_room(num_elems * self.parameters.dtype.itemsize):
            for unit in partial:
                self._add_far(unit)

    def _add_far(self, unit: UnitRecord) -> None:
        """Sends a unit's gradients of this micro-step to far, and adds them to their fp32 sums there, in the background."""
        spec, store = unit.spec, self.store
        micro, total = ("micro_grad", spec.index), ("grad", spec.index)
        if total not in store:
            self._create_grad(spec.group, FAR)
        before = store.tiers[NEAR].used_bytes
        with store.pinned(total):    # else it might leave far for the gradients that are added to it
            store.send_far(micro)
        store.schedule.note_leaving(Leaving(before - store.tiers[NEAR].used_bytes, 0))
        names, unit.leaving = unit.leaving, set()
        parts = [(slot.name, slice(slot.offset, slot.offset + slot.numel), slot.name in unit.arrived)
                 for slot in spec.slots if slot.name in names]
        # A second team of OpenMP threads would slow the model's own team down (see Links.copy).
        num_threads = 1 if self.parameters.device.type == "cpu" and store.links.asynchronous else None

        def prepare(buffers: dict[Key, torch.Tensor]) -> Callable[[], None]:
            def add() -> None:
                for name, part, adds in parts:
                    self.norms.store(name, buffers[total][part], buffers[micro][part], adds, num_threads)

            return add

        store.work(f"sum of gradients {spec.index}", [micro, total], FAR, prepare, store.links.asynchronous)
        store.drop(micro)
        unit.arrived |= names

    def end_backward(self, last_micro_step: bool) -> None:
        """Ends a backward. After the last micro-step it also reduces units in which some parameters got no gradient."""
        for unit in self.units.records:
            if unit.leaving:
                self._add_far(unit)
        if self.reduce_late and last_micro_step:
            self._complete_late()
            self.store.under_way.finish_pending()
            return
        for unit in self.units.records:
            unreduced = unit.arrived and unit.grad_key in self.store and not self._sums_far(unit)
            if last_micro_step and unreduced and len(unit.summed) < self._num_trainable(unit):
                self._complete(unit)
            unit.summed.clear()
        self.store.under_way.finish_pending()

    def _complete_late(self) -> None:
        """Reduces every unit in which some rank has a gradient; a rank without one contributes zeros."""
        units = self.units.records
        with_grads = torch.tensor([float(bool(unit.arrived)) for unit in units], dtype=torch.float64,
                                  device=self.parameters.device)
        for unit, num_ranks in zip(units, self.collectives.sum(with_grads).tolist(), strict=True):
            unit.summed.clear()
            if not num_ranks:
                continue
            if unit.grad_key not in self.store:    # only with several ranks
                self._create_near(unit, unit.grad_key, self.dtype)
            self._complete(unit)

    # ---------------------------------------------------------------- gradients are reduced

    def _complete(self, unit: UnitRecord) -> None:
        """All gradients of a unit have arrived: begins their reduction; with one rank, sends them to the states' tier."""
        spec, store = unit.spec, self.store
        self.completed.append(spec.group)
        if self.units.one_rank:
            self.take_norms(spec.group)
            if self.tiers.states_tier[spec.group] == FAR and not self._stays_near(spec.group):
                before = store.tiers[NEAR].used_bytes
                store.send_far(("grad", spec.group))
                between = store.tiers[NEAR].used_bytes
                self._let_go(spec.group)
                store.schedule.note_leaving(Leaving(before - between, between - store.tiers[NEAR].used_bytes))
            self.ready.append(spec.group)
            return
        store.under_way.finish_reductions()
        self.log.reduce(spec.index)
        full = store.ensure(unit.grad_key, NEAR)
        for slot in spec.slots:
            if slot.name not in unit.arrived:
                full[slot.offset : slot.offset + slot.numel].zero_()    # another rank may have this gradient
        pins = [store.pin(unit.grad_key)]
        if spec.owner is None:
            piece = self._create_grad(spec.group, NEAR)
            pins.append(store.pin(("grad", spec.group)))
            handle = self.collectives.reduce_scatter_mean(piece, full)
        else:
            handle = self.collectives.reduce_mean(full, spec.owner)
        unit.move(Grads.REDUCING)
        store.under_way.reductions.append(Reduction(self, unit, handle, pins))

    def finish_reduction(self, reduction: Reduction) -> None:
        """Waits for a unit's reduction, and copies this rank's piece to the tier of the update."""
        self.store.under_way.reductions.remove(reduction)
        unit, store = reduction.unit, self.store
        spec, key, states_tier = unit.spec, ("grad", unit.spec.group), self.tiers.states_tier[unit.spec.group]
        reduction.handle.wait()
        unit.move(Grads.REDUCED)
        if spec.owner is not None:
            if key not in store:    # all ranks create it when the group's first chunk is reduced
                self._create_grad(spec.group, states_tier)
            if spec.owner == self.collectives.rank:
                tier, piece = store.peek(key)
                store.copy(piece, store.peek(unit.grad_key)[1], NEAR, tier)
                store.mark_written(key, tier)    # it may have been on disk since the group's first chunk was reduced
                self.take_norms(spec.group)
        else:
            self.take_norms(spec.group)
        for pin in reduction.pins:
            pin.unpin()
        store.drop(unit.grad_key)
        if spec.owner is None and states_tier == FAR:
            store.send_far(key)
        if all(each.grads is Grads.REDUCED for each in self.units.of_group[spec.group]):
            self.ready.append(spec.group)

    def _stays_near(self, group: int) -> bool:
        """Whether a complete gradient waits near for its update: if far is full, so that another block would be written to
        disk for it, and near has room for the gradients after it."""
        near, far = self.store.tiers[NEAR], self.store.tiers[FAR]
        num_bytes = self.store.blocks["grad", group].num_bytes
        return DISK in self.store.tiers and not far.has_room(num_bytes) and near.has_room(num_bytes)

    def _let_go(self, group: int) -> None:
        """Evicts parameters that will be updated far before their next use: their near copy is of no use any more. The next
        gradients then get this memory, and need not wait for the gradients before them to leave near. With a disk the near
        copy stays: where far is short of room, its far copy is dropped."""
        key, store = ("param", group), self.store
        if DISK in store.tiers:
            return
        trace, moment, block = store.schedule.trace, store.schedule.moment, store.blocks[key]
        if (trace is not None and self.tiers.update_tier(group) == FAR and FAR in block.copies and not block.pins
                and trace.next_use(("adam", group), moment) < trace.next_use(key, moment)):
            store.send_far(key)
            self.tiers.let_go.add(group)

    def _create_grad(self, group: int, tier: str) -> torch.Tensor:
        return self.store.create(("grad", group), self.units.layout.groups[group].piece_elems, self.dtype, tier)

    def take_norms(self, group: int) -> None:
        """Sums the squares of a group's gradients, in whichever tier they are. Gradients on disk are read for it only if
        nothing has summed their squares before."""
        if self._may_sum_far:
            self.store.finish(("grad", group))    # _add_far records squares in the background
        if self.norms.has_stored(group, self.arrived):
            self.norms.take(group, None, self.arrived)
            return
        with self.store.reading([("grad", group)]) as places:
            self.norms.take(group, places["grad", group][1], self.arrived)

    # ---------------------------------------------------------------- an update reads them

    def of(self, group: int) -> bool:
        """Whether a group has gradients."""
        return ("grad", group) in self.store

    def blocks(self, group: int) -> list[Key]:
        """The blocks of a group's gradients."""
        return [("grad", group)]

    def part(self, group: int, part: slice, buffers: dict[Key, torch.Tensor]) -> torch.Tensor:
        """The gradients of a part of this rank's piece of a group, (part,); buffers: the group's blocks."""
        return buffers["grad", group][part]

    def drop(self, group: int) -> None:
        """Frees a group's gradients after its update: the next group's can use the room."""
        self.tiers.let_go.discard(group)
        self.store.drop(("grad", group))

    def drop_grads(self) -> None:
        """Forgets all gradients, as zero_grad does."""
        self.store.under_way.finish_pending()
        self.completed.clear()
        self.ready.clear()
        self.tiers.let_go.clear()
        for kind in KINDS:
            number = len(self.units.layout.groups if kind == "grad" else self.units.records)
            for index in range(number):
                if (kind, index) in self.store:
                    self.store.finish((kind, index))    # else a running _add_far would record squares after this
                    self.store.drop((kind, index))
        for unit in self.units.records:
            unit.forget_grads()
