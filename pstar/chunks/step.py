"""What happens when a module needs parameters, when it is done with them, and when a gradient is there: read downwards.

    acquire -> _need -> _touch              the next moment of the schedule: near shrinks to what activations leave
                     -> Unsharding.unshard  the bytes come near, from far or from all ranks; parameters become views of them
            -> Parameters.use               COMPUTE: pinned, and no longer idle
            -> Prefetch                     what the trace names next begins to come

Collectives go on while the rank computes: the next unit of the trace is gathered ahead (prefetch.py), a complete unit is
reduced until the next one is (gradients.py). All of these moments follow from the program and the budget, never from how
fast a rank is: the ranks must agree about evictions.
"""

import torch

from pstar.chunks.gradients import Gradients
from pstar.chunks.parameters import Parameters
from pstar.chunks.prefetch import Prefetch
from pstar.chunks.room import NearRoom
from pstar.chunks.unit import UnitRecord
from pstar.chunks.unshard import Unsharding
from pstar.chunks.update_tiers import UpdateTiers
from pstar.comm.collectives import Collectives
from pstar.errors import BudgetError
from pstar.memory.block import Key
from pstar.memory.block_store import Residency
from pstar.memory.tier import NEAR


class Chunks:
    """The model's parameters and their gradients on this rank: one step of training, as hooks and the optimizer see it.

    Args:
        parameters, gradients: what they are views of, and where they are collected.
        unsharding: brings parameters near.
        prefetch: brings what comes next.
        room: what chunks may take of near.
        tiers: where each group is updated.
        residency, collectives: the layers below.
    """

    def __init__(self, parameters: Parameters, gradients: Gradients, unsharding: Unsharding, prefetch: Prefetch,
                 room: NearRoom, tiers: UpdateTiers, residency: Residency, collectives: Collectives):
        self.parameters, self.gradients, self.unsharding, self.prefetch = parameters, gradients, unsharding, prefetch
        self.room, self.tiers, self.residency, self.collectives = room, tiers, residency, collectives
        self.schedule, self.units = residency.schedule, parameters.units
        self.layout, self.params = parameters.units.layout, parameters.params

    # ------------------------------------------------------------- a module needs parameters

    def acquire(self, names: tuple[str, ...]) -> None:
        """HOLD or RELEASED -> COMPUTE: the parameters' bytes come near and stay."""
        there = None
        for name in names:
            unit = self.units.place[name][0]
            if unit is not there:    # which is pinned, and stays
                try:
                    self._need(unit)
                except BudgetError:
                    if not self.room.grow(unit.spec.elems * self.parameters.dtype.itemsize):
                        raise
                    self._need(unit)
                there = unit
            self.residency.pin(unit.key)
            self.parameters.use(name)
        if names:
            self.prefetch()

    def _need(self, unit: UnitRecord) -> None:
        """A unit is needed now: the schedule hears of it, near shrinks to what activations leave, its bytes come."""
        if torch.is_inference_mode_enabled():    # a parameter that became a view in it would never get a gradient again
            with torch.inference_mode(False), torch.no_grad():
                return self._need(unit)
        if unit.key != self.schedule.last:
            self._touch(unit.key)
        self.unsharding.unshard(unit)

    def _touch(self, key: Key) -> None:
        """The next moment of the schedule, and the room that its activations leave."""
        self.schedule.touch(key)
        if self.room.watch is not None:
            self._shrink_room(key, self.schedule.peak)

    def _shrink_room(self, key: Key, peak: int | None) -> None:
        """Chunks leave near until they take no more than `peak` bytes of other things leave; not the block of key, which is
        about to be used."""
        residency, room = self.residency, self.room.beside(peak)
        if room is not None and room != residency.tiers[NEAR].limit_bytes:
            if residency.is_near(key):
                with residency.pinned(key):
                    residency.limit(room)
            else:
                residency.limit(room)
        self.room.watch.report(peak)

    def release(self, names: tuple[str, ...]) -> None:
        """COMPUTE -> HOLD. Raises StateError for a parameter that is not COMPUTE."""
        self.collectives.progress()
        blocks, place = self.residency.blocks, self.units.place
        for name in names:
            self.parameters.end_use(name)
            blocks[place[name][0].key].unpin()

    def release_uses(self) -> None:
        """COMPUTE -> HOLD for all that is in use, whoever acquired it."""
        for name, count in self.parameters.uses.items():
            self.release((name,) * count)

    def bind_all(self) -> None:
        """RELEASED -> HOLD: all parameters come near, where nothing will make them leave. Between two steps, or in one."""
        if self.parameters.num_bound < len(self.units.records):
            with self.schedule.paused():    # which modules use them when is of no interest
                for unit in self.units.records:
                    self._need(unit)
            self.parameters.lend_all()

    # ------------------------------------------------------------- a gradient is there

    def add_grad(self, name: str, grad: torch.Tensor, last_micro_step: bool) -> None:
        """A parameter's gradient is there: it goes into its slot, and a group that is complete is reduced."""
        gradients, unit = self.gradients, self.units.place[name][0]
        key = gradients.key_of(unit)
        if key != self.schedule.last:
            self._touch(key)
        gradients.add_grad(unit, key, name, grad, last_micro_step)

    def drop_grads(self) -> None:
        """Forgets all gradients, as zero_grad does."""
        self.gradients.drop_grads()
        self.prefetch.forget()

    # ------------------------------------------------------------- a group is updated

    def first_use(self, group: int) -> float:
        """The moment of this step at which a parameter of the group was needed first."""
        return min(self.schedule.first_use(unit.key) for unit in self.units.of_group[group])

    def touch_update(self, group: int) -> None:
        """The update of a group is the next moment. Updates may come in any order: the trace learns the last one."""
        self.schedule.in_its_turn(("adam", group))
        self._touch(("adam", group))
        self.prefetch()
