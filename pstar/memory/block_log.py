"""A log of blocks: their bytes from before a change that may have to be undone.

The copies are in host memory, in a tier with a budget of its own: they take no room from far, and the tier checks the budget
after every operation. A group is in the log from `record` to `restore` or `forget`.
"""

from collections.abc import Callable, Sequence

import torch

from pstar.memory.block import Key
from pstar.memory.block_store import BlockStore
from pstar.memory.tier import FAR, Tier


class BlockLog:
    """Copies of blocks in far, by group.

    Args:
        store: the blocks.
        budget_bytes: the most that the copies may take.
    """

    def __init__(self, store: BlockStore, budget_bytes: int):
        self.store = store
        self.tier = Tier("log", torch.device("cpu"), budget_bytes)
        self._copies: dict[int, dict[Key, torch.Tensor]] = {}

    def __contains__(self, group: int) -> bool:
        return group in self._copies

    def __len__(self) -> int:
        return len(self._copies)

    def has_room(self, keys: Sequence[Key]) -> bool:
        """Whether copies of all these blocks fit in addition to those that are there."""
        return self.tier.has_room(sum(self.store.blocks[key].num_bytes for key in keys))

    def record(self, group: int, keys: Sequence[Key], reads: Sequence[Key],
               change: Callable[[dict[Key, torch.Tensor]], Callable[[], object]], name: str, background: bool) -> None:
        """Copies a group's blocks into the log, then changes them in far, as BlockStore.work does.

        keys: the blocks that the job changes; has_room(keys) must be true. reads: blocks that it only reads.
        change: returns the job, given the buffers of all of them.

        Raises BudgetError, and changes nothing, if far has no room for blocks that are not there.
        """
        copies: dict[Key, torch.Tensor] = {}

        def prepare(buffers: dict[Key, torch.Tensor]) -> Callable[[], None]:
            job = change(buffers)

            def run() -> None:
                for key, copy in copies.items():
                    self.store.links.copy(copy, buffers[key])
                job()

            return run

        try:
            for block in (self.store.blocks[key] for key in keys):
                # Nothing waits for the last job that used this buffer: all these jobs run one after the other.
                copies[block.key] = self.tier.allocate(block.numel, block.dtype, block.key[0], [])
            self.store.work(name, [*reads, *keys], FAR, prepare, background)
        except BaseException:
            for copy in copies.values():
                self.tier.release(copy)
            raise
        self._copies[group] = copies

    def restore(self, group: int) -> None:
        """Undoes the group's change: its blocks in far get their bytes back, copies in other tiers are dropped."""
        for key, copy in self._copies.pop(group).items():
            self.store.ensure(key, FAR).copy_(copy)    # waits for the change
            self.store.mark_written(key, FAR)
            self.tier.release(copy)

    def restore_all(self) -> int:
        """Undoes all changes; returns how many groups there were."""
        groups = list(self._copies)
        for group in groups:
            self.restore(group)
        return len(groups)

    def forget(self, group: int) -> None:
        """The change is final: the copies are dropped, when it has ended."""
        for key, copy in self._copies.pop(group).items():
            self.tier.release(copy, tuple(self.store.blocks[key].pending))
