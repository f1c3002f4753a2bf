"""Schedules of a pipeline as data: for every rank the list of its instructions. Pure functions, no torch, no processes.

A pipeline of p ranks cuts the model into stages; stage s lies on rank s % p, so of v virtual stages a rank has s, s + p ...
A batch is cut into m micro-batches, which follow each other through the stages, forward (F) and backward (B).

    naive        a micro-batch goes through all stages and back before the next one enters: one rank works, p - 1 wait
    gpipe        all micro-batches forward, then all backward                   (Huang et al. 2019, GPipe, section 2.3)
    1f1b         p - rank of them forward, then one backward for each forward   (Narayanan et al. 2019, PipeDream, 3.2;
                                                                                 with a flush: 2021, Megatron-LM, 2.2.1)
    interleaved  1f1b with v stages a rank                                      (Narayanan et al. 2021, section 2.2.2)

    python chapters/05_model_parallel/schedules.py 1f1b 4 8           prints this one, in units of one F or one B
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

NAMES = ("naive", "gpipe", "1f1b", "interleaved")


class Work(NamedTuple):
    """One computation: kind "F" or "B" of a micro-batch in a stage."""

    kind: str
    stage: int
    micro: int


class Transfer(NamedTuple):
    """The output of a Work on its way: kind "send" or "recv", the other rank, and the Work that made it."""

    kind: str
    peer: int
    of: Work


class Event(NamedTuple):
    """A Work when it runs, in units of time."""

    rank: int
    work: Work
    begin: float
    end: float


# ---- the orders of work -----------------------------------------------------------------------------------------------


def orders(name: str, num_ranks: int, num_micros: int, num_virtual: int = 1) -> list[list[Work]]:
    """What each rank computes, in order.

    Args:
        name: one of NAMES.
        num_ranks: p.
        num_micros: m.
        num_virtual: v, stages of a rank; above 1 for interleaved only.

    Raises:
        ValueError: an unknown name, v without interleaved, or an m that p does not divide for interleaved.
    """
    if name not in NAMES:
        raise ValueError(f"{name} is no schedule: there are {', '.join(NAMES)}")
    if name != "interleaved" and num_virtual != 1:
        raise ValueError(f"{num_virtual} virtual stages are of interleaved, not of {name}")
    if name == "interleaved" and num_micros % num_ranks:
        raise ValueError(f"interleaved: {num_micros} micro-batches are not divisible by {num_ranks} ranks")
    found = []
    for rank in range(num_ranks):
        forward = [_nth("F", n, rank, num_ranks, num_virtual) for n in range(num_micros * num_virtual)]
        backward = [_nth("B", n, rank, num_ranks, num_virtual) for n in range(num_micros * num_virtual)]
        ahead = {"naive": 1, "gpipe": num_micros, "1f1b": num_ranks - rank}.get(name)
        if ahead is None:  # interleaved: the first micro-batches must come round v - 1 times before one can turn back
            ahead = 2 * (num_ranks - rank - 1) + (num_virtual - 1) * num_ranks + 1
        found.append(_one_by_one(forward, backward, min(ahead, len(forward))))
    return found


def _nth(kind: str, n: int, rank: int, num_ranks: int, num_virtual: int) -> Work:
    """The n-th F or B of a rank: p micro-batches through its first stage, the same p through its next, ..., the next p."""
    if num_virtual == 1:
        return Work(kind, rank, n)
    round_, inside = divmod(n, num_ranks * num_virtual)
    chunk = inside // num_ranks
    chunk = chunk if kind == "F" else num_virtual - 1 - chunk
    return Work(kind, chunk * num_ranks + rank, round_ * num_ranks + inside % num_ranks)


def _one_by_one(forward: list[Work], backward: list[Work], ahead: int) -> list[Work]:
    """`ahead` forwards, then a backward and a forward in turns, then the backwards that are left."""
    order = forward[:ahead]
    for n, work in enumerate(backward):
        order += [work, *forward[ahead + n : ahead + n + 1]]
    return order


def forward_only(num_ranks: int, num_micros: int, num_virtual: int = 1) -> list[list[Work]]:
    """For evaluation: every micro-batch through all stages, nothing back."""
    each = [[chunk * num_ranks + rank for chunk in range(num_virtual)] for rank in range(num_ranks)]
    return [[Work("F", stage, micro) for micro in range(num_micros) for stage in stages] for stages in each]


# ---- what follows from them -------------------------------------------------------------------------------------------


def simulate(order: Sequence[Sequence[Work]], forward: float = 1.0, backward: float = 1.0) -> list[Event]:
    """When each Work runs where transfers take no time: as soon as the one before it and what it needs are done.

    Args:
        order: of every rank.
        forward, backward: units of time that one F and one B take.

    Returns:
        events in order of their begin.

    Raises:
        ValueError: a deadlock; the first rank that waits for ever, and for what.
    """
    num_ranks = len(order)
    last = max(work.stage for works in order for work in works)
    done: dict[Work, float] = {}
    at, clock, events = [0] * num_ranks, [0.0] * num_ranks, []
    while any(at[rank] < len(order[rank]) for rank in range(num_ranks)):
        before = len(events)
        for rank in range(num_ranks):
            while at[rank] < len(order[rank]):
                work = order[rank][at[rank]]
                needs = needed_by(work, last)
                if any(need not in done for need in needs):
                    break
                begin = max([clock[rank], *(done[need] for need in needs)])
                end = begin + (forward if work.kind == "F" else backward)
                done[work] = clock[rank] = end
                events.append(Event(rank, work, begin, end))
                at[rank] += 1
        if len(events) == before:
            rank = next(rank for rank in range(num_ranks) if at[rank] < len(order[rank]))
            raise ValueError(f"deadlock: rank {rank} waits for ever to do {order[rank][at[rank]]}")
    return sorted(events, key=lambda event: (event.begin, event.rank))


def needed_by(work: Work, last: int) -> list[Work]:
    """What must be done before: the neighbour's output, and for B the F of the same stage. `last` is the last stage."""
    if work.kind == "F":
        return [Work("F", work.stage - 1, work.micro)] if work.stage else []
    own = Work("F", work.stage, work.micro)
    return [own] if work.stage == last else [own, Work("B", work.stage + 1, work.micro)]


def with_transfers(order: Sequence[Sequence[Work]]) -> list[list[Work | Transfer]]:
    """The same lists with sends and receives, in an order that cannot deadlock.

    Each transfer stands at the time of the simulation at which its content is there, on both its ranks; of those at the
    same time the one of the lower stage and micro-batch comes first. So two ranks see the transfers between them in one and
    the same order, as they must where sends and receives of a pair queue up behind each other (NCCL does that), and no
    rank waits for what comes later in this common time.
    """
    num_ranks = len(order)
    last = max(work.stage for works in order for work in works)
    found: list[list[tuple]] = [[] for _ in order]
    for event in simulate(order):
        work = event.work
        found[event.rank].append(((event.begin, 1, work), work))
        next_stage = work.stage + 1 if work.kind == "F" else work.stage - 1
        if 0 <= next_stage <= last and next_stage % num_ranks != event.rank:
            peer, key = next_stage % num_ranks, (event.end, 0, work)
            found[event.rank].append((key, Transfer("send", peer, work)))
            found[peer].append((key, Transfer("recv", event.rank, work)))
    return [[what for _, what in sorted(items, key=lambda item: item[0])] for items in found]


def peak_live(works: Sequence[Work]) -> int:
    """Most micro-batches (times stages) whose activations a rank keeps at a time: forward done, backward not."""
    live = peak = 0
    for work in works:
        live += 1 if work.kind == "F" else -1
        peak = max(peak, live)
    return peak


def bubble(events: Sequence[Event], num_ranks: int) -> float:
    """Share of the ranks' time, from the first begin to the last end, in which they wait: 0 to 1."""
    span = max(event.end for event in events) - min(event.begin for event in events)
    return 1 - sum(event.end - event.begin for event in events) / (num_ranks * span)


def bubble_formula(name: str, num_ranks: int, num_micros: int, num_virtual: int = 1) -> float:
    """(p - 1) / (v m + p - 1); naive: (p - 1) / p. (GPipe section 2.3; Narayanan et al. 2021, section 2.2.2.)"""
    rounds = 1 if name == "naive" else num_micros * num_virtual
    return (num_ranks - 1) / (rounds + num_ranks - 1)


def table(order: Sequence[Sequence[Work]]) -> str:
    """A line for each rank, a column for each unit of time; F3 is micro-batch 3 forward, F3' in the rank's second stage."""
    num_ranks, events = len(order), simulate(order)
    length = round(max(event.end for event in events))
    cells = [[""] * length for _ in order]
    for event in events:
        work = event.work
        cells[event.rank][round(event.begin)] = f"{work.kind}{work.micro}" + "'" * (work.stage // num_ranks)
    width = max(len(cell) for row in cells for cell in row)
    return "\n".join(f"rank {rank}  " + " ".join(f"{cell or '.':<{width}}" for cell in row).rstrip()
                     for rank, row in enumerate(cells))  # fmt: skip


def main(arguments: list[str]) -> None:
    """Prints a schedule: NAME p m [v]."""
    name, num_ranks, num_micros, *rest = arguments
    num_virtual = int(rest[0]) if rest else 2 if name == "interleaved" else 1
    order = orders(name, int(num_ranks), int(num_micros), num_virtual)
    peaks = ", ".join(str(peak_live(works)) for works in order)
    print(table(order))
    formula = bubble_formula(name, len(order), int(num_micros), num_virtual)
    print(f"bubble {bubble(simulate(order), len(order)):.1%}, by the formula {formula:.1%}; live at most {peaks}")


if __name__ == "__main__":
    usage = "python schedules.py naive|gpipe|1f1b|interleaved RANKS MICRO_BATCHES [VIRTUAL_STAGES]"
    if sys.argv[1:] == ["--help"]:
        print(usage)
        sys.exit()
    if len(sys.argv) not in (4, 5):
        sys.exit(usage)
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
