"""Which parameter lies in which chunk, and which chunk leaves when room is short: numbers only, no tensor.

Training repeats itself: every step uses the same chunks in the same order. So the first step is written down as a *trace*,
one moment for each use of a chunk, and from then on the future is known. Knowing it, the best victim is the chunk whose
next use is farthest away (Belady 1966); the trace is a cycle, so after its last moment comes its first.

    trace    0   1   2   3 | 3   2   1   0 |              forward, then backward, over four chunks with room for two
    near     0  01  12  23 | 23  23  21  10 | 10  12 ...  2 (4 - 2) = 4 loads a step: 2, 3 in forward, 1, 0 in backward
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

ALIGN_ELEMS = 32  # 128 bytes: each parameter begins on a cache line, as it would in memory of its own
NEVER = math.inf


# ---- the layout: which parameter lies where. Numbers only ------------------------------------------------------------


def pack(modules: Sequence[Sequence[tuple[str, int]]], chunk_elems: int) -> list[tuple[int, dict[str, int]]]:
    """Places parameters in chunks, in order. A module is not split over two chunks where it fits into one.

    Args:
        modules: (name, number of elements) of each module's own parameters.
        chunk_elems: elements in a chunk; a parameter larger than that gets a chunk of its own.

    Returns:
        (elements, {name: first element}) of each chunk.
    """

    def aligned(numel: int) -> int:
        return -(-numel // ALIGN_ELEMS) * ALIGN_ELEMS

    chunk_elems = aligned(chunk_elems)
    large: list[tuple[int, dict[str, int]]] = []
    chunks: list[dict[str, int]] = []
    fill = chunk_elems  # of the last chunk: full, so that the first parameter opens the first chunk
    for own in modules:
        large += [(aligned(numel), {name: 0}) for name, numel in own if aligned(numel) > chunk_elems]
        small = [(name, aligned(numel)) for name, numel in own if aligned(numel) <= chunk_elems]
        together = sum(numel for _, numel in small)
        if fill + together > chunk_elems >= together:
            fill = chunk_elems  # what is left of the last chunk stays empty
        for name, numel in small:
            if fill + numel > chunk_elems:
                chunks.append({})
                fill = 0
            chunks[-1][name] = fill
            fill += numel
    return [*large, *((chunk_elems, places) for places in chunks)]


# ---- the schedule: which chunk leaves. Numbers only ------------------------------------------------------------------


def next_use(accesses: Sequence[int], chunk: int, moment: int) -> float:
    """The first moment after `moment` at which a chunk is used; in the next step it is counted on. NEVER if it is not."""
    for ahead in range(1, len(accesses) + 1):
        if accesses[(moment + ahead) % len(accesses)] == chunk:
            return moment + ahead
    return NEVER


def victim(accesses: Sequence[int], moment: int, resident: Iterable[int]) -> int:
    """The chunk that leaves at a moment: of those that are near, the one whose next use is farthest away."""
    return max(resident, key=lambda chunk: next_use(accesses, chunk, moment))


class Schedule:
    """The moments of this step so far, and those of the last one, which this one is expected to repeat."""

    def __init__(self) -> None:
        self.trace: list[int] = []  # of the last whole step
        self.moments: list[int] = []  # of this step
        self._follows = True  # whether they are the trace's, so far
        self._by_last_use: dict[int, None] = {}  # all chunks, the least recently used one first

    def touch(self, chunk: int, in_step: bool = True) -> None:
        """A chunk is used now. What an evaluation uses is no moment of a step."""
        self._by_last_use.pop(chunk, None)
        self._by_last_use[chunk] = None
        if in_step:
            self._follows = self._follows and self.trace[len(self.moments) :][:1] == [chunk]
            self.moments.append(chunk)

    def victim(self, resident: Sequence[int]) -> int:
        """The chunk that leaves; while nothing is known (the first step, or another one than before) the oldest use."""
        if self.trace and (self._follows or not self.moments):
            return victim(self.trace, len(self.moments) - 1, resident)
        return next(chunk for chunk in self._by_last_use if chunk in resident)

    def end_step(self) -> None:
        self.trace, self.moments, self._follows = self.moments, [], True


def count_loads(accesses: Sequence[int], room: int) -> int:
    """Chunks of equal size that are brought near in the third step of a trace, with room for `room` of them.

    n chunks there and back, 0 1 .. n-1 n-1 .. 1 0, need 2 (n - room): what is near at either end need not be loaded.
    """
    schedule, near, loads = Schedule(), [], 0
    for _ in range(3):
        loads = 0
        for chunk in accesses:
            schedule.touch(chunk)
            if chunk not in near:
                if len(near) == room:
                    near.remove(schedule.victim(near))
                near.append(chunk)
                loads += 1
        schedule.end_step()
    return loads
