"""The tier of each group's optimizer states, and the tier in which its update is computed."""

from collections.abc import Collection

from pstar.layout.layout import Layout
from pstar.memory.tier import FAR, NEAR


class UpdateTiers:
    """One entry for each group of chunks.

    Args:
        layout: the groups.
        near: groups whose states are in near at first; those of other groups are in far.
        streamed: every update is computed near: states in far are copied to near for it, and back.
    """

    def __init__(self, layout: Layout, near: Collection[int] = (), streamed: bool = False):
        self._groups, self.streamed = layout.groups, streamed
        self.states_tier = [NEAR if group.index in near else FAR for group in layout.groups]
        self.near_elems = self.near_blocks = 0
        """Elements of this rank's pieces whose states are in near, and blocks of 8-bit states (Group.piece_blocks)."""
        self._count()
        self.let_go: set[int] = set()
        """Groups whose parameters have left near until their update of this step (Gradients._let_go)."""

    def update_tier(self, group: int) -> str:
        """The tier in which a group's update is computed."""
        return NEAR if self.streamed else self.states_tier[group]

    def move_states(self, group: int, tier: str) -> None:
        """From now on the group's states are in that tier."""
        self.states_tier[group] = tier
        self._count()

    def _count(self) -> None:    # kept as a number: it is read at every moment, and states seldom move
        near = [group for group in self._groups if self.states_tier[group.index] == NEAR]
        self.near_elems = sum(group.piece_elems for group in near)
        self.near_blocks = sum(group.piece_blocks for group in near)
