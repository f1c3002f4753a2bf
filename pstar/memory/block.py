"""A block of model data, its copies in the tiers, and the pins that keep it there."""

from dataclasses import dataclass, field
from typing import Any

import torch

from pstar.errors import StateError
from pstar.kernels import BlockCodes
from pstar.memory.copy_queue import Handle
from pstar.memory.tier import FAR, NEAR

Key = tuple[str, int]
"""(kind, group), for example ("param", 3)."""


@dataclass
class Block:
    """One kind of model data of one group, on this rank."""

    key: Key
    numel: int
    dtype: torch.dtype
    derived: bool = False
    fixed: bool = False
    """Never written while it is near: a copy in far or on disk stays valid, so its eviction from near needs no copy."""
    codes: BlockCodes | None = None
    """The format of a fixed block's copies in far and on disk; its near copy is decoded from them. None: all are alike."""
    copies: dict[str, Any] = field(default_factory=dict)
    """The valid copies by tier, all of the same values: tensors, on disk an Extent."""
    came: dict[str, int] = field(default_factory=dict)
    """When each copy was made, on the store's clock."""
    pins: int = 0
    far_pins: int = 0
    """Pins of work that uses the far copy, although the block may be near too."""
    pending: list[Handle] = field(default_factory=list)
    """Copies under way that read or write one of the copies."""
    shared: bool = False
    """Whether other tensors keep views of the near copy, which is about to be dropped."""

    def shape_in(self, tier: str) -> tuple[int, torch.dtype]:
        """(elements, dtype) of a copy in that tier."""
        if self.codes is None or tier == NEAR:
            return self.numel, self.dtype
        return self.codes.num_bytes(self.numel), torch.uint8

    @property
    def num_bytes(self) -> int:
        """Bytes of the block without codes."""
        return self.numel * self.dtype.itemsize

    def bytes_in(self, tier: str) -> int:
        """Bytes of a copy in that tier."""
        numel, dtype = self.shape_in(tier)
        return numel * dtype.itemsize

    def unpin(self) -> None:
        """Removes one pin. Raises StateError without one."""
        if self.pins == 0:
            raise StateError(f"block {self.key} is unpinned more often than it was pinned")
        self.pins -= 1

    def __enter__(self) -> None:
        """Pins the block inside a with statement."""
        self.pins += 1

    def __exit__(self, *_: object) -> None:
        self.pins -= 1


class Pins:
    """Several blocks, pinned until the end of a with statement."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Block, bool]] = []

    def __enter__(self) -> "Pins":
        return self

    def add(self, block: Block, tier: str = NEAR) -> None:
        """Pins a block for work in a tier. Work in near uses the near copy, if there is one."""
        block.pins += 1
        block.far_pins += tier == FAR
        self._blocks.append((block, tier == FAR))

    def __exit__(self, *_: object) -> None:
        for block, far in self._blocks:
            block.pins -= 1
            block.far_pins -= far
