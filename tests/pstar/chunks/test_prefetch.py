"""Which blocks are loaded early, which leave early, and in which order. Other tests check that no placement changes a
number."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch

from pstar.chunks import Hooks
from pstar.memory.tier import NEAR, Tier
from tests import toy
from tests.limits import HANGS_S
from tests.pstar.python_calls import calls_of_a_step

KEYS = {"near_budget": "25%", "default_chunk_size": 5_000}    # parameters just fit: all states are far


def build(**keys):
    """A model whose steps are known."""
    model, optimizer = toy.build(lambda: toy.Toy(10), **KEYS | keys)
    toy.train(model, optimizer, 2)
    assert model._chunks.tiers.states_tier.count(NEAR) == 0
    return model, optimizer


def updates(model) -> list[int]:
    return [index for kind, index in model.schedule.trace.accesses if kind == "adam"]


def test_parameters_that_will_be_updated_far_leave_when_their_gradients_do():
    model, optimizer = build()
    optimizer.zero_grad()
    loss = model(*toy.batch(2))
    assert any(model._store.is_near(("param", group.index)) for group in model.layout.groups)
    copied = model.ledger.moved_bytes["near to far"]
    model.backward(loss)
    assert not any(model._store.is_near(("param", group.index)) for group in model.layout.groups)
    grads = sum(group.piece_elems * 4 for group in model.layout.groups)
    assert model.ledger.moved_bytes["near to far"] - copied == grads, "they were equal far: nothing is copied for it"


def test_a_buffer_that_nobody_reads_is_taken_before_one_that_is_being_copied():
    class Copy:
        waited = False

        def order(self):
            self.waited = True

    tier, first, second = Tier(NEAR, torch.device("cpu"), 1000), Copy(), Copy()
    buffers = [tier.allocate(25, torch.float32, "param") for _ in range(3)]
    addresses = [buffer.data_ptr() for buffer in buffers]
    for buffer, fences in zip(buffers, ((first,), (), (second,)), strict=True):
        tier.release(buffer, fences)
    taken = [tier.allocate(25, torch.float32, "grad").data_ptr() for _ in range(2)]
    assert taken == [addresses[1], addresses[0]] and first.waited and not second.waited


def hold_back(model, num: int) -> list[tuple[str, int]]:
    """Holds the last `num` gradients of the next step on their way to far, each until the update waits for it. Returns
    the list that records the events of the step: ("param", group) begins to come near, ("adam", group) is updated."""
    events, passes = [], threading.Semaphore(len(model.layout.groups) - num)
    submit, begin, touch = model._store.links.submit, model._store._begin, model._chunks.touch_update

    def submits(source, target, job, num_bytes, *more):
        def when_it_may():
            assert passes.acquire(timeout=HANGS_S)
            job()

        return submit(source, target, when_it_may if source == NEAR else job, num_bytes, *more)

    def begins(block, tier, *more):
        if tier == NEAR:
            events.append(block.key)
        begin(block, tier, *more)

    def touches(group):
        events.append(("adam", group))
        if not model._store.is_settled(("grad", group)):
            passes.release()
        touch(group)

    model._store.links.submit, model._store._begin, model._chunks.touch_update = submits, begins, touches
    return events


def arrived(model, num: int) -> None:
    """Waits until all gradients but the last `num` are far."""
    for group in model._chunks.gradients.completed[:-num]:
        model._store.finish(("grad", group))


def needed(model) -> list[int]:
    """The groups in the order of forward."""
    return list(dict.fromkeys(index for kind, index in model.schedule.trace.accesses if kind == "param"))


def test_gradients_that_have_arrived_are_updated_first():
    """In the order of forward, which is not that of their numbers; then the others as they arrive. The trace follows."""
    model, optimizer = build()
    order = needed(model)
    assert order != sorted(order)
    events = hold_back(model, 2)
    optimizer.zero_grad()
    model.backward(model(*toy.batch(2)))
    assert model._chunks.gradients.completed[-2:] == [order[1], order[0]], "backward ends where forward begins"
    arrived(model, 2)
    optimizer.step()
    assert [index for kind, index in events if kind == "adam"] == updates(model) == [*order[2:], order[1], order[0]]
    assert model.schedule.num_traced == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_slow_link_changes_the_order_of_updates_and_no_number(overlap):
    """An update in the background does not wait for a gradient that is on its way: its order is that of forward. Bytes
    that therefore come near before the end of a step count in the step for which they come."""
    model, optimizer = toy.build(lambda: toy.Toy(10), **KEYS, simulated_link=5e6, overlap_update=overlap)
    losses, moved = [], []
    for step in range(6):
        losses += toy.train(model, optimizer, 1, first=step)
        moved.append(model.ledger.step_bytes)
    assert moved[1:] == moved[1:2] * 5
    assert (updates(model) == needed(model)) == overlap
    assert sorted(updates(model)) == sorted(needed(model)) and model.schedule.num_traced == 1
    assert losses == toy.train(*toy.build(lambda: toy.Toy(10)), 6)


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_while_gradients_leave_parameters_come_in_the_order_of_forward(prefetch):
    """`prefetch` of those after the first that is not updated yet; that one when it is; the others after the last update."""
    model, optimizer = build(prefetch=prefetch)
    order = needed(model)
    events = hold_back(model, 2)
    optimizer.zero_grad()
    model.backward(model(*toy.batch(2)))
    arrived(model, 2)
    events.clear()
    optimizer.step()
    last = events.index(("adam", order[0]))
    assert [index for kind, index in events[:last] if kind == "param"] == order[2 : 2 + prefetch]
    assert events[last + 1 :] == [("param", index) for index in (order[1], order[0], *order[2 + prefetch :])]
    for number, (kind, index) in enumerate(events):
        assert kind == "adam" or ("adam", index) in events[:number], "and nothing before its update"
    events.clear()
    model(*toy.batch(3))
    assert not events, "all came before the next forward"


@pytest.mark.parametrize("prefetch", [1, 2, 4])
@pytest.mark.parametrize("where", ["disk to far", "far to near"])
def test_states_are_copied_to_their_update_once(tmp_path, where, prefetch):
    """The updated group looks unused until the next step. So looking ahead once evicted its states, which were clean,
    for those of the next group, a moment before their update, and they were read twice."""
    if where == "disk to far":
        keys = {"near_budget": "20%", "far_budget": "30%", "disk_path": str(tmp_path)}
    else:
        keys = {"near_budget": "25%", "far_states": "stream"}
    model, optimizer = toy.build(lambda: toy.Toy(10), default_chunk_size=5_000, prefetch=prefetch, **keys)
    toy.train(model, optimizer, 2)
    begin, loads = model._store._begin, Counter()

    def begins(block, tier, *more, **keys):
        loads[block.key] += tier == where.split()[2]
        begin(block, tier, *more, **keys)

    model._store._begin = begins
    toy.train(model, optimizer, 1, first=2)
    states = {key: loads[key] for key in loads if key[0].startswith("exp_avg")}
    assert len(states) > len(model.layout.groups) and set(states.values()) <= {0, 1}


def test_one_pair_of_saved_tensor_hooks_serves_a_whole_forward(monkeypatch):
    """Where everything fits, chunks cost only the Python time of each module."""
    pairs, saving = [], Hooks._saving

    def counted(hooks):
        pair = saving(hooks)
        pairs.append(pair is not None)
        return pair

    monkeypatch.setattr(Hooks, "_saving", counted)
    model, _ = build()
    pairs.clear()
    model(*toy.batch(2))
    assert sum(pairs) == 1 < len(pairs)


def calls_of_layers(layers: int, **keys) -> int:
    return calls_of_a_step(lambda: toy.Toy(layers), default_chunk_size=2_400, **keys)


def test_the_calls_of_a_step_grow_with_the_layers_and_less_with_measured_activations():
    """Rule 2 looks at up to 256 stretches of the trace at a moment. It once called five functions for each: with 40 layers
    and `near_memory` 250,000 calls a step in place of 81,000."""
    few, many = (calls_of_layers(layers, near_budget="25%") for layers in (10, 40))
    assert many < 4.4 * few, "four times the layers"
    assert calls_of_layers(40, near_memory="10900KiB") < 1.8 * many, "more blocks leave near, and come again"


def test_backward_searches_nothing_while_all_that_is_away_waits_for_its_update():
    """At 26 % all parameters are near in forward, and leave in backward with their gradients. A search of the trace can then
    find something only in the update: after each group that was updated, and at the step's end."""
    model, optimizer = toy.build(lambda: toy.Toy(40), near_budget="26%", default_chunk_size=5_000)
    toy.train(model, optimizer, 3)
    schedule, kinds = model.schedule, []
    search = schedule.coming

    def watched(most, in_next_step=False):
        kinds.append("next step" if in_next_step else schedule.trace.accesses[schedule.moment][0])
        return search(most, in_next_step)

    schedule.coming = watched
    toy.train(model, optimizer, 1, first=3)
    assert Counter(kinds) == {"adam": len(model.layout.groups) - 1, "next step": 1}


def first_bytes(model, num: int) -> int:
    """Bytes of the first `num` units of a forward that are near, or on their way there."""
    store, keys = model._store, [("param", index) for index in needed(model)[:num]]
    return sum(store.blocks[key].bytes_in(NEAR) for key in keys if store.is_near(key))


@pytest.mark.parametrize("keys, num", [({}, 26), ({"far_states": "stream"}, 4)], ids=str)
def test_what_the_next_forward_needs_first_comes_before_its_first_hook(keys, num):
    """Over a slow link the last group to be updated is the first that forward needs: it comes while the program reads data.
    The bytes count in the step for which they come (streamed steps differ in bytes anyway), and no number changes."""
    model, optimizer = build(simulated_link=2e7, **keys)
    num, losses = min(num, len(needed(model))), []
    whole = sum(model._store.blocks["param", index].bytes_in(NEAR) for index in needed(model)[:num])
    for step in range(2, 5):
        moved = model.ledger.step_bytes["far to near"]
        losses += toy.train(model, optimizer, 1, first=step)
        assert first_bytes(model, num) == whole
    assert keys or model.ledger.step_bytes["far to near"] == moved
    assert model.near.peak_bytes <= model.near.budget_bytes
    plain, plain_optimizer = toy.build(lambda: toy.Toy(10))
    assert losses == toy.train(plain, plain_optimizer, 5)[2:]


def test_nothing_is_begun_for_a_next_step_that_is_not_known(monkeypatch):
    model, optimizer = build()
    begun = []
    load_ahead = model._store.load_ahead
    monkeypatch.setattr(model._store, "load_ahead", lambda *given: begun.append(given) or load_ahead(*given))
    with model.schedule.paused():
        model._chunks.prefetch.next_step()
    model._chunks.prefetch.next_step()    # between two steps
    assert begun == []
