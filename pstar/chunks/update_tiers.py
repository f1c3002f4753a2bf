"""In which tier each group's optimizer states lie, and in which its update is computed."""

from collections.abc import Collection

from pstar.layout.layout import Layout
from pstar.memory.tier import FAR, NEAR


class UpdateTiers:
    """One entry for each group of chunks.

    Args:
        layout: the groups.
        near: those whose states lie near at first; the others' lie far.
        streamed: every update is computed near: states that lie far come for it, and go.
    """

    def __init__(self, layout: Layout, near: Collection[int] = (), streamed: bool = False):
        self._groups, self.streamed = layout.groups, streamed
        self.states_tier = [NEAR if group.index in near else FAR for group in layout.groups]
        self.near_elems = 0
        """Elements of this rank's pieces whose states lie near."""
        self._count()

    def update_tier(self, group: int) -> str:
        """The tier in which a group's update is computed."""
        return NEAR if self.streamed else self.states_tier[group]

    def move_states(self, group: int, tier: str) -> None:
        """From now on the group's states lie in that tier."""
        self.states_tier[group] = tier
        self._count()

    def _count(self) -> None:    # room is asked for at every moment, and they seldom move
        self.near_elems = sum(group.piece_elems for group in self._groups if self.states_tier[group.index] == NEAR)
