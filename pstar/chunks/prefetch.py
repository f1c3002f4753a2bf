"""Prefetch: blocks are copied to near before they are needed, by three rules.

1. The next `prefetch` keys of the trace are copied even if other blocks must be evicted, as long as those are needed later.
   (They would have been evicted anyway.) This stops at the next gradient that is still to be created: it gets the room
   first, and when it leaves near, the keys after it can use the room.
2. Beyond these keys, parameters are copied in the order of their use, into room that stays free until that use. Room for
   gradients that will be created before it, and for activations, is subtracted first. The order continues into the next
   step: while some groups are still being updated, the parameters of updated groups are copied for the next forward. After
   the first group that is still to be updated at most `prefetch` more are copied; with more, that group would come too late.
   Without rule 2 a link that is too slow for rule 1 would be idle whenever the model computes something long.
3. With several ranks the next unit is gathered ahead, if near has room for it next to all that is used before it.

By rules 2 and 3 a step moves no byte that it would not have moved anyway. By rule 1 it may, if near has room for few groups:
the group in use, which cannot leave yet, may be the better victim.

When a copy begins depends on the trace and the budget only, never on the speed of a link or a rank: the ranks must agree.
"""

from __future__ import annotations

import torch

from pstar.chunks.room import NearRoom
from pstar.chunks.unshard import Unsharding
from pstar.chunks.update_tiers import UpdateTiers
from pstar.memory.block import Key
from pstar.memory.block_store import BlockStore
from pstar.memory.tier import FAR, NEAR

INFINITE = float("inf")
MOST_STRETCHES = 256
"""Rule 2 looks at so many stretches of the trace at one moment: more than enough to keep a link busy."""


class Prefetch:
    """Called at each moment; does nothing while the trace is not known.

    Args:
        unsharding: begins gathers.
        store: begins copies.
        room: the bytes that chunks may take of near at later moments.
        tiers: the tier in which each group is updated.
        num_keys: how many keys of the trace to look ahead; 0: no prefetch.
        grad_dtype: dtype of the gradient chunks.
    """

    def __init__(self, unsharding: Unsharding, store: BlockStore, room: NearRoom, tiers: UpdateTiers, num_keys: int,
                 grad_dtype: torch.dtype):
        self.unsharding, self.store, self.room, self.tiers = unsharding, store, room, tiers
        self.units, self.schedule, self.num_keys = unsharding.units, store.schedule, num_keys
        self._param_dtype, self._grad_dtype = unsharding.parameters.dtype, grad_dtype
        self._looked_at = -1    # the last moment for which rule 1 was applied
        self._filled = -1       # the last stretch for which rule 2 was considered
        self._departures = -1   # store.departures at that stretch
        self._held_until: float = -1    # rule 2 has no room before this stretch is over, unless a block leaves near
        self._least_bytes = self._param_dtype.itemsize * min((unit.spec.elems for unit in self.units.records), default=0)

    def forget(self) -> None:
        """The step is over."""
        self._looked_at = self._filled = self._departures = self._held_until = -1

    def __call__(self) -> None:
        """Begins to copy what the trace names next to the tier in which it will be needed; once for each moment."""
        moment, store = self.schedule.moment, self.store
        if not self.num_keys or moment == self._looked_at:
            return
        self._looked_at, one = moment, self.units.one_rank
        if not one:
            self._gather()
        for access in self.schedule.next_keys(self.num_keys):
            if store.is_near(access):
                continue
            if access[0] in ("grad", "micro_grad") and access not in store:
                break
            next_use = self.schedule.trace.next_use(access, moment)
            for key, tier in self._blocks_of(access):
                if not store.load_ahead(key, tier, next_use):
                    return
        if one and (stretch := self.schedule.stretch) not in (-1, self._filled):
            self._filled = stretch
            before, self._departures = self._departures, store.departures
            # There may be new room only if a block has left near, or if activations are measured and the stretch is over
            # at which they leave the least. There may be new parameters to copy only if this is an update: its group can
            # be copied then.
            updates = self.schedule.trace.accesses[moment][0] == "adam"
            measured = self.room.watch is not None and stretch > self._held_until
            if before != store.departures or updates or measured:
                self._held_until = self._fill()

    def _blocks_of(self, access: Key) -> list[tuple[Key, str]]:
        """(block, tier) for each existing block that a key of the trace needs."""
        kind, index = access
        if kind == "adam":
            tier = self.tiers.update_tier(index)
            # Blocks in near of a group that is updated far are not copied here: gradients leave when they are complete.
            kinds = (kind for kind in self.store.kinds if kind not in ("gathered", "grad_full", "micro_grad"))
            return [(key, tier) for key in ((kind, index) for kind in kinds)
                    if key in self.store.blocks and (tier == NEAR or not self.store.is_near(key))]
        if kind == "gathered":
            return [] if access in self.store else [(("param", self.units.records[index].spec.group), FAR)]
        return [(access, NEAR)] if kind in ("param", "grad") else []

    def _gather(self) -> None:
        upcoming = self.schedule.upcoming("gathered")
        if upcoming is None or upcoming[0] in self.store:
            return
        key, before = upcoming
        unit = self.units.at[key]
        room = unit.spec.elems * self._param_dtype.itemsize
        for key in {key for key in before if key[0] == "grad_full"}:    # plus the room of the reduced piece
            spec = self.units.records[key[1]].spec
            elems = self.units.layout.groups[spec.group].piece_elems + (spec.elems if key not in self.store else 0)
            room += elems * self._grad_dtype.itemsize
        if self.store.tiers[NEAR].has_room(room):
            self.unsharding.unshard_async(unit)

    def _fill(self) -> float:
        """Rule 2: begins to copy parameters into room that stays free until they are needed. Returns the stretch that must
        be over before there can be more room, if room is what it lacked, else -1."""
        near, tiers, store = self.store.tiers[NEAR], self.tiers, self.store
        bound, promised = INFINITE if near.bound_bytes is None else near.bound_bytes, 0
        memory, least, first = self.room.near_memory, self.room.left_by(None), self.schedule.stretch
        tightest = first if near.limit_bytes is not None else INFINITE    # the stretch that gives `bound`
        outdated: set[int] = set()    # groups that will be updated far: their near copies are out of date after that
        most = MOST_STRETCHES         # stretches of parameters still to copy; at most `prefetch` after an outdated one

        # Up to 256 rounds at many moments of a step: calls of other functions would take most of this loop's time.
        for number, (access, peak, moment) in enumerate(self.schedule.coming(MOST_STRETCHES), first):
            if memory is not None and memory - peak < bound and (room := max(memory - peak, least)) < bound:
                bound, tightest = room, number    # as NearRoom.left_by
            free = bound - near.used_bytes - promised
            if free < self._least_bytes:
                return tightest
            kind, index = access
            if kind == "adam":
                if tiers.states_tier[index] == FAR:
                    if tiers.streamed:    # the states are copied to near for the update: that room is not known here
                        return -1
                    outdated.add(index)
            elif kind == "param":
                block = store.blocks[access]
                missing = 0 if NEAR in block.copies else block.bytes_in(NEAR)
                if index in outdated:
                    promised, most = promised + missing, min(most, self.num_keys)
                    continue
                if most == 0 or (missing and FAR not in block.copies):
                    return -1
                if missing > free:
                    return tightest
                most -= 1
                if missing:
                    store.load_ahead(access, NEAR, moment)
            elif kind in ("grad", "micro_grad"):
                if (block := store.blocks.get(access)) is not None and NEAR in block.copies:
                    continue
                dtype = self._grad_dtype if kind == "grad" else self._param_dtype
                promised += self.units.records[index].spec.elems * dtype.itemsize
        return -1
