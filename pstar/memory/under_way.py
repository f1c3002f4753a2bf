"""Background work that holds blocks of near: the gathers and reductions that have begun and are not finished."""

from typing import Protocol


class Pending(Protocol):
    """Background work that holds near memory, for example a collective."""

    def finish(self) -> None:
        """Waits for its end, removes itself from UnderWay, unpins its blocks, and passes its result on."""


class UnderWay:
    """Background work, added here by the object that began it. All of it is finished before a block is evicted from near.
    Which work is under way depends on the program alone, so all ranks evict the same blocks."""

    def __init__(self) -> None:
        self.gathers: list[Pending] = []
        self.reductions: list[Pending] = []

    def finish_pending(self) -> bool:
        """Finishes all, gathers first; returns whether any work was under way."""
        if not self.gathers and not self.reductions:
            return False
        while self.gathers:
            self.gathers[0].finish()
        self.finish_reductions()
        return True

    def finish_reductions(self) -> None:
        while self.reductions:
            self.reductions[0].finish()
