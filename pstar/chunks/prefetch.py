"""What comes near before it is needed: the next keys of the trace, and as much more as there is room for that nobody needs.

1. Of the next `prefetch` keys of the trace, blocks begin to come even where others must leave for them, as long as those are
   needed later (so they would have had to leave anyway), up to the next gradient that is still to be created: it comes
   first, and when it leaves, its room is free for what follows.
2. Beyond these, parameters come in the order in which they are needed, into room that is free and stays free until then:
   what will be created before them (gradients), and what activations will take, is counted first. This goes on around the
   end of the step: while some groups are still being updated, the link brings those that are done to the next forward, and
   `prefetch` of those that are needed after one that is still to be updated, which would come too late behind more.
   Without it a link that is slower than the look-ahead stands still whenever the model computes something long.
3. With several ranks the next unit is gathered ahead, where that takes room from nobody until it is needed.

By the second rule and the third a step moves nothing that it would not have moved otherwise. By the first neither, but where
near has room for so few groups that the one in use, which cannot leave yet, would have been the better victim.

When to begin follows from the trace and the budget, never from how fast a link or a rank is: the ranks must agree.
"""

from __future__ import annotations

from itertools import islice

import torch

from pstar.chunks.room import NearRoom
from pstar.chunks.unshard import Unsharding
from pstar.chunks.update_tiers import UpdateTiers
from pstar.memory.block import Key
from pstar.memory.block_store import Residency
from pstar.memory.tier import FAR, NEAR

MOST_STRETCHES = 256
"""Of the trace that are looked at for free room at a moment: so far ahead a link has more than enough to do."""


class Prefetch:
    """Called at each moment of a step that is known.

    Args:
        unsharding: begins gathers.
        residency: begins copies.
        room: what chunks may take of near at later moments.
        tiers: where updates will be.
        num_keys: how many keys of the trace to look ahead; 0: nothing comes before it is needed.
        grad_dtype: of the chunks of gradients.
    """

    def __init__(self, unsharding: Unsharding, residency: Residency, room: NearRoom, tiers: UpdateTiers, num_keys: int,
                 grad_dtype: torch.dtype):
        self.unsharding, self.residency, self.room, self.tiers = unsharding, residency, room, tiers
        self.units, self.schedule, self.num_keys = unsharding.units, residency.schedule, num_keys
        self._param_dtype, self._grad_dtype = unsharding.parameters.dtype, grad_dtype
        self._looked_at = -1    # the moment for which it was decided what comes
        self._filled = -1       # and the stretch
        self._departures = -1   # how often something had left near then
        self._least_bytes = self._param_dtype.itemsize * min((unit.spec.elems for unit in self.units.records), default=0)

    def forget(self) -> None:
        """The step is over."""
        self._looked_at = self._filled = self._departures = -1

    def __call__(self) -> None:
        """Begins to bring what the trace names next to where it will be needed; once for each moment."""
        moment, residency = self.schedule.moment, self.residency
        if not self.num_keys or moment == self._looked_at:
            return
        self._looked_at, one = moment, self.units.one_rank
        if not one:
            self._gather()
        for access in self.schedule.next_keys(self.num_keys):
            if residency.is_near(access):
                continue
            if access[0] in ("grad", "micro_grad") and access not in residency:
                break
            next_use = self.schedule.trace.next_use(access, moment)
            for key, tier in self._blocks_of(access):
                if not residency.load_ahead(key, tier, next_use):
                    return
        if one and (stretch := self.schedule.stretch) not in (-1, self._filled):
            self._filled = stretch
            before, self._departures = self._departures, residency.departures
            # There may be room, or something to fill it with, that was not there at the last stretch, only where something
            # has left near, an update ends what it updates, or activations let go of theirs.
            updates = self.schedule.trace.accesses[moment][0] == "adam"
            if before != residency.departures or updates or self.room.watch is not None:
                self._fill()

    def _blocks_of(self, access: Key) -> list[tuple[Key, str]]:
        """(block, tier) of what a key of the trace needs, as far as it exists."""
        kind, index = access
        if kind == "adam":
            tier = self.tiers.update_tier(index)
            # What is near and to be updated far leaves by itself: gradients when they are complete, not before.
            return [(key, tier) for key in self.residency.blocks
                    if key[1] == index and key[0] not in ("gathered", "grad_full", "micro_grad")
                    and (tier == NEAR or not self.residency.is_near(key))]
        if kind == "gathered":
            return [] if access in self.residency else [(("param", self.units.records[index].spec.group), FAR)]
        return [(access, NEAR)] if kind in ("param", "grad") else []

    def _gather(self) -> None:
        upcoming = self.schedule.upcoming("gathered")
        if upcoming is None or upcoming[0] in self.residency:
            return
        key, before = upcoming
        unit = self.units.at[key]
        room = unit.spec.elems * self._param_dtype.itemsize
        for key in {key for key in before if key[0] == "grad_full"}:    # and the reduced piece beside them
            spec = self.units.records[key[1]].spec
            elems = self.units.layout.groups[spec.group].piece_elems + (spec.elems if key not in self.residency else 0)
            room += elems * self._grad_dtype.itemsize
        if self.residency.tiers[NEAR].has_room(room):
            self.unsharding.unshard_async(unit)

    def _fill(self) -> None:
        """Parameters come into room that is free and stays free until they are needed."""
        near, tiers, residency = self.residency.tiers[NEAR], self.tiers, self.residency
        bound, promised, measured = near.bound_bytes, 0, self.room.near_memory is not None
        outdated: set[int] = set()    # groups that are still to be updated, far: what is near of them is of no use then
        most = MOST_STRETCHES         # stretches of parameters from here on; `prefetch` behind the first outdated one

        def has_room(num_bytes: int) -> bool:
            return bound is None or near.used_bytes + promised + num_bytes <= bound

        for access, peak, moment in islice(self.schedule.coming(), MOST_STRETCHES):
            room = self.room.beside(peak) if measured else None
            if room is not None:
                bound = room if bound is None else min(bound, room)
            if not has_room(self._least_bytes):
                return
            kind, index = access
            if kind == "adam":
                if tiers.states_tier[index] == FAR:
                    if tiers.streamed:
                        return    # states that come near and go: their room is not for us to weigh
                    outdated.add(index)
            elif kind == "param":
                block = residency.blocks[access]
                missing = 0 if NEAR in block.copies else block.num_bytes
                if index in outdated:
                    promised, most = promised + missing, min(most, self.num_keys)
                    continue
                if most == 0 or (missing and (FAR not in block.copies or not has_room(missing))):
                    return
                most -= 1
                residency.load_ahead(access, NEAR, moment)
            elif kind in ("grad", "micro_grad") and not residency.is_near(access):
                dtype = self._grad_dtype if kind == "grad" else self._param_dtype
                promised += self.units.records[index].spec.elems * dtype.itemsize
