"""Exercise 07: which chunk leaves when room is short, and how many have to come back. About 25 lines in all.

    pytest tests/exercises -k 07                  # all of it
    pytest tests/exercises -k "07 and victim"     # one function: next_use, victim, loads

The grader asks for next uses of small traces, plays random traces against a search through all of the future, trains six
layers in chunks.py with your victims in the place of its own, and counts loads: n chunks, touched forward and then
backward, with room for C of them, need 2 (n - C) loads a step.

When you have tried: `next_use`, `victim` and `count_loads` in this folder's chunk_plan.py; then pstar/schedule/schedule.py.
"""

from __future__ import annotations

from collections.abc import Sequence

NEVER = float("inf")


def next_use(accesses: Sequence[int], chunk: int, moment: int) -> float:
    """The first moment AFTER `moment` at which a chunk is touched. Training repeats itself: the trace is a cycle.

    Args:
        accesses: accesses[m] is the chunk touched at moment m, of one step.
        chunk: its number.
        moment: 0 to len(accesses) - 1.

    Returns:
        the moment, counted on into the next step where this step has none: moment m of the next step is
        len(accesses) + m. NEVER for a chunk that is not in the trace.
    """
    raise NotImplementedError("next_use is yours to write: look ahead in this step, then in the next one")


def victim(accesses: Sequence[int], moment: int, resident: Sequence[int]) -> int:
    """The chunk that leaves, so that another one can come in: the one whose next use lies farthest ahead (Belady 1966).

    Args:
        accesses, moment: as above; the chunk touched at `moment` is the one that comes in.
        resident: the chunks that are near, at least one, all of equal size.
    """
    raise NotImplementedError("victim is yours to write: the farthest next use leaves")


def count_loads(accesses: Sequence[int], room: int) -> int:
    """How often a chunk has to be brought near in one step, once training is under way.

    A chunk that is touched must be near; if it is not, it is loaded, and where `room` chunks are near already a victim
    leaves first. Near is empty at the beginning and stays as it is from one step to the next. Play three steps, count the
    loads of the third.

    Args:
        accesses: of one step.
        room: how many chunks fit near at once, at least 1.

    Before you run it: what is the answer for 0 1 2 3 3 2 1 0 and room for 2?
    """
    raise NotImplementedError("count_loads is yours to write: three steps with your victims, the loads of the last")
