"""A log of blocks: their bytes from before a change that may have to be undone.

The copies are in host memory, in a tier with a budget of its own: they take no room from far, and the tier checks the budget
after every operation. A group is in the log from `record` to `restore` or `forget`.
"""

from collections.abc import Callable, Sequence

import torch

from pstar.memory.block import Key
from pstar.memory.block_store import BlockStore
from pstar.memory.copy_queue import Handle
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
        self._logged: dict[int, tuple[dict[Key, torch.Tensor], Handle | None]] = {}    # copies, and the background change

    def __contains__(self, group: int) -> bool:
        return group in self._logged

    def __len__(self) -> int:
        return len(self._logged)

    def has_room(self, keys: Sequence[Key]) -> bool:
        """Whether copies of all these blocks fit in addition to those that are there."""
        return self.tier.has_room(sum(self.store.blocks[key].num_bytes for key in keys))

    def record(self, group: int, keys: Sequence[Key], reads: Sequence[Key],
               prepare: Callable[[dict[Key, torch.Tensor]], Callable[[], object]], name: str, background: bool) -> None:
        """Copies a group's blocks into the log, then changes them in far, as BlockStore.work does.

        keys: the blocks that the job changes; has_room(keys) must be true. reads: blocks that it only reads.
        prepare: returns the job, given the buffers of all of them.

        Raises BudgetError, and changes nothing, if far has no room for blocks that are not there.
        """
        copies: dict[Key, torch.Tensor] = {}
        fences: list[Handle] = []    # the last jobs that used these buffers

        def logged(buffers: dict[Key, torch.Tensor]) -> Callable[[], None]:
            job = prepare(buffers)

            def run() -> None:
                for key, copy in copies.items():
                    self.store.links.copy(copy, buffers[key])
                job()

            return run

        try:
            for block in (self.store.blocks[key] for key in keys):
                copies[block.key] = self.tier.allocate(block.numel, block.dtype, block.key[0], fences)
            change = self.store.work(name, [*reads, *keys], FAR, logged, background, fences)
        except BaseException:
            for copy in copies.values():
                self.tier.release(copy, fences)
            raise
        self._logged[group] = copies, change

    def restore(self, group: int) -> None:
        """Undoes the group's change: its blocks in far get their bytes back, copies in other tiers are dropped."""
        copies, _ = self._logged.pop(group)
        for key, copy in copies.items():
            self.store.ensure(key, FAR).copy_(copy)    # waits for the change
            self.store.mark_written(key, FAR)
            self.tier.release(copy)

    def restore_all(self) -> int:
        """Undoes all changes; returns how many groups there were."""
        groups = list(self._logged)
        for group in groups:
            self.restore(group)
        return len(groups)

    def forget(self, group: int) -> None:
        """The change is final: the copies are dropped, when it has ended."""
        copies, change = self._logged.pop(group)
        # Not all that is pending on these blocks: copies wait for the change, whose job may keep this log alive to the last.
        for copy in copies.values():
            self.tier.release(copy, () if change is None or change.done else (change,))
