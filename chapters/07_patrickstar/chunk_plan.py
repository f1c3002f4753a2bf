"""The layout (which parameter is in which chunk) and the schedule (which chunk is evicted): numbers only, no tensor.

Training repeats itself: every step uses the same chunks in the same order. So the first step is recorded as a *trace*, one
moment for each use of a chunk. From the second step on, the next use of each chunk is known. The best chunk to evict is then
the one whose next use is farthest away (Belady 1966). The trace is a cycle: its first moment follows its last.

    trace    0   1   2   3 | 3   2   1   0 |              forward, then backward, over four chunks with room for two
    near     0  01  12  23 | 23  23  21  10 | 10  12 ...  2 (4 - 2) = 4 loads a step: 2, 3 in forward, 1, 0 in backward
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

ALIGN_ELEMS = 32  # 128 bytes: each parameter begins on a cache line, as a separate tensor would
NEVER = math.inf


# ---- the layout: which parameter is in which chunk -------------------------------------------------------------------


def pack(modules: Sequence[Sequence[tuple[str, int]]], chunk_elems: int) -> list[tuple[int, dict[str, int]]]:
    """Assigns parameters to chunks, in order. A module's parameters share one chunk if they fit into one.

    Args:
        modules: for each module the (name, number of elements) of its direct parameters.
        chunk_elems: elements in a chunk; a parameter larger than that gets a chunk of its own.

    Returns:
        (elements, {name: offset of its first element}) of each chunk.
    """

    def aligned(numel: int) -> int:
        return -(-numel // ALIGN_ELEMS) * ALIGN_ELEMS

    chunk_elems = aligned(chunk_elems)
    large: list[tuple[int, dict[str, int]]] = []
    chunks: list[dict[str, int]] = []
    fill = chunk_elems  # of the last chunk: initially full, so the first parameter opens a chunk
    for own in modules:
        large += [(aligned(numel), {name: 0}) for name, numel in own if aligned(numel) > chunk_elems]
        small = [(name, aligned(numel)) for name, numel in own if aligned(numel) <= chunk_elems]
        together = sum(numel for _, numel in small)
        if fill + together > chunk_elems >= together:
            fill = chunk_elems  # leave the rest of the last chunk empty
        for name, numel in small:
            if fill + numel > chunk_elems:
                chunks.append({})
                fill = 0
            chunks[-1][name] = fill
            fill += numel
    return [*large, *((chunk_elems, places) for places in chunks)]


def live_near(sizes: Sequence[int], near_bytes: int) -> list[int]:
    """The chunks whose model data are all near and never move: the first ones whose moments fit there, in addition to all
    parameters and to the gradients that are near at the same time. Those of other chunks go far when they are complete, so
    that two of them are near at most.

    Args:
        sizes: elements of each chunk, in fp32.
    """

    def first_that_fit(room: int, bytes_an_element: int) -> list[int]:
        found = []
        for index, elems in enumerate(sizes):
            if bytes_an_element * elems <= room:
                room -= bytes_an_element * elems
                found.append(index)
        return found

    margin, gradients = near_bytes - 4 * sum(sizes), 4 * sum(sizes)
    two = 4 * sum(sorted(sizes)[-2:])
    # Moments take 8 bytes an element, and gradients 4. With room for everything, all chunks live near.
    next_to_all, next_to_two = first_that_fit(margin - gradients, 8), first_that_fit(margin - two, 12)
    return next_to_two if len(next_to_two) > len(next_to_all) else next_to_all


# ---- the schedule: which chunk is evicted ----------------------------------------------------------------------------


def next_use(accesses: Sequence[int], chunk: int, moment: int) -> float:
    """The first moment after `moment` that uses a chunk; moments of the next step count on. NEVER if there is none."""
    for ahead in range(1, len(accesses) + 1):
        if accesses[(moment + ahead) % len(accesses)] == chunk:
            return moment + ahead
    return NEVER


def victim(accesses: Sequence[int], moment: int, resident: Iterable[int]) -> int:
    """The chunk to evict at a moment: of those that are near, the one whose next use is farthest away."""
    return max(resident, key=lambda chunk: next_use(accesses, chunk, moment))


class Schedule:
    """The moments of this step so far, and the trace of the last step, which this step is expected to repeat."""

    def __init__(self) -> None:
        self.trace: list[int] = []  # of the last whole step
        self.moments: list[int] = []  # of this step
        self._follows = True  # whether this step has followed the trace so far
        self._by_last_use: dict[int, None] = {}  # all chunks, the least recently used one first

    def touch(self, chunk: int, in_step: bool = True) -> None:
        """Records a use of a chunk. Uses in an evaluation (in_step False) are not moments of a step."""
        self._by_last_use.pop(chunk, None)
        self._by_last_use[chunk] = None
        if in_step:
            self._follows = self._follows and self.trace[len(self.moments) :][:1] == [chunk]
            self.moments.append(chunk)

    def victim(self, resident: Sequence[int]) -> int:
        """The chunk to evict; in a step without a trace, or that departs from the trace, the least recently used."""
        if self.trace and (self._follows or not self.moments):
            return victim(self.trace, len(self.moments) - 1, resident)
        return next(chunk for chunk in self._by_last_use if chunk in resident)

    def end_step(self) -> None:
        self.trace, self.moments, self._follows = self.moments, [], True


def count_loads(accesses: Sequence[int], room: int) -> int:
    """Number of chunks loaded near in the third repetition of a step; near has room for `room` chunks of equal size.

    Forward and backward over n chunks, 0 1 .. n-1 n-1 .. 1 0, need 2 (n - room): those near at either end are not loaded.
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
