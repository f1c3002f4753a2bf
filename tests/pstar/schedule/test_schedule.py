"""The schedule is numbers: eviction against the brute-force optimum, traces, and what happens when a step differs."""

import random

import pytest

from pstar.errors import ConfigError, StateError
from pstar.schedule.schedule import NEVER, Candidate, Leaving, Schedule, Trace, count_loads


def sweep(n: int) -> list[int]:
    """n chunks forward, then backward."""
    return [*range(n), *reversed(range(n))]


@pytest.mark.parametrize("policy", ["next_use", "lru"])
@pytest.mark.parametrize("n, room", [(10, 3), (10, 9), (7, 2), (40, 25)])
def test_loads_of_a_step_equal_the_formula(policy, n, room):
    assert count_loads(sweep(n), room, policy) == 2 * (n - room)


@pytest.mark.parametrize("policy, loads", [("next_use", 45), ("lru", 75), ("fifo", 56)])
def test_next_use_pays_where_the_room_changes(policy, loads):
    """40 chunks; activations shrink the room from 45 to 25 in forward, and it stays so until backward is over. Then Adam
    has all of it, and updates every chunk. Five chunks are updated with a triple of optimizer chunks that competes with
    the others."""
    room = [45 - number // 2 for number in range(40)]
    update = [key for chunk in range(40)
              for key in [*((kind, chunk) for kind in ("exp_avg", "exp_avg_sq", "low") if chunk < 5), chunk]]
    rooms = [*room, *[25] * 40, *[45] * len(update)]
    assert count_loads([*sweep(40), *update], rooms, policy, num_steps=4) == loads


def test_nothing_is_loaded_when_everything_fits():
    assert count_loads(sweep(6), 6) == 0


def optimum(accesses: list[int], room: int) -> int:
    """Least loads of the second of two repetitions, by search over all choices of victims."""
    sequence = accesses * 2
    best = {frozenset(): (0, 0)}                       # resident set -> (loads in all, loads in the second repetition)
    for moment, key in enumerate(sequence):
        after: dict[frozenset, tuple[int, int]] = {}
        for resident, (total, second) in best.items():
            if key in resident:
                choices = [(resident, 0)]
            elif len(resident) < room:
                choices = [(resident | {key}, 1)]
            else:
                choices = [((resident - {victim}) | {key}, 1) for victim in resident]
            for chosen, load in choices:
                cost = (total + load, second + load * (moment >= len(accesses)))
                after[chosen] = min(after.get(chosen, (10**9, 0)), cost)
        best = after
    return min(total for total, _ in best.values())


def test_next_use_equals_the_brute_force_optimum_on_random_traces():
    generator = random.Random(0)
    for _ in range(1000):
        accesses = [generator.randrange(5) for _ in range(generator.randrange(4, 12))]
        accesses = [key for index, key in enumerate(accesses) if accesses[index - 1] != key]    # in a row is one moment
        if not accesses:
            continue
        room = generator.randrange(1, 4)
        # The engine's first step is traced without knowledge; give it the trace for both repetitions instead.
        schedule, resident, loads = Schedule("next_use"), [], 0
        schedule.follow(Trace(accesses * 2))
        schedule.begin_step()
        for key in accesses * 2:
            schedule.touch(key)
            if key not in resident:
                if len(resident) >= room:
                    resident.remove(schedule.victim(map(Candidate, resident)))
                resident.append(key)
                loads += 1
        assert loads == optimum(accesses, room), accesses


def test_the_distance_is_weighed_with_the_bytes_that_move():
    schedule = Schedule()
    schedule.follow(Trace(["a", "b", "c", "d", "a", "b", "c"]))
    schedule.begin_step()
    schedule.touch("a")                                 # next uses: b in 1 moment, c in 2, d in 3, a in 4
    assert schedule.victim([Candidate("b"), Candidate("c"), Candidate("d")]) == "d"
    assert schedule.victim([Candidate("b"), Candidate("c"), Candidate("d", store_bytes=1)]) == "c", "dirty: twice the bytes"
    assert schedule.victim([Candidate("b"), Candidate("d", store_bytes=1)]) == "d", "but three times as long"
    unknown = [Candidate("x", 4, store_bytes=4), Candidate("y", 2), Candidate("z", 3)]
    assert schedule.victim([Candidate("d"), *unknown]) == "z", "never used again: the largest that needs no copy"


def test_first_in_first_out():
    schedule = Schedule("fifo")
    assert schedule.victim([Candidate("a", came=3), Candidate("b", came=1), Candidate("c", came=2)]) == "b"


def test_next_use_wraps_around_the_end_of_the_step():
    trace = Trace(["a", "b", "a", "c"])
    assert [trace.next_use("a", moment) for moment in range(4)] == [2, 2, 4, 4]
    assert trace.next_use("b", 1) == 5
    assert trace.next_use("z", 0) == NEVER


def run_step(schedule: Schedule, keys: str) -> None:
    schedule.begin_step()
    for key in keys:
        schedule.touch(key)
    schedule.end_step()


def test_the_first_moment_of_a_kind():
    trace = Trace([("inputs", ()), ("param", 0), ("adam", 1), ("adam", 0)])
    assert [trace.first_of(kind) for kind in ("param", "adam", "grad")] == [1, 2, NEVER]
    trace.bring_forward(("adam", 0), 2)
    assert trace.accesses[2:] == (("adam", 0), ("adam", 1)) and trace.first_of("adam") == 2


def test_a_step_that_differs_is_traced_anew_and_never_run_on_the_wrong_schedule():
    schedule = Schedule()
    run_step(schedule, "abcba")
    assert schedule.trace.accesses == tuple("abcba")
    for other in ("abdba", "abc", "abcbab"):           # another block, a shorter step, a longer one
        run_step(schedule, other)
        assert schedule.trace is None, other
        run_step(schedule, "abcba")
        assert schedule.trace.accesses == tuple("abcba")
    assert schedule.num_traced == 4


def test_evaluation_inside_a_step_does_not_disturb_the_trace():
    schedule = Schedule()
    run_step(schedule, "abcba")
    schedule.begin_step()
    schedule.touch("a")
    with schedule.paused():
        schedule.touch("c")
        schedule.touch("x")
    for key in "bcba":
        schedule.touch(key)
    schedule.end_step()
    assert schedule.trace.accesses == tuple("abcba") and schedule.num_traced == 1


def test_illegal_uses():
    schedule = Schedule()
    schedule.begin_step()
    with pytest.raises(StateError, match="begin_step inside a step"):
        schedule.begin_step()
    with pytest.raises(ConfigError, match="next_use, lru"):
        Schedule("random")
    assert schedule.victim([]) is None


def test_the_next_access_is_known_inside_a_traced_step_only():
    schedule = Schedule()
    accesses = [("gathered", 0), ("grad_full", 0), ("gathered", 1), ("grad_full", 1)]
    for step in range(2):
        assert schedule.upcoming("gathered") is None
        schedule.begin_step()
        for moment, key in enumerate(accesses):
            schedule.touch(key)
            assert schedule.moment == (moment if step else -1)
            expected = None
            if step and moment < 2:
                expected = ("gathered", 1), tuple(accesses[moment + 1 : 2])
            assert schedule.upcoming("gathered") == expected
            with schedule.paused():
                assert schedule.upcoming("gathered") is None
        schedule.end_step()


def test_coming_stretches_continue_around_the_end_of_the_step():
    """In stretches: going back and forth between two keys is one of each, with the largest peak."""
    class Peaks:
        take_peak = staticmethod(iter(range(9, 20)).__next__)    # the first is asked for before the first moment
        agree = staticmethod(list)

    schedule = Schedule(peaks=Peaks())
    accesses = ["a", "c", "b", "c", "b", "a"]
    stretches = [("a", 10, 0), ("c", 11, 1), ("b", 14, 2), ("a", 15, 5)]
    for step in range(2):
        schedule.begin_step()
        assert schedule.coming(999) == (stretches if step else [])
        for moment, key in enumerate(accesses):
            schedule.touch(key)
            now = [0, 1, 2, 2, 2, 3][moment]
            later = [(key, peak, first + len(accesses)) for key, peak, first in stretches[:now]]
            assert schedule.coming(999) == (stretches[now:] + later if step else [])
            assert schedule.stretch == (now if step else -1)
            with schedule.paused():
                assert not schedule.coming(999)
        schedule.end_step()
    assert not schedule.coming(999)


def test_what_has_left_near_is_noted_for_the_steps_that_follow_the_trace():
    schedule, left = Schedule(), Leaving(100, 50)
    accesses = ["a", "b", "c", "b", "d"]    # stretches begin at moments 0, 1, 2 and 4
    for step in range(3):
        schedule.begin_step()
        for moment, key in enumerate(accesses):
            schedule.touch(key)
            if moment == 3:
                schedule.note_leaving(left)
            expected = {2: [(2, 100)], 1: [(2, 100)]} if step and moment == 4 else {}
            for num in range(3):
                assert schedule.left_before(num) == expected.get(num, []), "not the stretch in which it leaves"
        assert step == 0 or schedule.trace.leaving == {2: left}
        schedule.end_step()
    with schedule.paused():
        schedule.note_leaving(left)    # in an evaluation
    schedule.note_leaving(left)
    assert schedule.trace.leaving == {2: left} and not schedule.left_before(9)


def test_the_last_touched_key_is_forgotten_where_a_step_or_an_evaluation_begins_or_ends():
    """A caller that does not touch `last` a second time must lose no moment of the trace."""
    schedule = Schedule()

    def touch(key: str) -> None:
        if key != schedule.last:
            schedule.touch(key)

    for _ in range(2):
        touch("a")                     # outside a step
        schedule.begin_step()
        touch("a")
        with schedule.paused():
            touch("b")
        touch("b")
        with schedule.paused():
            touch("b")
        schedule.end_step()
    assert schedule.trace.accesses == ("a", "b") and schedule.num_traced == 1
    schedule.begin_step()
    assert [schedule.first_use(key) for key in "abc"] == [0, 1, NEVER]


def test_keys_that_come_in_any_order_change_the_trace_and_not_its_length():
    schedule = Schedule()
    run_step(schedule, "abcabxyzw")
    schedule.begin_step()
    for key in "abcabz":
        schedule.expect_next(key)    # for all but z it is as the trace says, or a key that comes more than once
        schedule.touch(key)
    assert schedule.trace.accesses == tuple("abcabzxyw") and schedule.num_traced == 1
    assert [schedule.trace.next_use(key, 4) for key in "zxyw"] == [5, 6, 7, 8]
    assert schedule.next_keys(9) == ["x", "y", "w"] and [key for key, _, _ in schedule.coming(999)][:4] == list("zxyw")
    for key in "ywx":
        schedule.expect_next(key)
        schedule.touch(key)
    schedule.end_step()
    assert schedule.trace.accesses == tuple("abcabzywx") and schedule.num_steps == 2 and schedule.num_traced == 1
    before = schedule.trace
    schedule.begin_step()
    schedule.expect_next("c")
    schedule.touch("c")    # b and a come twice: what is between is no order of ours to change
    assert schedule.trace is None and before.accesses == tuple("abcabzywx")
