"""Schedules of a pipeline as data: a list of instructions for every rank. Pure functions, no torch, no processes.

A pipeline of p ranks cuts the model into stages. Stage s is on rank s % p: with v stages a rank, rank r has r, r + p, ...
A batch is cut into m micro-batches, which follow each other through the stages, forward (F) and backward (B).

    naive        a micro-batch goes through all stages and back before the next one enters: one rank works, p - 1 wait
    gpipe        all micro-batches forward, then all backward                   (Huang et al. 2019, GPipe, section 2.3)
    1f1b         p - rank of them forward, then one backward for each forward   (Narayanan et al. 2019, PipeDream, 3.2;
                                                                                 with a flush: 2021, Megatron-LM, 2.2.1)
    interleaved  1f1b with v stages a rank                                      (Narayanan et al. 2021, section 2.2.2)

    python chapters/05_model_parallel/schedules.py 1f1b 4 8           prints 1f1b for p = 4, m = 8; a column is one F or B
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

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro} in stage {self.stage}"


class Transfer(NamedTuple):
    """A transfer of a Work's output: kind "send" or "recv", the other rank (peer), and the Work that computed it (of)."""

    kind: str
    peer: int
    of: Work


class Event(NamedTuple):
    """The begin and end of a Work on a rank, in units of time."""

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
        raise ValueError(f"{name} is not a schedule: choose one of {', '.join(NAMES)}")
    if name != "interleaved" and num_virtual != 1:
        raise ValueError(f"{num_virtual} virtual stages need interleaved, not {name}")
    if name == "interleaved" and num_micros % num_ranks:
        raise ValueError(f"interleaved: {num_micros} micro-batches are not divisible by {num_ranks} ranks")
    found = []
    for rank in range(num_ranks):
        forward = [_nth("F", n, rank, num_ranks, num_virtual) for n in range(num_micros * num_virtual)]
        backward = [_nth("B", n, rank, num_ranks, num_virtual) for n in range(num_micros * num_virtual)]
        ahead = {"naive": 1, "gpipe": num_micros, "1f1b": num_ranks - rank}.get(name)
        if ahead is None:  # interleaved: micro-batches go round the ranks v - 1 times before the first backward
            ahead = 2 * (num_ranks - rank - 1) + (num_virtual - 1) * num_ranks + 1
        found.append(_one_by_one(forward, backward, min(ahead, len(forward))))
    return found


def _nth(kind: str, n: int, rank: int, num_ranks: int, num_virtual: int) -> Work:
    """The n-th F or B of a rank: p micro-batches in its first stage, the same p in its next ones, then the next p."""
    if num_virtual == 1:
        return Work(kind, rank, n)
    round_, inside = divmod(n, num_ranks * num_virtual)
    chunk = inside // num_ranks
    chunk = chunk if kind == "F" else num_virtual - 1 - chunk
    return Work(kind, chunk * num_ranks + rank, round_ * num_ranks + inside % num_ranks)


def _one_by_one(forward: list[Work], backward: list[Work], ahead: int) -> list[Work]:
    """`ahead` forwards, then backward and forward in turns, then the remaining backwards."""
    order = forward[:ahead]
    for n, work in enumerate(backward):
        order += [work, *forward[ahead + n : ahead + n + 1]]
    return order


def forward_only(num_ranks: int, num_micros: int, num_virtual: int = 1) -> list[list[Work]]:
    """For evaluation: forward of every micro-batch through all stages, no backward."""
    each = [[chunk * num_ranks + rank for chunk in range(num_virtual)] for rank in range(num_ranks)]
    return [[Work("F", stage, micro) for micro in range(num_micros) for stage in stages] for stages in each]


# ---- simulation and transfers -----------------------------------------------------------------------------------------


def simulate(order: Sequence[Sequence[Work]], forward: float = 1.0, backward: float = 1.0) -> list[Event]:
    """Times of each Work if transfers take no time: it begins when the rank's previous Work and its inputs are done.

    Args:
        order: the Works of every rank, in order.
        forward, backward: duration of one F and one B, in units of time.

    Returns:
        events in order of their begin.

    Raises:
        ValueError: a deadlock; names the first rank that waits for ever, and the Work that it cannot begin.
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
    """The Works that `work` depends on: the neighbour's output, and for B the F of the same stage. last: the last stage."""
    if work.kind == "F":
        return [Work("F", work.stage - 1, work.micro)] if work.stage else []
    own = Work("F", work.stage, work.micro)
    return [own] if work.stage == last else [own, Work("B", work.stage + 1, work.micro)]


def with_transfers(order: Sequence[Sequence[Work]]) -> list[list[Work | Transfer]]:
    """The same lists with sends and receives, in an order that cannot deadlock.

    Each transfer gets the simulated time at which its tensor is ready, on both ranks. Those of the same time are sorted by
    kind, stage and micro-batch. So both ranks list the transfers between them in the same order. NCCL needs
    that: it runs the transfers of a pair one after the other. No rank waits for a transfer that is later in this order.
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
    """The most (stage, micro-batch) pairs whose activations a rank keeps at once: forward done, backward not yet."""
    live = peak = 0
    for work in works:
        live += 1 if work.kind == "F" else -1
        peak = max(peak, live)
    return peak


def bubble(events: Sequence[Event], num_ranks: int) -> float:
    """Fraction of time, from the first begin to the last end, that ranks wait: 0 to 1."""
    span = max(event.end for event in events) - min(event.begin for event in events)
    return 1 - sum(event.end - event.begin for event in events) / (num_ranks * span)


def bubble_formula(name: str, num_ranks: int, num_micros: int, num_virtual: int = 1) -> float:
    """(p - 1) / (v m + p - 1); naive: (p - 1) / p. (GPipe section 2.3; Narayanan et al. 2021, section 2.2.2.)"""
    rounds = 1 if name == "naive" else num_micros * num_virtual
    return (num_ranks - 1) / (rounds + num_ranks - 1)


def table(order: Sequence[Sequence[Work]]) -> str:
    """A row for each rank, a column for each unit of time. F3: micro-batch 3 forward; F3': in the rank's second stage."""
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
