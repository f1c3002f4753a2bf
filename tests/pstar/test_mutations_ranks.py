"""Negative controls: the engine with one thing broken on purpose, and the check that notices it.

Every mutation replaces one method inside the ranks. A check that stays green under its mutation would prove nothing.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

import pstar
from pstar.chunks import Chunks, Hooks
from pstar.chunks.borrowed import Idle, Lender
from pstar.chunks.gradients import Gradients
from pstar.chunks.unshard import Unsharding
from pstar.comm import shared_memory
from pstar.comm.collectives import Collectives, Handle
from pstar.schedule.schedule import NEVER, Trace, count_loads
from tests import toy
from tests.harness import RankFailure
from tests.pstar.chunks.test_borrowed_ranks import case as borrowing_case
from tests.pstar.chunks.test_borrowed_ranks import plain as borrowing_oracle
from tests.pstar.schedule.test_schedule import optimum, sweep
from tests.pstar.test_engine_ranks import assert_follows, case, pins

NAME = "blocks.1.up.weight"
original = {(cls, name): getattr(cls, name) for cls, name in (
    (Chunks, "release"), (Gradients, "_complete"))}


def release_all_but_one(self, names):
    original[Chunks, "release"](self, tuple(name for name in names if name != NAME))


def release_and_stay_in_use(self, names):
    original[Chunks, "release"](self, names)
    for name in names:
        self.params[name].__class__ = torch.nn.Parameter


def keep_own(self, piece, flat):
    piece.copy_(flat.view(self.num_ranks, -1)[self.rank])
    return Handle()


def add_without_dividing(self, piece, flat):
    """Reduces to the sum in place of the mean."""
    parts = flat.view(self.num_ranks, -1).clone()
    total = self.sum(parts.view(-1)).view_as(parts)
    piece.copy_(total[self.rank])
    return Handle()


def keep_own_pieces(self, flat):
    pieces = flat.view(self.num_ranks, -1)
    for index in range(self.num_ranks):
        if index != self.rank:
            pieces[index].zero_()
    return Handle()


def own_sum(self, values):
    return values


def stale_copies(self, group):
    """Gathered parameters stay although somebody's piece was updated."""


def wait_for_nothing(self):
    """The tensors of a collective are used before it is done."""


def leave_missing_gradients(self, unit):
    """A gradient that this rank does not have is not 0 but what the buffer held before."""
    unit.arrived |= {slot.name for slot in unit.spec.slots}
    original[Gradients, "_complete"](self, unit)


CURVE = {    # what is broken -> (class, method, what it is replaced by, keys)
    "a release is skipped": (Chunks, "release", release_all_but_one, {"near_budget": "100%"}),
    "a release is skipped and room is short": (Chunks, "release", release_all_but_one, {"near_budget": "min"}),
    "the reduction is dropped": (Collectives, "reduce_scatter_mean", keep_own, {}),
    "the mean is not divided": (Collectives, "reduce_scatter_mean", add_without_dividing, {}),
    "the gather is dropped": (Collectives, "all_gather", keep_own_pieces, {}),
    "the norm is not summed over the ranks": (Collectives, "sum", own_sum, {}),
    "gathered copies stay after the update": (Unsharding, "drop_gathered", stale_copies, {"near_budget": "100%"}),
    "nobody waits for a collective": (Handle, "wait", wait_for_nothing, {}),
}


def mutated_case(rank: int, num_ranks: int, what: str | None):
    if what is None:
        return case(rank, num_ranks, {"near_budget": "50%", "default_chunk_size": 5_000})
    cls, name, function, keys = CURVE[what]
    before = getattr(cls, name)
    setattr(cls, name, function)
    try:
        return case(rank, num_ranks, {"near_budget": "50%", "default_chunk_size": 5_000} | keys)
    finally:
        setattr(cls, name, before)


def test_without_a_mutation_the_check_is_green(ranks):
    assert_follows(ranks(2).run(mutated_case, None))


@pytest.mark.parametrize("what", CURVE)
def test_each_mutation_breaks_the_curve(ranks, what):
    with pytest.raises(AssertionError):    # a rank that raises is one as well
        assert_follows(ranks(2).run(mutated_case, what, timeout=20))


# ---- one rank makes one call less, or another one


def dropped_case(rank: int, num_ranks: int, name: str):
    """Rank 1 leaves out one collective in the second step."""
    calls, before = [], getattr(Collectives, name)

    def dropping(self, *args):
        calls.append(None)
        return Handle() if rank == 1 and len(calls) == 9 else before(self, *args)

    setattr(Collectives, name, dropping)
    try:
        return case(rank, num_ranks, {"near_budget": "50%", "default_chunk_size": 5_000})
    finally:
        setattr(Collectives, name, before)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter_mean"])
def test_a_rank_that_leaves_out_one_collective_is_named(ranks, name):
    with pytest.raises(RankFailure, match=r"rank \d is in a (gather|reduction) of unit \d+ .*where rank 0 is in"):
        ranks(2).run(dropped_case, name, timeout=20)


# ---- dividing after instead of before


def divide_after(self, piece, flat):
    pieces = [torch.empty_like(flat) for _ in range(self.num_ranks)]
    torch.distributed.all_gather(pieces, flat)
    total = sum(each.view(self.num_ranks, -1)[self.rank] for each in pieces)    # 16 bit: where it overflows
    piece.copy_(total / self.num_ranks)
    return Handle()


def overflow_case(rank: int, num_ranks: int, mutated: bool):
    before = Collectives.reduce_scatter_mean
    if mutated:
        Collectives.reduce_scatter_mean = divide_after
    try:
        flat, piece = torch.full((8,), 60_000.0, dtype=torch.float16), torch.empty(8 // num_ranks, dtype=torch.float16)
        Collectives(None, pstar.memory.tier.Ledger()).reduce_scatter_mean(piece, flat).wait()
        return bool(piece.isfinite().all())
    finally:
        Collectives.reduce_scatter_mean = before


@pytest.mark.parametrize("mutated", [False, True])
def test_dividing_after_the_sum_overflows(ranks, mutated):
    assert ranks(2).run(overflow_case, mutated) == [not mutated] * 2


# ---- the order of ranks


def any_order(rank: int, terms, target):
    """Every rank begins with its own term."""
    own = terms[rank:] + terms[:rank]
    total = own[0].clone()
    for term in own[1:]:
        total += term
    target.copy_(total)


def order_case(rank: int, num_ranks: int, mutated: bool):
    before = shared_memory.add_up
    if mutated:
        shared_memory.add_up = partial(any_order, rank)
    try:
        keys = {"near_budget": "100%", "default_chunk_size": 11_000}
        runs = [case(rank, num_ranks, keys | mode) for mode in ({}, {"communication": "chunk"}, {"ownership": "sharded"})]
        return [torch.cat([value.flatten() for value in run["weights"].values()]) for run in runs if run["weights"]]
    finally:
        shared_memory.add_up = before


@pytest.mark.parametrize("mutated", [False, True])
def test_sums_in_another_order_change_bits(ranks, mutated):
    group, chunk, sharded = ranks(4).run(order_case, mutated)[0]
    assert (torch.equal(group, chunk) and torch.equal(group, sharded)) is not mutated


# ---- the cycle of the trace


def without_wrap(self, key, moment):
    """A key that is not touched again in this step counts as never needed again."""
    return next((position for position in self.positions.get(key, ()) if position > moment), NEVER)


def wrap_too_early(self, key, moment):
    """Takes the next step's moments for this step's."""
    positions = self.positions.get(key, [NEVER])
    return next((position for position in positions if position > moment), positions[0])


@pytest.mark.parametrize("function", [without_wrap, wrap_too_early])
def test_a_wrong_wrap_of_the_trace_costs_loads(monkeypatch, function):
    traces = [sweep(8), [*range(6), *reversed(range(6)), 0, 1, 2], [0, 1, 2, 3, 0, 4, 1, 5, 2]]
    rooms = [2, 3, 4]

    def excess() -> int:
        return sum(count_loads(trace, room) - optimum(trace, room) for trace in traces for room in rooms)

    before = excess()
    monkeypatch.setattr(Trace, "next_use", function)
    assert excess() > before


# ---- places that no gradient reaches


class Unused(toy.Toy):
    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(7, 3)


def unused_case(rank: int, num_ranks: int, mutated: bool):
    """Whether the place of a parameter without a gradient is 0 after the reduction."""
    if mutated:
        Gradients._complete = leave_missing_gradients
    try:
        model, optimizer = toy.build(Unused, near_budget="100%", default_chunk_size=60_000)
        slot = model.layout.slots["unused.weight"]
        group = model.layout.groups[slot.group]
        model.near.use_heap(())    # else malloc might not give these buffers again
        used_before = [model.near.allocate(group.elems, torch.float32, "grad").fill_(7.0) for _ in range(3)]
        for buffer in used_before:
            model.near.release(buffer)
        model.backward(model(*toy.share(0, rank, num_ranks)))
        _, piece = model._store.peek(("grad", slot.group))
        own = [span for span in group.spans(rank) if span.name == "unused.weight"]
        return [float(piece[span.piece_offset : span.piece_offset + span.numel].abs().max()) for span in own], pins(model)
    finally:
        Gradients._complete = original[Gradients, "_complete"]


@pytest.mark.parametrize("mutated", [False, True])
def test_a_missing_gradient_is_zero(ranks, mutated):
    found = [value for values, _ in ranks(2).run(unused_case, mutated) for value in values]
    assert found and (max(found) == 0) is not mutated


# ---- borrowed parameters


def operation_on_whatever_is_there(cls, func, types, args=(), kwargs=None):
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def always_open(self):
    return True


def pack_nothing(self):
    """No pair of saved-tensor hooks for operations in the training loop."""


BORROWED = {    # what is broken -> (class, attribute, what it is replaced by, pattern)
    "the interception is removed": (Idle, "__torch_function__", classmethod(operation_on_whatever_is_there),
                                    "another block's weight"),
    "nothing is unpacked for a penalty in the loop": (Hooks, "_saving", pack_nothing,
                                                      "a penalty over model.parameters() in the loop"),
    "a released parameter keeps the class of one in use": (Chunks, "release", release_and_stay_in_use,
                                                           "a penalty over self.parameters() in forward"),
}


def borrowed_case(rank: int, num_ranks: int, what: str, mutated: bool):
    cls, name, function, pattern = BORROWED[what]
    before = cls.__dict__[name]
    if mutated:
        setattr(cls, name, function)
    try:
        return borrowing_case(rank, num_ranks, pattern, {"near_budget": "min"})[0]
    finally:
        setattr(cls, name, before)


@pytest.mark.parametrize("mutated", [False, True])
@pytest.mark.parametrize("what", BORROWED)
def test_mutations_of_borrowing_are_noticed(ranks, what, mutated):
    expected = pytest.approx(borrowing_oracle(BORROWED[what][3]), rel=1e-5)
    try:
        found = ranks(2).run(borrowed_case, what, mutated)[0]
    except RankFailure:
        assert mutated
        return
    assert (found == expected) is not mutated


def refused_case(rank: int, num_ranks: int, mutated: bool) -> bool:
    """Whether an operation between two steps is refused."""
    before = Lender.is_open
    if mutated:
        Lender.is_open = always_open
    try:
        model, _ = toy.build(near_budget="min", default_chunk_size=5_000)
        model.module.blocks[1].up.weight.norm()
        return False
    except pstar.StateError:
        return True
    finally:
        Lender.is_open = before


@pytest.mark.parametrize("mutated", [False, True])
def test_without_the_check_a_read_between_two_steps_is_a_collective(ranks, mutated):
    assert ranks(2).run(refused_case, mutated) == [not mutated] * 2
