"""Blocks in tiers: where each block's bytes are, and the copies that bring them elsewhere. Does not know why.

A *block* is one kind of model data of one group: its parameters, its gradients, its first moments, ... It lies near, far,
or in both places with equal content; a block that is equal in far is *clean* and leaves near without a copy. Blocks in use
are pinned and are never victims. Some blocks are *derived* (a gathered group): they live near only and are dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pstar.errors import BudgetError, StateError
from pstar.schedule import Schedule
from pstar.tiers import FAR, NEAR, Ledger, Tier, format_bytes

Key = tuple[str, int]
"""(kind, group), for example ("param", 3)."""


@dataclass
class Block:
    """One kind of model data of one group, on this rank."""

    key: Key
    numel: int
    dtype: torch.dtype
    derived: bool = False
    copies: dict[str, torch.Tensor] = field(default_factory=dict)
    """The valid copies by tier; all of them are equal."""
    pins: int = 0

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Residency:
    """All blocks of a rank, in two tiers.

    Args:
        near, far: the tiers.
        ledger: where copies are written.
        schedule: names the victims.
        on_leave: called with a block's key just before its near copy goes.
    """

    def __init__(self, near: Tier, far: Tier, ledger: Ledger, schedule: Schedule, on_leave: Callable[[Key], None]):
        self.tiers = {NEAR: near, FAR: far}
        self.ledger, self.schedule, self._on_leave = ledger, schedule, on_leave
        self.blocks: dict[Key, Block] = {}
        self.settle: Callable[[], bool] = lambda: False
        """Ends what is under way and holds near memory meanwhile; whether there was something. Asked before anything is
        evicted: what is under way depends on the program alone, so that all ranks evict the same."""

    def __contains__(self, key: Key) -> bool:
        return key in self.blocks

    def is_near(self, key: Key) -> bool:
        block = self.blocks.get(key)
        return block is not None and NEAR in block.copies

    def model_bytes(self) -> int:
        """Bytes of model data, each block counted once however many copies it has, derived ones not at all."""
        return sum(block.num_bytes for block in self.blocks.values() if not block.derived)

    def create(self, key: Key, numel: int, dtype: torch.dtype, tier: str, derived: bool = False) -> torch.Tensor:
        """A new block in a tier, its content undefined. Returns its buffer, (numel,) of dtype."""
        if key in self.blocks:
            raise StateError(f"block {key} exists already")
        block = Block(key, numel, dtype, derived)
        block.copies[tier] = self._allocate(tier, block)
        self.blocks[key] = block
        return block.copies[tier]

    def ensure(self, key: Key, tier: str) -> torch.Tensor:
        """The block's content in that tier, copied there if it is not; the other copy stays and stays valid."""
        block = self._block(key)
        if tier not in block.copies:
            (source, data), = block.copies.items()
            block.pins += 1          # making room for the copy must not take the source away
            try:
                buffer = self._allocate(tier, block)
            finally:
                block.pins -= 1
            self.copy(buffer, data, source, tier)
            block.copies[tier] = buffer
        return block.copies[tier]

    def peek(self, key: Key) -> tuple[str, torch.Tensor]:
        """(tier, buffer) of a valid copy, near first; moves nothing."""
        copies = self._block(key).copies
        tier = NEAR if NEAR in copies else FAR
        return tier, copies[tier]

    def copy(self, target: torch.Tensor, source: torch.Tensor, source_tier: str, target_tier: str) -> None:
        """Copies a buffer, and writes it into the ledger when it crosses tiers."""
        target.copy_(source)
        if source_tier != target_tier:
            self.ledger.add(f"{source_tier} to {target_tier}", source.nbytes)

    def mark_written(self, key: Key, tier: str) -> None:
        """The copy in that tier was changed: every other copy is out of date and goes."""
        block = self._block(key)
        if tier not in block.copies:
            raise StateError(f"block {key} was written in {tier}, where it is not")
        for other in [name for name in block.copies if name != tier]:
            self._drop_copy(block, other)

    def send_far(self, key: Key) -> None:
        """The block leaves near: copied to far if far has no equal copy, dropped if it is derived."""
        block = self._block(key)
        if block.derived:
            self.drop(key)
        elif NEAR in block.copies:
            self.ensure(key, FAR)
            self._drop_copy(block, NEAR)

    def drop(self, key: Key) -> None:
        """The block ends."""
        block = self._block(key)
        if block.pins:
            raise StateError(f"block {key} is in use ({block.pins} pins) and cannot be dropped")
        for tier in list(block.copies):
            self._drop_copy(block, tier)
        del self.blocks[key]

    def pin(self, key: Key) -> None:
        self._block(key).pins += 1

    def unpin(self, key: Key) -> None:
        block = self._block(key)
        if block.pins == 0:
            raise StateError(f"block {key} is unpinned more often than it was pinned")
        block.pins -= 1

    # ------------------------------------------------------------------ room

    def make_room(self, tier: str, num_bytes: int, what: str) -> None:
        """Evicts until num_bytes fit into the tier. Raises BudgetError when nothing more may leave."""
        while not self.tiers[tier].has_room(num_bytes):
            if tier == NEAR and self.settle():
                continue
            if not (self._evict() if tier == NEAR else self._drop_duplicate()):
                used, budget = self.tiers[tier].used_bytes, self.tiers[tier].budget_bytes
                raise BudgetError(f"{tier}: no room for {what} ({format_bytes(num_bytes)}): {format_bytes(used)} of "
                                  f"{format_bytes(budget)} are in use and nothing there may leave; "
                                  f"give --{tier}-budget at least {format_bytes(used + num_bytes)}")

    def _allocate(self, tier: str, block: Block) -> torch.Tensor:
        self.make_room(tier, block.num_bytes, f"{block.key[0]} of group {block.key[1]}")
        return self.tiers[tier].allocate(block.numel, block.dtype, block.key[0])

    def _evict(self) -> bool:
        key = self.schedule.victim(key for key, block in self.blocks.items() if NEAR in block.copies and not block.pins)
        if key is not None:
            self.send_far(key)
        return key is not None

    def _drop_duplicate(self) -> bool:
        """Frees one far copy that near holds too (a clean block becomes dirty, nothing is lost)."""
        for block in self.blocks.values():
            if len(block.copies) == 2 and not block.pins:
                self._drop_copy(block, FAR)
                return True
        return False

    def _drop_copy(self, block: Block, tier: str) -> None:
        if tier == NEAR:
            if block.pins:
                raise StateError(f"block {block.key} is in use ({block.pins} pins) and cannot leave near")
            self._on_leave(block.key)
        self.tiers[tier].release(block.copies.pop(tier))

    def _block(self, key: Key) -> Block:
        if key not in self.blocks:
            raise StateError(f"there is no block {key}")
        return self.blocks[key]
