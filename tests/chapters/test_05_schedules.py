"""Chapter 05's schedules as data: no processes, all counts as the papers state them."""

from __future__ import annotations

from collections import deque

import pytest

from tests.chapters.technique import technique

schedules = technique("05_model_parallel", "schedules")

CASES = [(name, p, m, 1) for name in ("naive", "gpipe", "1f1b") for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 8, 16)]
CASES += [("interleaved", p, m, v) for p in (1, 2, 3, 4, 8) for m in (p, 2 * p, 4 * p) for v in (1, 2, 3)]


@pytest.mark.parametrize("name, p, m, v", CASES)
def test_every_micro_batch_goes_forward_once_and_backward_once_in_every_stage(name, p, m, v):
    order = schedules.orders(name, p, m, v)
    for rank, works in enumerate(order):
        expected = {schedules.Work(kind, chunk * p + rank, n) for kind in "FB" for chunk in range(v) for n in range(m)}
        assert len(works) == len(expected) and set(works) == expected


@pytest.mark.parametrize("name, p, m, v", CASES)
def test_live_activations_and_the_bubble_are_those_of_the_papers(name, p, m, v):
    order = schedules.orders(name, p, m, v)
    for rank, works in enumerate(order):
        peak = {"naive": 1, "gpipe": m, "1f1b": min(m, p - rank),
                "interleaved": min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1)}[name]  # fmt: skip
        assert schedules.peak_live(works) == peak
    events = schedules.simulate(order)
    formula = (p - 1) / p if name == "naive" else (p - 1) / (v * m + p - 1)
    assert schedules.bubble_formula(name, p, m, v) == pytest.approx(formula)
    assert schedules.bubble(events, p) == pytest.approx(formula)
    if name in ("gpipe", "1f1b"):  # a backward takes about two forwards: the share stays
        assert schedules.bubble(schedules.simulate(order, 1, 2), p) == pytest.approx(formula)


def walk(programs: list[list], delays: dict | None = None) -> None:
    """Runs programs on unbuffered queues: a send and its receive complete when both are first in the queue of their pair."""
    p = len(programs)
    last = max(what.stage for program in programs for what in program if isinstance(what, schedules.Work))
    queues = {(a, b): (deque(), deque()) for a in range(p) for b in range(a + 1, p)}
    at, done = [0] * p, [set() for _ in range(p)]
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                what = program[at[rank]]
                if isinstance(what, schedules.Transfer):
                    pair = min(rank, what.peer), max(rank, what.peer)
                    queues[pair][rank > what.peer].append(what)
                elif all(need in done[rank] for need in schedules.needed_by(what, last)):
                    done[rank].add(what)
                else:
                    break
                at[rank] += 1
                moved = True
        for (a, b), (left, right) in queues.items():
            while left and right:
                one, other = left.popleft(), right.popleft()
                assert one.of == other.of and {one.kind, other.kind} == {"send", "recv"}, "a pair in two orders"
                done[a if one.kind == "recv" else b].add(one.of)
                moved = True
    assert at == [len(program) for program in programs], "deadlock"
    assert not any(side for pair in queues.values() for side in pair), "a transfer that only one side knows"


@pytest.mark.parametrize("name, p, m, v", CASES)
def test_sends_and_receives_cannot_deadlock(name, p, m, v):
    order = schedules.orders(name, p, m, v)
    programs = schedules.with_transfers(order)
    assert [[what for what in program if isinstance(what, schedules.Work)] for program in programs] == order
    for program in programs:  # what is sent has been computed
        for number, what in enumerate(program):
            if isinstance(what, schedules.Transfer) and what.kind == "send":
                assert what.of in program[:number]
    walk(programs)
    walk(schedules.with_transfers(schedules.forward_only(p, m, v)))


def test_the_walk_finds_a_deadlock_and_a_wrong_order():
    programs = schedules.with_transfers(schedules.orders("1f1b", 2, 4))
    swapped = [list(program) for program in programs]
    transfers = [n for n, what in enumerate(swapped[1]) if isinstance(what, schedules.Transfer)]
    swapped[1][transfers[0]], swapped[1][transfers[2]] = swapped[1][transfers[2]], swapped[1][transfers[0]]
    with pytest.raises(AssertionError):
        walk(swapped)
    order = schedules.orders("gpipe", 2, 2)
    order[0].reverse()
    with pytest.raises(ValueError, match="deadlock: rank 0 waits for ever"):
        schedules.simulate(order)


def test_the_command_prints_the_table_and_refuses_wrong_flags(capsys):
    schedules.main(["1f1b", "2", "3"])
    said = capsys.readouterr().out.splitlines()
    assert said == ["rank 0  F0 F1 .  B0 F2 B1 .  B2", "rank 1  .  F0 B0 F1 B1 F2 B2 .",
                    "bubble 25.0%, by the formula 25.0%; live at most 2, 1"]  # fmt: skip
    for wrong in (("gpipe", 2, 2, 2), ("interleaved", 2, 3, 2), ("zigzag", 2, 2)):
        with pytest.raises(ValueError):
            schedules.orders(*wrong)
