"""Blocks in tiers: the tiers of each block's bytes, and the copies between them. It does not know why blocks move.

A *block* is one kind of model data of one group: its parameters, its gradients, its first moments, ... It is in near, far,
on disk, or in several tiers with equal content. A block with an equal copy in a slower tier is *clean*: its eviction needs
no copy. Blocks in use are pinned and are never evicted. Some blocks are *derived* (a gathered group): they are in near only,
and eviction drops them. Frozen parameters may be in codes in far and on disk; the copy to near moves codes and decodes them.

Copies run in the background (copy_queue.py). The records change when a copy begins: an evicted block is gone from near at
once. Its bytes are valid in far when the copy has ended, and the next user of its near buffer waits for that. So a block's
tiers depend on the sequence of calls alone, not on the speed of a link: ranks with equal calls evict equally.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch

from pstar.errors import BudgetError, StateError
from pstar.kernels import BlockCodes
from pstar.memory.block import Block, Key, Pins
from pstar.memory.copy_queue import Handle
from pstar.memory.disk import DiskTier
from pstar.memory.links import Links
from pstar.memory.tier import DISK, FAR, NEAR, Ledger, Tier, format_bytes
from pstar.memory.under_way import UnderWay
from pstar.profile.recording import Profile
from pstar.schedule.schedule import Candidate, Schedule

ORDER = (NEAR, FAR, DISK)


class Views(Protocol):
    """An object whose tensors are views of near copies."""

    def leave(self, key: Key, buffer: torch.Tensor) -> bool:
        """A block's near copy, this buffer, is about to be dropped. Returns whether other tensors keep views of it."""


class BlockStore:
    """All blocks of a rank, in two tiers or three.

    Args:
        near, far, disk: the tiers; without disk a block that does not fit into far is a BudgetError.
        ledger: counts copies.
        schedule: names the victims.
        views: its `leave` is called before a block's near copy is dropped.
        links: carry out the copies; None: each copy is finished at once.
        profile: records copies and evictions.
    """

    def __init__(self, near: Tier, far: Tier, ledger: Ledger, schedule: Schedule, views: Views | None = None,
                 disk: DiskTier | None = None, links: Links | None = None, profile: Profile | None = None):
        self.tiers: dict[str, Any] = {NEAR: near, FAR: far} | ({DISK: disk} if disk else {})
        self.ledger, self.schedule, self._views = ledger, schedule, views
        self.links, self.profile = links or Links(asynchronous=False), profile
        self.blocks: dict[Key, Block] = {}
        self.kinds: dict[str, None] = {}
        """The kinds of all blocks that there ever were, in the order in which they came."""
        self.under_way = UnderWay()
        self.departures = 0
        """Number of times that a block has left near."""
        self.num_near: Counter[str] = Counter()
        """Number of blocks in near, by kind."""
        self._clock = 0

    def __contains__(self, key: Key) -> bool:
        return key in self.blocks

    def is_near(self, key: Key) -> bool:
        block = self.blocks.get(key)
        return block is not None and NEAR in block.copies

    def model_bytes(self) -> int:
        """Bytes of model data: each block counts once, however many copies it has, as it is in far; derived ones do not
        count."""
        return sum(block.bytes_in(FAR) for block in self.blocks.values() if not block.derived)

    def create(self, key: Key, numel: int, dtype: torch.dtype, tier: str, derived: bool = False,
               fixed: bool = False, codes: BlockCodes | None = None) -> torch.Tensor:
        """Creates a block in near or far; a fixed one (see Block) in far, perhaps in codes. Returns its buffer, (numel,) of
        dtype or (codes.num_bytes(numel),) uint8, its content undefined."""
        if key in self.blocks:
            raise StateError(f"block {key} exists already")
        block, fences = Block(key, numel, dtype, derived, fixed, codes), []
        buffer = self._allocate(tier, block, fences)
        self.wait(fences, tier)
        self._add_copy(block, tier, buffer)
        self.blocks[key] = block
        self.kinds[key[0]] = None
        return block.copies[tier]

    def ensure(self, key: Key, tier: str) -> torch.Tensor:
        """The block's buffer in that tier, near or far, copied there if it is not; other copies stay valid.

        Waits for all background work on this block: the caller may write into the buffer, near on the current stream.
        """
        block = self._bring(key, tier)
        if block.pending:
            self._settle_block(block, tier)
        return block.copies[tier]

    def work(self, name: str, keys: Sequence[Key], tier: str,
             prepare: Callable[[dict[Key, torch.Tensor]], Callable[[], object]], background: bool,
             fences: Sequence[Handle] = ()) -> Handle | None:
        """Copies blocks to a tier and runs a job there that reads and writes them, now or in the background. Returns the
        handle of a background job.

        prepare: returns the job, given the blocks' buffers (copies into them may be under way). It is called before the job
        is submitted. A background job begins when its blocks are in the tier and the copies `fences` have ended; the next
        use of one of its blocks waits for its end.
        """
        buffers, before, handle = {}, [*fences], None
        with Pins() as pins:    # none of these blocks is evicted for another one
            for key in keys:
                pins.add(self._block(key), tier)
            for key in keys:
                block = self._bring(key, tier)
                buffers[key] = block.copies[tier]
                before += block.pending
            job = prepare(buffers)

            def when_there() -> None:
                for each in before:
                    each.wait()
                timed()

            if background:
                timed = self._timed("compute", name, 0, job)
                needed = self.schedule.needed(keys[0]) if self.links.by_need else 0.0
                handle = self.links.update(when_there, before, needed)
            else:
                self.wait(before, tier)
                job()
        for key in keys:
            self.mark_written(key, tier)
            if handle is not None:
                self._block(key).pending.append(handle)
            elif (block := self._block(key)).pending:    # waited for above: later steps need not look at ended ones
                block.pending = [each for each in block.pending if not each.done]
        return handle

    def is_settled(self, key: Key) -> bool:
        """Whether all background work on the block has ended."""
        return all(handle.done for handle in self._block(key).pending)

    def finish(self, key: Key) -> None:
        """Waits for all background work on the block."""
        self._settle_block(self._block(key))

    def load_ahead(self, key: Key, tier: str, next_use: float, victims_after: float | None = None) -> bool:
        """Begins to copy a block to the tier in which it will be needed; returns whether it is there or under way.

        Only blocks that are used after next_use, when it is needed, are evicted for it: they would have been evicted anyway,
        unless room becomes free before that. victims_after: a later moment, for that case.
        """
        block = self.blocks.get(key)
        if block is None or tier in block.copies:
            return True
        through = (FAR, NEAR) if tier == NEAR and FAR not in block.copies and NEAR not in block.copies else (tier,)
        for step in through:
            with block:
                if not self._free(step, block.bytes_in(step), next_use if victims_after is None else victims_after):
                    return False
            self._begin(block, step, self.schedule.is_in_next_step(next_use))
        self.schedule.prefetched(key)
        return True

    def peek(self, key: Key) -> tuple[str, torch.Tensor]:
        """(tier, buffer) of a valid copy, near first; only a block that is on disk alone is moved, to far.

        The buffer may be read until the next operation that needs room; see reading().
        """
        block = self._block(key)
        tier = next(tier for tier in ORDER if tier in block.copies)
        tier = FAR if tier == DISK else tier
        return tier, self.ensure(key, tier)

    @contextmanager
    def reading(self, keys: Sequence[Key]) -> Iterator[dict[Key, tuple[str, torch.Tensor]]]:
        """peek() of several blocks, which are pinned until the end of the with statement."""
        places = {}
        with Pins() as pins:
            for key in keys:
                places[key] = self.peek(key)
                pins.add(self.blocks[key], places[key][0])
            yield places

    def copy(self, target: torch.Tensor, source: torch.Tensor, source_tier: str, target_tier: str) -> None:
        """Copies a buffer at once, and counts it in the ledger if the tiers differ."""
        if source_tier == target_tier:
            target.copy_(source)
            return
        self.ledger.add(f"{source_tier} to {target_tier}", source.nbytes)
        way = f"{source_tier} to {target_tier}"
        if self.links.simulated:
            job = self._timed(way, "piece", source.nbytes, lambda: self.links.copy(target, source))
            self.wait([self.links.submit(source_tier, target_tier, job, source.nbytes)])
        else:    # a background worker would gain nothing: this call waits
            with self._waiting():
                self._timed(way, "piece", source.nbytes, lambda: target.copy_(source))()

    def mark_written(self, key: Key, tier: str) -> None:
        """The copy in that tier was changed: drops all other copies, which are out of date."""
        block = self._block(key)
        if tier not in block.copies:
            raise StateError(f"block {key} was written in {tier}, where it is not")
        if block.fixed and tier == NEAR:
            raise StateError(f"block {key} is fixed, but was written near: its far copy would be out of date")
        if len(block.copies) > 1:
            for other in [name for name in block.copies if name != tier]:
                self._drop_copy(block, other)

    def fixed_copies(self, key: Key) -> list[torch.Tensor]:
        """A fixed block's copies in far and, if it is there, in near: the caller writes the same new values into each.
        The copy on disk, which would be out of date, is dropped."""
        self.ensure(key, FAR)
        block = self._block(key)
        if DISK in block.copies:
            self._drop_copy(block, DISK)
        return [block.copies[tier] for tier in (FAR, NEAR) if tier in block.copies]

    def send_far(self, key: Key) -> None:
        """Evicts the block from near: copies it to far if no other tier has an equal copy; drops it if it is derived."""
        block = self._block(key)
        if block.derived:
            self.drop(key)
        elif NEAR in block.copies:
            self._check_unpinned(block)
            self._leave(block)    # before a copy of it begins: the copy's views would count as kept ones
            if len(block.copies) == 1:
                self._begin(block, FAR)
            self._drop_copy(block, NEAR, has_left=True)

    def drop(self, key: Key) -> None:
        """Deletes the block with all its copies. Raises StateError if it is pinned."""
        block = self._block(key)
        if block.pins:
            raise StateError(f"block {key} is in use ({block.pins} pins) and cannot be dropped")
        for tier in list(block.copies):
            self._drop_copy(block, tier)
        del self.blocks[key]

    def pinned(self, key: Key) -> Block:
        """For a with statement, which pins the block until its end."""
        return self._block(key)

    def pin(self, key: Key) -> Block:
        """Pins the block until unpin was called as often."""
        try:
            block = self.blocks[key]
        except KeyError:
            return self._block(key)    # raises a StateError that names the block
        block.pins += 1
        return block

    def unpin(self, key: Key) -> None:
        """Removes one pin, for callers without the Block that pin returned."""
        try:
            self.blocks[key].unpin()
        except KeyError:
            self._block(key)

    # ------------------------------------------------------------------ room

    def limit(self, num_bytes: int | None) -> None:
        """Sets the bytes that blocks may take of near from now on; evicts unpinned blocks until they take no more."""
        near = self.tiers[NEAR]
        near.limit(num_bytes)
        while near.bound_bytes is not None and near.used_bytes > near.bound_bytes:
            if not self.under_way.finish_pending() and not self._evict(NEAR):
                return
        near.limit(num_bytes)    # frees the buffers of the evicted blocks

    def make_room(self, tier: str, num_bytes: int, what: str) -> None:
        """Evicts blocks until num_bytes fit into the tier. Raises BudgetError if no more may be evicted."""
        if not self._free(tier, num_bytes):
            used, budget = self.tiers[tier].used_bytes, self.tiers[tier].bound_bytes
            raise BudgetError(f"{tier}: no room for {what} ({format_bytes(num_bytes)}): {format_bytes(used)} of "
                              f"{format_bytes(budget)} are in use and nothing there may leave; "
                              f"give --{tier}-budget at least {format_bytes(used + num_bytes)}")

    def _free(self, tier: str, num_bytes: int, next_use: float | None = None) -> bool:
        """Evicts until num_bytes fit, with next_use only blocks that are needed after it; returns whether they fit."""
        while not self.tiers[tier].has_room(num_bytes):
            if tier == NEAR and next_use is None and self.under_way.finish_pending():
                continue
            if not self._evict(tier, next_use):
                return False
        return True

    def _allocate(self, tier: str, block: Block, fences: list[Handle]) -> Any:
        if not self.tiers[tier].has_room(num_bytes := block.bytes_in(tier)):
            with block:    # the copy's source must not be evicted to make room for it
                self.make_room(tier, num_bytes, f"{block.key[0]} of group {block.key[1]}")
        if tier == DISK:
            return self.tiers[DISK].allocate(*block.shape_in(DISK), block.key[0])
        after = block.pending if self.links.by_need and tier == NEAR else ()
        return self.tiers[tier].allocate(*block.shape_in(tier), block.key[0], fences, after)

    def _evict(self, tier: str, next_use: float | None = None) -> bool:
        """Evicts one block from a tier to the next slower one; returns whether one could be evicted."""
        if tier == DISK:
            return False
        if tier == FAR and (next_use is None or DISK in self.tiers) and self._drop_duplicate():    # else one goes to disk
            return True
        key = self.schedule.victim(self._candidate(block, tier) for block in self._evictable(tier, next_use))
        if key is None:
            return tier == FAR and DISK in self.tiers and self._drop_duplicate(pinned=True)
        if tier == NEAR:
            self.send_far(key)
        else:
            block = self._block(key)
            if DISK not in block.copies:
                self._begin(block, DISK)
            self._drop_copy(block, FAR)
        return True

    def _evictable(self, tier: str, next_use: float | None = None) -> list[Block]:
        """The blocks that may be evicted to the next slower tier: not pinned; from far only those that are not in near. With
        next_use only those that are needed after it and for which the slower tier has room."""
        slower = ORDER[ORDER.index(tier) + 1]
        if slower not in self.tiers:
            return []
        held = [block for block in self.blocks.values() if tier in block.copies and not block.pins
                and (tier == NEAR or NEAR not in block.copies)]
        if next_use is not None:
            held = [block for block in held if self.schedule.next_use(block.key) > next_use
                    and (len(block.copies) > 1 or block.derived or self._takes(slower, block.bytes_in(slower)))]
        return held

    def _takes(self, tier: str, num_bytes: int) -> bool:
        """Whether a tier has room for num_bytes more, or can evict blocks to disk for them."""
        return self.tiers[tier].has_room(num_bytes) or (tier == FAR and DISK in self.tiers)

    @staticmethod
    def _candidate(block: Block, tier: str) -> Candidate:
        """A derived block counts as dirty: it needs no copy out, but gathering it again costs a copy in and a collective."""
        clean, num_bytes = len(block.copies) > 1, block.bytes_in(tier)
        return Candidate(block.key, num_bytes, 0 if clean else num_bytes, block.came[tier])

    def _drop_duplicate(self, pinned: bool = False) -> bool:
        """Drops one far copy of a block that is also in near (a clean block becomes dirty, no bytes are lost).

        pinned: also of a block whose near copy is in use: no other one can leave far.
        A fixed block stays clean: it is written to disk first, once for the whole run. Without a disk its far copy stays.
        """
        both = [block for block in self.blocks.values() if NEAR in block.copies and FAR in block.copies
                and (not block.pins or (pinned and not block.far_pins))]
        stays = {block.key for block in both if block.fixed and DISK not in block.copies}
        for block in sorted(both, key=lambda block: block.key in stays):
            if block.key in stays:
                if DISK not in self.tiers:
                    return False
                self._begin(block, DISK, source=FAR)
            self._drop_copy(block, FAR)
            return True
        return False

    # ---------------------------------------------------------------- copies

    def _bring(self, key: Key, tier: str) -> Block:
        """Returns the block, with a copy in that tier that is complete or under way."""
        block = self._block(key)
        if tier not in block.copies:
            self._begin(block, tier)
        return block

    def _begin(self, block: Block, tier: str, for_next_step: bool = False, source: str | None = None) -> None:
        """Begins to copy a block to a tier, from `source` or the fastest tier that has it; between disk and near through
        far. Codes are copied from tiers that have codes, and decoded near by the job that copies them."""
        sources = ORDER if block.codes is None else (FAR, DISK)
        source = source or next(tier for tier in sources if tier in block.copies)
        if {source, tier} == {NEAR, DISK}:
            self._begin(block, FAR)
            source = FAR
        fences: list[Handle] = []
        buffer = self._allocate(tier, block, fences)
        data, way, num_bytes = block.copies[source], f"{source} to {tier}", block.bytes_in(source)
        before, codes = (*block.pending, *fences), block.codes if tier == NEAR else None

        def carry() -> None:
            if tier == DISK:
                self.tiers[DISK].write(buffer, data)
            elif source == DISK:
                self.tiers[DISK].read(data, buffer)
            elif codes is not None:
                self.links.copy(codes.tail(buffer), data, lambda: codes.decode_tail(buffer))
            else:
                self.links.copy(buffer, data)

        record = self.recorder(way, f"{block.key[0]} {block.key[1]}", num_bytes)
        self.ledger.add(way, num_bytes, for_next_step)
        needed = self.schedule.needed(block.key) if self.links.by_need else 0.0
        with nullcontext() if self.links.asynchronous else self._waiting():
            block.pending.append(self.links.submit(source, tier, carry, num_bytes, before, record, needed))
        self._add_copy(block, tier, buffer)

    def recorder(self, lane: str, name: str, num_bytes: int) -> Callable[[float, float], None]:
        """Returns a function that writes a copy's begin and end, times of the links' clock, into the profile."""
        profile = self.profile
        if profile is None:
            return lambda begin, end: None
        return lambda begin, end: profile.span(lane, name, profile.at(begin), profile.at(end), bytes=num_bytes)

    def _timed(self, lane: str, name: str, num_bytes: int, job: Callable[[], object]) -> Callable[[], object]:
        """The job, which then also writes its time into the profile."""
        record = self.recorder(lane, name, num_bytes)

        def timed() -> None:
            begin = self.links.now()
            job()
            record(begin, self.links.now())

        return timed

    def _settle_block(self, block: Block, tier: str = FAR) -> None:
        """Waits for all background work on a block, as `wait` does."""
        pending, block.pending = block.pending, []
        self.wait(pending, tier)
        if tier == NEAR:    # a GPU's stream waits: the host may still have to
            block.pending = [handle for handle in pending if not handle.done]

    def wait(self, handles: Sequence[Handle], tier: str = FAR) -> None:
        """Waits for copies, and adds the seconds to the ledger. tier: in which the copied bytes are used. In a GPU's near
        its current stream waits, and the seconds are added later."""
        if handles:
            with self._waiting():
                if tier == NEAR:
                    self.links.order(handles, self._add_waited)
                else:
                    for handle in handles:
                        handle.wait()

    def _add_waited(self, seconds: float) -> None:
        self.ledger.copy_waited_s += seconds

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Counts the seconds inside the with statement as waiting for copies."""
        begin = self.links.now()
        yield
        self.ledger.copy_waited_s += self.links.now() - begin

    def _add_copy(self, block: Block, tier: str, buffer: Any) -> None:
        self._clock += 1
        block.copies[tier], block.came[tier] = buffer, self._clock
        self.num_near[block.key[0]] += tier == NEAR
        if self.profile is not None:
            self.profile.enter(block.key, tier, block.bytes_in(tier))
            self.profile.used(tier, self.tiers[tier].used_bytes)

    def _drop_copy(self, block: Block, tier: str, has_left: bool = False) -> None:
        if tier == NEAR:
            self._check_unpinned(block)
            if not has_left:
                self._leave(block)
            self.departures += 1
            self.num_near[block.key[0]] -= 1
        block.pending = [handle for handle in block.pending if not handle.done]
        buffer = block.copies.pop(tier)
        if tier == DISK:
            self._settle_block(block)
            self.tiers[DISK].release(buffer)
        else:
            shared, block.shared = block.shared, False
            self.tiers[tier].release(buffer, block.pending, keep=not (shared and tier == NEAR))
        if self.profile is not None:
            self.profile.leave(block.key, tier)
            self.profile.used(tier, self.tiers[tier].used_bytes)

    @staticmethod
    def _check_unpinned(block: Block) -> None:
        if block.pins:
            raise StateError(f"block {block.key} is in use ({block.pins} pins) and cannot leave near")

    def _leave(self, block: Block) -> None:
        """Tells `views` that the near copy is about to be dropped. Other views of it may stay, which are never written: a
        module's result (positions that every layer adds), or a graph that was made in backward (create_graph)."""
        if self._views is not None and self._views.leave(block.key, block.copies[NEAR]):
            block.shared = True

    def _block(self, key: Key) -> Block:
        if key not in self.blocks:
            raise StateError(f"there is no block {key}")
        return self.blocks[key]
