"""Exercise 07: which chunk to evict, and how many chunks must be loaded again. About 25 lines in all.

    bash chapters/07_patrickstar/exercise.sh             # all of it
    bash chapters/07_patrickstar/exercise.sh -k victim   # one function: next_use, victim, loads

The grader checks next uses on small traces, and your victims on random traces against a search through the whole trace. It
trains six layers in chunks.py with your victim function, and counts loads: n chunks, touched in forward and then in
backward, with room for C of them, need 2 (n - C) loads a step.

When you have tried: compare with `next_use`, `victim`, `count_loads` in chunk_plan.py; then pstar/schedule/schedule.py.
"""

from __future__ import annotations

from collections.abc import Sequence

NEVER = float("inf")


def next_use(accesses: Sequence[int], chunk: int, moment: int) -> float:
    """The first moment AFTER `moment` at which a chunk is touched. Training repeats itself: the trace is a cycle.

    Args:
        accesses: of one step; accesses[m] is the chunk touched at moment m.
        chunk: its number.
        moment: 0 to len(accesses) - 1.

    Returns:
        the moment. If the rest of this step has none, count on: moment m of the next step is len(accesses) + m. NEVER
        for a chunk that is not in the trace.
    """
    raise NotImplementedError("next_use is yours to write: look ahead in this step, then in the next one")


def victim(accesses: Sequence[int], moment: int, resident: Sequence[int]) -> int:
    """The chunk to evict so that another one can be loaded: the one whose next use is farthest away (Belady 1966).

    Args:
        accesses, moment: as above; the chunk touched at `moment` is the one to load.
        resident: the chunks that are near, at least one, all of equal size.
    """
    raise NotImplementedError("victim is yours to write: the farthest next use leaves")


def count_loads(accesses: Sequence[int], room: int) -> int:
    """The number of chunks loaded near in one step, after the first steps.

    A chunk that is touched must be near; otherwise it is loaded, and if `room` chunks are already near, a victim is evicted
    first. Near is empty before the first step and keeps its chunks from one step to the next. Simulate three steps, count
    the loads of the third.

    Args:
        accesses: of one step.
        room: number of chunks that fit near at once, at least 1.

    Before you run it: what is the answer for 0 1 2 3 3 2 1 0 and room 2?
    """
    raise NotImplementedError("count_loads is yours to write: three steps with your victims, the loads of the last")
