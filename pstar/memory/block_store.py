"""Blocks in tiers: where each block's bytes are, and the copies that bring them elsewhere. Does not know why.

A *block* is one kind of model data of one group: its parameters, its gradients, its first moments, ... It lies near, far,
on disk, or in several places with equal content; a block that is equal in a slower tier is *clean* and leaves without a
copy. Blocks in use are pinned and are never victims. Some blocks are *derived* (a gathered group): they live near only and
are dropped.

Copies go on in the background (copy_queue.py). The books are kept when a copy is begun: a block that leaves is gone from
near at once, its bytes are valid far when the copy has ended, and its buffer may be taken again by whoever waits for that.
So what lies where follows from what is asked for alone, not from the speed of a link, and where ranks ask alike they decide
alike.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch

from pstar.errors import BudgetError, StateError
from pstar.memory.block import Block, Key, Pins
from pstar.memory.copy_queue import Handle
from pstar.memory.disk import DiskTier
from pstar.memory.links import Movers
from pstar.memory.tier import DISK, FAR, NEAR, Ledger, Tier, format_bytes
from pstar.profile.recording import Profile
from pstar.schedule.schedule import Candidate, Schedule

ORDER = (NEAR, FAR, DISK)


class Views(Protocol):
    """Who has tensors that are views of near copies."""

    def leave(self, key: Key, buffer: torch.Tensor) -> bool:
        """A block's near copy, this buffer, is about to go; whether somebody keeps a view of it."""


class Pending(Protocol):
    """Something that goes on beside the program and holds near memory meanwhile, a collective for example."""

    def finish(self) -> None:
        """Waits for its end, takes itself out of UnderWay, gives back what it held, and makes its result known."""


class UnderWay:
    """What goes on beside the program, put here by who began it. All of it is finished before anything is evicted from near:
    which of it there is depends on the program alone, so that all ranks evict the same."""

    def __init__(self) -> None:
        self.gathers: list[Pending] = []
        self.reductions: list[Pending] = []

    def finish_pending(self) -> bool:
        """Finishes all, gathers first; whether there was something."""
        if not self.gathers and not self.reductions:
            return False
        while self.gathers:
            self.gathers[0].finish()
        self.finish_reductions()
        return True

    def finish_reductions(self) -> None:
        while self.reductions:
            self.reductions[0].finish()


class Residency:
    """All blocks of a rank, in two tiers or three.

    Args:
        near, far, disk: the tiers; without disk what does not fit into far is refused.
        ledger: where copies are written.
        schedule: names the victims.
        views: is told before a block's near copy goes.
        movers: what carries out the copies; at once, where none are given.
        profile: records what comes and goes.
    """

    def __init__(self, near: Tier, far: Tier, ledger: Ledger, schedule: Schedule, views: Views | None = None,
                 disk: DiskTier | None = None, movers: Movers | None = None, profile: Profile | None = None):
        self.tiers: dict[str, Any] = {NEAR: near, FAR: far} | ({DISK: disk} if disk else {})
        self.ledger, self.schedule, self._views = ledger, schedule, views
        self.movers, self.profile = movers or Movers(asynchronous=False), profile
        self.blocks: dict[Key, Block] = {}
        self.under_way = UnderWay()
        self.departures = 0
        """How often a block has left near."""
        self._clock = 0

    def __contains__(self, key: Key) -> bool:
        return key in self.blocks

    def is_near(self, key: Key) -> bool:
        block = self.blocks.get(key)
        return block is not None and NEAR in block.copies

    def model_bytes(self) -> int:
        """Bytes of model data, each block counted once however many copies it has, derived ones not at all."""
        return sum(block.num_bytes for block in self.blocks.values() if not block.derived)

    def create(self, key: Key, numel: int, dtype: torch.dtype, tier: str, derived: bool = False) -> torch.Tensor:
        """A new block, near or far, its content undefined. Returns its buffer, (numel,) of dtype."""
        if key in self.blocks:
            raise StateError(f"block {key} exists already")
        block, fences = Block(key, numel, dtype, derived), []
        buffer = self._allocate(tier, block, fences)
        self.wait(fences)
        self._add_copy(block, tier, buffer)
        self.blocks[key] = block
        return block.copies[tier]

    def ensure(self, key: Key, tier: str) -> torch.Tensor:
        """The block's content in that tier, near or far, copied there if it is not; other copies stay and stay valid.

        Nothing goes on in the background with this block when it returns: the caller may write into the buffer.
        """
        block = self._bring(key, tier)
        if block.pending:
            self._settle_block(block)
        return block.copies[tier]

    def work(self, name: str, keys: Sequence[Key], tier: str,
             prepare: Callable[[dict[Key, torch.Tensor]], Callable[[], object]], background: bool) -> None:
        """Brings blocks to a tier and does something there that reads and writes them, now or in the background.

        prepare: from the blocks' buffers, which may still be on their way, to the job; called before it is submitted. In the
        background the job begins when its blocks are there, and whoever uses one of them waits for its end.
        """
        buffers, before, handle = {}, [], None
        with Pins() as pins:    # no block makes room for the next one
            for key in keys:
                block = self._bring(key, tier)
                buffers[key] = block.copies[tier]
                before += block.pending
                pins.add(block)
            job = prepare(buffers)

            def when_there() -> None:
                for each in before:
                    each.wait()
                job()

            if background:
                handle = self.movers.update(self._timed("compute", name, 0, when_there))
            else:
                self.wait(before)
                job()
        for key in keys:
            self.mark_written(key, tier)
            if handle is not None:
                self._block(key).pending.append(handle)

    def is_settled(self, key: Key) -> bool:
        """Whether nothing goes on with the block any more."""
        return all(handle.done for handle in self._block(key).pending)

    def finish(self, key: Key) -> None:
        """Waits for what goes on with the block."""
        self._settle_block(self._block(key))

    def load_ahead(self, key: Key, tier: str, next_use: float) -> bool:
        """Begins to bring a block to a tier in which it will be needed; whether it is there or under way.

        Only blocks leave for it whose own next use lies behind next_use: nothing is loaded that would not have been.
        """
        block = self.blocks.get(key)
        if block is None or tier in block.copies:
            return True
        through = (FAR, NEAR) if tier == NEAR and FAR not in block.copies and NEAR not in block.copies else (tier,)
        for step in through:
            with block:
                if not self._free(step, block.num_bytes, next_use):
                    return False
            self._begin(block, step, self.schedule.is_in_next_step(next_use))
        self.schedule.prefetched(key)
        return True

    def peek(self, key: Key) -> tuple[str, torch.Tensor]:
        """(tier, buffer) of a valid copy, near first; moves nothing but what lies on disk only, which comes to far.

        The buffer may be read until the next operation that needs room; see reading().
        """
        block = self._block(key)
        tier = next(tier for tier in ORDER if tier in block.copies)
        tier = FAR if tier == DISK else tier
        return tier, self.ensure(key, tier)

    @contextmanager
    def reading(self, keys: Sequence[Key]) -> Iterator[dict[Key, tuple[str, torch.Tensor]]]:
        """peek() of several blocks, which stay where they are until the end of the with."""
        places = {}
        with Pins() as pins:
            for key in keys:
                places[key] = self.peek(key)
                pins.add(self.blocks[key])
            yield places

    def copy(self, target: torch.Tensor, source: torch.Tensor, source_tier: str, target_tier: str) -> None:
        """Copies a buffer at once, and writes it into the ledger when it crosses tiers."""
        if source_tier == target_tier:
            target.copy_(source)
            return
        self.ledger.add(f"{source_tier} to {target_tier}", source.nbytes)
        way = f"{source_tier} to {target_tier}"
        if self.movers.simulated:
            job = self._timed(way, "piece", source.nbytes, lambda: self.movers.copy(target, source))
            self.wait([self.movers.submit(source_tier, target_tier, job, source.nbytes)])
        else:    # nobody gains from a worker that is waited for
            with self._waiting():
                self._timed(way, "piece", source.nbytes, lambda: target.copy_(source))()

    def mark_written(self, key: Key, tier: str) -> None:
        """The copy in that tier was changed: every other copy is out of date and goes."""
        block = self._block(key)
        if tier not in block.copies:
            raise StateError(f"block {key} was written in {tier}, where it is not")
        if len(block.copies) > 1:
            for other in [name for name in block.copies if name != tier]:
                self._drop_copy(block, other)

    def send_far(self, key: Key) -> None:
        """The block leaves near: copied to far if no other tier has an equal copy, dropped if it is derived."""
        block = self._block(key)
        if block.derived:
            self.drop(key)
        elif NEAR in block.copies:
            self._check_unpinned(block)
            self._leave(block)    # before a copy of it begins, which has views of its own
            if len(block.copies) == 1:
                self._begin(block, FAR)
            self._drop_copy(block, NEAR, has_left=True)

    def drop(self, key: Key) -> None:
        """The block ends."""
        block = self._block(key)
        if block.pins:
            raise StateError(f"block {key} is in use ({block.pins} pins) and cannot be dropped")
        for tier in list(block.copies):
            self._drop_copy(block, tier)
        del self.blocks[key]

    def pinned(self, key: Key) -> Block:
        """For a with: the block stays where it is until its end."""
        return self._block(key)

    def pin(self, key: Key) -> Block:
        """The block stays where it is until its unpin was called as often."""
        try:
            block = self.blocks[key]
        except KeyError:
            return self._block(key)    # which says what is wrong
        block.pins += 1
        return block

    def unpin(self, key: Key) -> None:
        """For who did not keep what pin gave him."""
        try:
            self.blocks[key].unpin()
        except KeyError:
            self._block(key)

    # ------------------------------------------------------------------ room

    def limit(self, num_bytes: int | None) -> None:
        """What blocks may take of near from now on; blocks leave until that holds, pinned ones excepted."""
        near = self.tiers[NEAR]
        near.limit(num_bytes)
        while near.bound_bytes is not None and near.used_bytes > near.bound_bytes:
            if not self.under_way.finish_pending() and not self._evict(NEAR):
                return
        near.limit(num_bytes)    # what has left is idle now

    def make_room(self, tier: str, num_bytes: int, what: str) -> None:
        """Evicts until num_bytes fit into the tier. Raises BudgetError when nothing more may leave."""
        if not self._free(tier, num_bytes):
            used, budget = self.tiers[tier].used_bytes, self.tiers[tier].bound_bytes
            raise BudgetError(f"{tier}: no room for {what} ({format_bytes(num_bytes)}): {format_bytes(used)} of "
                              f"{format_bytes(budget)} are in use and nothing there may leave; "
                              f"give --{tier}-budget at least {format_bytes(used + num_bytes)}")

    def _free(self, tier: str, num_bytes: int, next_use: float | None = None) -> bool:
        """Evicts until num_bytes fit, with next_use only blocks that are needed after it; whether they do."""
        while not self.tiers[tier].has_room(num_bytes):
            if tier == NEAR and next_use is None and self.under_way.finish_pending():
                continue
            if not self._evict(tier, next_use):
                return False
        return True

    def _allocate(self, tier: str, block: Block, fences: list[Handle]) -> Any:
        if not self.tiers[tier].has_room(block.num_bytes):
            with block:    # making room for a copy must not take its source away
                self.make_room(tier, block.num_bytes, f"{block.key[0]} of group {block.key[1]}")
        if tier == DISK:
            return self.tiers[DISK].allocate(block.numel, block.dtype, block.key[0])
        return self.tiers[tier].allocate(block.numel, block.dtype, block.key[0], fences)

    def _evict(self, tier: str, next_use: float | None = None) -> bool:
        """One block leaves a tier for the next one; whether one could."""
        if tier == DISK:
            return False
        if tier == FAR and next_use is None and self._drop_duplicate():
            return True
        key = self.schedule.victim(self._candidate(block, tier) for block in self._evictable(tier, next_use))
        if key is None:
            return False
        if tier == NEAR:
            self.send_far(key)
        else:
            block = self._block(key)
            if DISK not in block.copies:
                self._begin(block, DISK)
            self._drop_copy(block, FAR)
        return True

    def _evictable(self, tier: str, next_use: float | None = None) -> list[Block]:
        """The blocks that may leave a tier for the next one: not pinned, and not in far because near has them. With next_use
        only those that are needed after it, and for which the next tier has room."""
        slower = ORDER[ORDER.index(tier) + 1]
        if slower not in self.tiers:
            return []
        held = [block for block in self.blocks.values() if tier in block.copies and not block.pins
                and (tier == NEAR or NEAR not in block.copies)]
        if next_use is not None:
            held = [block for block in held if self.schedule.next_use(block.key) > next_use
                    and (len(block.copies) > 1 or block.derived or self._takes(slower, block.num_bytes))]
        return held

    def _takes(self, tier: str, num_bytes: int) -> bool:
        """Whether a tier takes num_bytes more, of its own room or by passing something on."""
        return self.tiers[tier].has_room(num_bytes) or (tier == FAR and DISK in self.tiers)

    @staticmethod
    def _candidate(block: Block, tier: str) -> Candidate:
        """A gathered block needs no copy out, but to gather it again is as dear: it takes a copy in and a collective."""
        clean = len(block.copies) > 1
        return Candidate(block.key, block.num_bytes, 0 if clean else block.num_bytes, block.came[tier])

    def _drop_duplicate(self) -> bool:
        """Frees one far copy that near holds too (a clean block becomes dirty, nothing is lost)."""
        for block in self.blocks.values():
            if NEAR in block.copies and FAR in block.copies and not block.pins:
                self._drop_copy(block, FAR)
                return True
        return False

    # ---------------------------------------------------------------- copies

    def _bring(self, key: Key, tier: str) -> Block:
        """The block, which has a copy in that tier, there or on its way."""
        block = self._block(key)
        if tier not in block.copies:
            self._begin(block, tier)
        return block

    def _begin(self, block: Block, tier: str, for_next_step: bool = False) -> None:
        """Begins to copy a block to a tier, from the fastest one that has it; between disk and near it goes through far."""
        source = next(tier for tier in ORDER if tier in block.copies)
        if {source, tier} == {NEAR, DISK}:
            self._begin(block, FAR)
            source = FAR
        fences: list[Handle] = []
        buffer = self._allocate(tier, block, fences)
        data, way = block.copies[source], f"{source} to {tier}"
        before = (*block.pending, *fences)

        def carry() -> None:
            for handle in before:
                handle.wait()
            if tier == DISK:
                self.tiers[DISK].write(buffer, data)
            elif source == DISK:
                self.tiers[DISK].read(data, buffer)
            else:
                self.movers.copy(buffer, data)

        self.ledger.add(way, block.num_bytes, for_next_step)
        job = self._timed(way, f"{block.key[0]} {block.key[1]}", block.num_bytes, carry)
        with nullcontext() if self.movers.asynchronous else self._waiting():
            block.pending.append(self.movers.submit(source, tier, job, block.num_bytes))
        self._add_copy(block, tier, buffer)

    def _timed(self, lane: str, name: str, num_bytes: int, job: Callable[[], object]) -> Callable[[], object]:
        """The job, which writes into the profile when it was."""
        profile = self.profile
        if profile is None:
            return job

        def timed() -> None:
            begin = profile.now()
            job()
            profile.span(lane, name, begin, profile.now(), bytes=num_bytes)

        return timed

    def _settle_block(self, block: Block) -> None:
        """Waits for what goes on with a block."""
        pending, block.pending = block.pending, []
        self.wait(pending)

    def wait(self, handles: Sequence[Handle]) -> None:
        """Waits for copies, and writes down how long."""
        if handles:
            with self._waiting():
                for handle in handles:
                    handle.wait()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Records the seconds of its block as waiting: nothing else is done meanwhile."""
        begin = self.movers.now()
        yield
        self.ledger.copy_waited_s += self.movers.now() - begin

    def _add_copy(self, block: Block, tier: str, buffer: Any) -> None:
        self._clock += 1
        block.copies[tier], block.came[tier] = buffer, self._clock
        if self.profile is not None:
            self.profile.enter(block.key, tier, block.num_bytes)
            self.profile.used(tier, self.tiers[tier].used_bytes)

    def _drop_copy(self, block: Block, tier: str, has_left: bool = False) -> None:
        if tier == NEAR:
            self._check_unpinned(block)
            if not has_left:
                self._leave(block)
            self.departures += 1
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
        """Who knows of the near copy lets go of it. A view may stay all the same: what a module returned of its parameter
        (positions that every layer adds), or a graph that was made in backward (create_graph). Nothing is written there."""
        if self._views is not None and self._views.leave(block.key, block.copies[NEAR]):
            block.shared = True

    def _block(self, key: Key) -> Block:
        if key not in self.blocks:
            raise StateError(f"there is no block {key}")
        return self.blocks[key]
