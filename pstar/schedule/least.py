"""The fewest bytes that a step must read from disk and write to it: pure functions of numbers.

A step is a list of moments, each with the blocks that must be in memory together (a Use); the steps repeat. The bound takes
near and far as one room, and a block as bytes that may be evicted one by one. Then it is best to evict the bytes whose next
use is farthest ahead (Belady 1966). A store of whole blocks in two memories moves as many bytes or more.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

Key = Hashable
STEPS = 16
"""least_read_bytes averages over so many steps, after as many others: reads may alternate between a few numbers."""


@dataclass(frozen=True)
class Use:
    """The blocks that must be in memory at one moment.

    drops: blocks that are deleted after it (gradients after their update). The next use of such a block creates it.
    """

    needs: frozenset[Key]
    drops: frozenset[Key] = frozenset()


def read_bytes(uses: Sequence[Use], sizes: Mapping[Key, int], room: int, num_steps: int) -> list[int]:
    """The fewest bytes read in so many steps, step by step; before the first there are no blocks.

    sizes: bytes of each block. Blocks that never leave memory are left out, of `uses` and of `room`. Raises ValueError for a
    moment whose blocks exceed the room.
    """
    for use in uses:
        if sum(sizes[key] for key in use.needs) > room:
            raise ValueError(f"the blocks {sorted(map(str, use.needs))} exceed the room of {room} bytes")
    waits = _until_next_use(uses)
    resident: dict[Key, int] = {}    # bytes in memory of each block that exists
    next_use: dict[Key, int] = {}
    farthest: list[tuple[int, int, Key]] = []    # (-next use, a unique number, block); outdated entries are skipped
    in_memory, numbers, counts = 0, count(), [0] * num_steps
    for step in range(num_steps):
        for moment, use in enumerate(uses):
            for key in use.needs:
                counts[step] += sizes[key] - resident.get(key, sizes[key])
                in_memory += sizes[key] - resident.get(key, 0)
                resident[key] = sizes[key]
                next_use[key] = step * len(uses) + moment + waits[moment][key]
            while in_memory > room:
                when, number, key = heappop(farthest)
                if key not in resident or next_use[key] != -when:
                    continue
                gone = min(in_memory - room, resident[key])
                resident[key] -= gone
                in_memory -= gone
                if resident[key]:
                    heappush(farthest, (when, number, key))
            for key in use.needs - use.drops:
                heappush(farthest, (-next_use[key], next(numbers), key))
            for key in use.drops:
                in_memory -= resident.pop(key)
    return counts


def _until_next_use(uses: Sequence[Use]) -> list[dict[Key, int]]:
    """For each moment and each of its blocks the number of moments until the block's next use."""
    waits: list[dict[Key, int]] = [{} for _ in uses]
    following: dict[Key, int] = {}
    for moment in range(2 * len(uses) - 1, -1, -1):
        for key in uses[moment % len(uses)].needs:
            if moment < len(uses):
                waits[moment][key] = following[key] - moment
            following[key] = moment
    return waits


def least_read_bytes(uses: Sequence[Use], sizes: Mapping[Key, int], room: int) -> float:
    """The fewest bytes that a step reads on average, once the steps repeat; arguments and errors as in read_bytes."""
    return sum(read_bytes(uses, sizes, room, 2 * STEPS)[STEPS:]) / STEPS


def least_written_bytes(uses: Sequence[Use], sizes: Mapping[Key, int], room: int) -> int:
    """The fewest bytes that a step writes if every block changes in it: the most that exist at one moment, less the room.
    What is not in memory then was written since its last change."""
    dropped = frozenset().union(*(use.drops for use in uses))
    kept = sum(size for key, size in sizes.items() if key not in dropped)
    live: set[Key] = set()
    most = 0
    for use in uses:
        live |= use.needs & dropped
        most = max(most, kept + sum(sizes[key] for key in live))
        live -= use.drops
    return max(0, most - room)
