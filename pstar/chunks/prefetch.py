"""Prefetch: blocks are copied to near before they are needed, by three rules.

1. The next `prefetch` keys of the trace are copied even if other blocks must be evicted, as long as those are needed later.
   (They would have been evicted anyway.) This stops at the next gradient that is still to be created: it gets the room
   first, and when it leaves near, the keys after it can use the room. Of a group that will be updated in far, blocks come
   from disk only into room that is free, or that states leave which this step does not need any more: each update makes
   such room, so an earlier read would cost another write and read of what had to leave for it.
2. Beyond these keys, parameters are copied in the order of their use, into room that stays free until that use. Activations,
   and gradients until they leave near, have their room first (room_ahead.py). A gradient that has left counts for `prefetch`
   more stretches of the trace: whoever took its room earlier would wait for its copy. The order continues into the next
   step: while some groups are still being updated, the parameters of updated groups are copied for the next forward. After
   the first group that is still to be updated at most `prefetch` more are copied; with more, that group would come too late.
   Without rule 2 a link that is too slow for rule 1 would be idle whenever the model computes something long.
3. With several ranks the next unit is gathered ahead, if near has room for it next to all that is used before it.

When the updates are over, `next_step` applies rules 1 and 2 to the first moments of the next step.

By rules 2 and 3 a step moves no byte that it would not have moved anyway. By rule 1 it may, if near has room for few groups:
the group in use, which cannot leave yet, may be the better victim.

When a copy begins depends on the trace and the budget only, never on the speed of a link or a rank: the ranks must agree.
"""

from __future__ import annotations

import torch

from pstar.chunks.room import NearRoom
from pstar.chunks.room_ahead import INFINITE, RoomAhead
from pstar.chunks.unshard import Unsharding
from pstar.chunks.update_tiers import UpdateTiers
from pstar.memory.block import Key
from pstar.memory.block_log import BlockLog
from pstar.memory.block_store import BlockStore
from pstar.memory.tier import DISK, FAR, NEAR

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
        log: has the groups that were updated before the step's moment for it; None: none is.
    """

    def __init__(self, unsharding: Unsharding, store: BlockStore, room: NearRoom, tiers: UpdateTiers, num_keys: int,
                 grad_dtype: torch.dtype, log: BlockLog | None):
        self.unsharding, self.store, self.room, self.tiers = unsharding, store, room, tiers
        self.units, self.schedule, self.num_keys = unsharding.units, store.schedule, num_keys
        self._param_dtype, self._grad_dtype, self._log = unsharding.parameters.dtype, grad_dtype, log
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
            after = self._victims_after(access, next_use)
            if not all(store.load_ahead(key, tier, next_use, after) for key, tier in self._blocks_of(access)):
                return
        if one and (stretch := self.schedule.stretch) not in (-1, self._filled):
            self._filled = stretch
            before, self._departures = self._departures, store.departures
            # There may be new room only if a block has left near, or if activations are measured and the stretch is over
            # at which they leave the least. There may be new parameters to copy only if this is an update: its group can
            # be copied then. In backward most parameters that are away wait for their update.
            updates = self.schedule.trace.accesses[moment][0] == "adam"
            measured = self.room.watch is not None and stretch > self._held_until
            if (before != store.departures or updates or measured) and (away := self._num_away()):
                self._held_until = self._fill(away)

    def _num_away(self) -> int:
        """Number of units that are not near, without those that are let go until their update, which has not begun."""
        let_go = self.tiers.let_go
        waiting = len(let_go) if self._log is None else sum(group not in self._log for group in let_go)
        return len(self.units.records) - self.store.num_near["param"] - waiting

    def next_step(self) -> None:
        """The updates of a step are over: begins to copy what the first moments of the next step need, while the program
        reads its data. Several ranks begin no gather here: it would hold its buffer until the next forward.

        A step with inputs of another shape may need other parameters first: then some bytes move in vain.
        """
        schedule, store = self.schedule, self.store
        first = schedule.first_keys("param", self.num_keys) if self.units.one_rank else []
        for key in first:
            if not store.load_ahead(key, NEAR, schedule.next_use(key)):
                return
        if first and (away := self._num_away()):
            self._fill(away, in_next_step=True)

    def _victims_after(self, access: Key, next_use: float) -> float:
        """Blocks that are used after this moment may be evicted for a key of the trace (rule 1)."""
        if access[0] == "adam" and DISK in self.store.tiers and self.tiers.update_tier(access[1]) == FAR:
            trace = self.schedule.trace
            return len(trace) + trace.first_of("adam") - 1    # only states are used as late as that
        return next_use

    def _blocks_of(self, access: Key) -> list[tuple[Key, str]]:
        """(block, tier) for each existing block that a key of the trace needs."""
        kind, index = access
        if kind == "adam":
            if self._log is not None and index in self._log:    # updated already
                return []
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

    def _fill(self, away: int, in_next_step: bool = False) -> float:
        """Rule 2: begins to copy parameters into room that stays free until they are needed; looks at this step and the
        next, or in_next_step alone, until `away` units were copied. Returns the stretch that must be over before there can
        be more room, if room is what it lacked, else -1."""
        near, tiers, store, schedule = self.store.tiers[NEAR], self.tiers, self.store, self.schedule
        ahead, memory, least = RoomAhead(self.room, schedule, self.num_keys), self.room.near_memory, self.room.left_by(None)
        room = budget = INFINITE if near.budget_bytes is None else near.budget_bytes
        outdated: set[int] = set()    # groups that will be updated far: their near copies are out of date after that
        coming: set[int] = set()      # groups whose parameters are promised
        early = () if self._log is None else self._log    # groups that are updated already
        most = MOST_STRETCHES         # stretches of parameters still to copy; at most `prefetch` after an outdated one

        # Up to 256 rounds at many moments of a step: a call in each of them would take most of this loop's time.
        for stretch, (access, peak, moment) in enumerate(schedule.coming(MOST_STRETCHES, in_next_step), schedule.stretch):
            if stretch >= ahead.next_end:
                ahead.end_copy()
            if memory is not None:
                room = min(budget, max(memory - peak, least))    # as NearRoom.left_by
            if room - ahead.promised < ahead.bound:
                ahead.bound, ahead.tightest = room - ahead.promised, stretch
            free = ahead.bound - near.used_bytes
            if free < self._least_bytes:
                return ahead.tightest
            kind, index = access
            if kind == "adam":
                if tiers.states_tier[index] == FAR and index not in early:
                    if tiers.streamed:    # the states are copied to near for the update: that room is not known here
                        return -1
                    outdated.add(index)
            elif kind == "param":
                block = store.blocks[access]
                missing = 0 if NEAR in block.copies or index in coming else block.bytes_in(NEAR)
                if index in outdated:
                    ahead.promised, most = ahead.promised + missing, min(most, self.num_keys)
                    coming.add(index)
                    continue
                if missing and FAR not in block.copies:
                    return -1
                if most == 0 and index not in early:
                    if not early:
                        return -1
                    ahead.promised += missing    # updated groups behind it may come: what is not updated has its room
                    coming.add(index)
                    continue
                if missing > free:
                    return ahead.tightest
                most -= index not in early
                if missing:
                    store.load_ahead(access, NEAR, moment)
                    away -= 1
                    if not away:
                        return -1
            elif kind in ("grad", "micro_grad"):
                is_near = (block := store.blocks.get(access)) is not None and NEAR in block.copies
                dtype = self._grad_dtype if kind == "grad" else self._param_dtype
                num_bytes = 0 if is_near else self.units.records[index].spec.elems * dtype.itemsize
                ahead.gradient(num_bytes, room, stretch, moment)
        return -1
