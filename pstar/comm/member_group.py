"""A process group that its members alone make, while other ranks of the job do something else."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

BEYOND = 1 << 32    # no job makes so many groups

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
"""For each default group, the groups that were made, by their members."""


def new_member_group(members: Sequence[int], timeout: timedelta | None = None, backend: str = "gloo") -> dist.ProcessGroup:
    """A new group of the ranks `members`, by their numbers in the job. Only they call this.

    torch names a group by a count of groups. Since torch 2.14 a group that only its members make counts as well: ranks
    outside of it would then give the next group of all ranks another name, and never meet its members. So here the count
    stays as it was, and the name comes from the members and from the number of groups that they have made before.
    """
    ordered, world = tuple(sorted(members)), dist.distributed_c10d._world
    made = _made.setdefault(dist.group.WORLD, Counter())
    before, world.group_count = world.group_count, BEYOND + made[ordered]
    made[ordered] += 1
    try:
        return dist.new_group(list(ordered), timeout, backend, use_local_synchronization=True)
    finally:
        world.group_count = before
