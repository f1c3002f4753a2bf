"""Placement never changes a number: budgets, chunk sizes, policies, looking ahead, where Adam runs, disk or none."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pstar
from pstar.memory.tier import DISK, FAR, NEAR
from tests import toy

STEPS = 4
NEAR_BUDGETS = ("min", "30%", "60%", "100%")
CHUNKS = ("auto", 5_000, 11_000)
POLICIES = ("next_use", "lru", "fifo")
PREFETCH = (0, 1, 3)
STATES = ("host", "stream")
DISKS = (None, "60%", "30%")    # what far may hold beside a disk
OVERLAP = (False, True)


def combinations(num: int) -> list[tuple]:
    """`num` of all combinations, the same ones at every run."""
    everything = list(itertools.product(NEAR_BUDGETS, CHUNKS, POLICIES, PREFETCH, STATES, OVERLAP, DISKS))
    return random.Random(0).sample(everything, num)


@pytest.fixture(scope="module")
def plain():
    return toy.oracle(STEPS)


def build(folder, near, chunk, policy, prefetch, states, overlap, far, **keys):
    keys |= {"near_budget": near, "default_chunk_size": chunk, "eviction_policy": policy, "prefetch": prefetch,
             "far_states": states, "overlap_update": overlap}
    if states == "stream" and near == "30%" and chunk == "auto":
        keys["near_budget"] = "60%"
    if far is not None:
        keys |= {"disk_path": str(folder), "far_budget": far}
    return toy.build(**keys)


@pytest.mark.pairs
@pytest.mark.parametrize("near, chunk, policy, prefetch, states, overlap, far", combinations(72))
def test_placement_never_changes_a_number(near, chunk, policy, prefetch, states, overlap, far, plain, tmp_path):
    try:
        model, optimizer = build(tmp_path, near, chunk, policy, prefetch, states, overlap, far)
    except pstar.BudgetError as error:
        assert "too small" in str(error)
        pytest.skip(f"refused: {error}")
    losses, weights, norms = plain
    assert toy.train(model, optimizer, STEPS) == losses
    assert optimizer.grad_norm == norms[-1]
    found, _ = model.gather_state()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    for tier in (model.near, model.far, model.disk):
        assert tier is None or tier.budget_bytes is None or tier.peak_bytes <= tier.budget_bytes
    if far == "30%" and near != "100%":
        assert model.disk.peak_bytes > 0 and model.ledger.moved_bytes["far to disk"] > 0


def test_most_combinations_are_possible(tmp_path):
    """Else the test above could pass by refusing."""
    refused = 0
    for case in combinations(72):
        try:
            build(tmp_path, *case)
        except pstar.BudgetError:
            refused += 1
    assert refused <= 10


class Chain(nn.Module):
    """n layers of one chunk each."""

    def __init__(self, n: int = 8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(n))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = F.one_hot(inputs % 64, 64).float()
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.each
@pytest.mark.parametrize("prefetch", [0, 1, 2, 4])
@pytest.mark.parametrize("n, room", [(8, 3), (8, 5), (8, 7), (12, 4), (8, 9)])
def test_loads_of_a_step_equal_the_maths(n, room, prefetch):
    """With updates far forward loads all n chunks, because Adam wrote them there. Backward uses n - 1 of them (the inputs
    of the first layer need no gradient), of which the last `room` are still near. Gradients take the places of those that
    are done. Looking ahead loads nothing more."""
    model, optimizer = toy.build(lambda: Chain(n), near_budget=room * 4 * 64 * 64, default_chunk_size=64 * 64,
                                 prefetch=prefetch, optimizer={"type": "AdamW", "params": {"use_hybrid_adam": False}})
    toy.train(model, optimizer, 3)
    assert model.ledger.step_bytes["far to near"] == 4 * 64 * 64 * (n + max(0, n - 1 - room))


NEAR_KEYS = [{"near_budget": near} for near in ("20%", "25%", "30%", "45%", "80%")] + [
    {"near_memory": "2500KiB"}, {"near_memory": "3500KiB"}]
QUICK = (({"near_budget": "25%"}, 2), ({"near_budget": "45%"}, 8), ({"near_memory": "2500KiB"}, 2))


@pytest.mark.parametrize("keys, prefetch", [
    pytest.param(*case, marks=[pytest.mark.deep] * (case not in QUICK)) for case in itertools.product(NEAR_KEYS, [2, 8])],
    ids=str)
def test_looking_ahead_moves_nothing_more(keys, prefetch):
    """Ten small layers, with one micro-step and with two: each direction of the link carries the same bytes as without
    prefetch."""
    tables = []
    for ahead in (0, prefetch):
        for num_micros in (1, 2):
            model, optimizer = toy.build(lambda: toy.Toy(10), default_chunk_size=5_000, prefetch=ahead,
                                         gradient_accumulation_steps=num_micros, **keys)
            toy.train(model, optimizer, 4, num_micros=num_micros)
            tables.append(model.ledger.step_bytes)
    assert tables[:2] == tables[2:]


@pytest.mark.parametrize("near", ["min", "25%", "45%", "60%"])
def test_groups_updated_far_come_near_during_the_update_and_move_no_more_bytes(near):
    """Updated groups come near during the update and after the last one, into free room, in the order of need. A step moves
    the same bytes as without prefetch."""
    tables, early = [], {}
    for prefetch in (0, 1):
        model, optimizer = toy.build(near_budget=near, default_chunk_size=5_000, prefetch=prefetch)
        for number in range(4):
            optimizer.zero_grad()
            model.backward(model(*toy.batch(number)))
            before = model.ledger.moved_bytes["far to near"]
            optimizer.step()
            early[prefetch] = model.ledger.moved_bytes["far to near"] - before
        tables.append(model.ledger.step_bytes)
    assert tables[0] == tables[1]
    assert early[0] == 0 < early[1] <= tables[1]["far to near"]


def test_a_clean_chunk_is_never_copied_out():
    """With updates far, no parameter is ever written near: only gradients leave."""
    model, optimizer = toy.build(near_budget="min", default_chunk_size=5_000)
    toy.train(model, optimizer, 3)
    grads = sum(group.piece_elems * 4 for group in model.layout.groups)
    assert model.ledger.step_bytes["near to far"] == grads


@pytest.mark.each
@pytest.mark.parametrize("near", ["30%", "45%", "60%", "95%", "100%"])
@pytest.mark.parametrize("keys", [{}, {"prefetch": 4}, {"far_states": "stream"}, {"near_memory": "1500KiB"}], ids=str)
def test_near_filled_with_states_changes_no_number(near, keys, plain):
    model, optimizer = toy.build(near_budget=near, default_chunk_size=5_000, near_states="fill", **keys)
    losses, weights, norms = plain
    assert toy.train(model, optimizer, STEPS) == losses
    assert optimizer.grad_norm == norms[-1]
    found, _ = model.gather_state()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    assert model.near.peak_bytes <= model.near.budget_bytes


def test_near_filled_with_states_lets_parameters_travel_in_backward():
    """At 25 % the parameters just fit: by the margin no state is near, backward loads nothing, and forward loads all."""
    loaded, homes, left = {}, {}, {}
    for near_states in ("margin", "fill"):
        model, optimizer = toy.build(lambda: toy.Toy(10), near_budget="25%", default_chunk_size=5_000,
                                     near_states=near_states)
        for number in range(3):
            optimizer.zero_grad()
            loss = model(*toy.batch(number))
            before = model.ledger.moved_bytes["far to near"]
            model.backward(loss)
            loaded[near_states] = model.ledger.moved_bytes["far to near"] - before
            optimizer.step()
        homes[near_states] = model._chunks.tiers.states_tier.count(NEAR)
        left[near_states] = model.ledger.step_bytes["near to far"]
    assert homes["margin"] == 0 < homes["fill"]
    assert loaded["margin"] == 0 < loaded["fill"]
    assert left["fill"] < left["margin"]


def test_states_that_are_streamed_come_and_go_every_step():
    model, optimizer = toy.build(near_budget="60%", default_chunk_size=11_000, far_states="stream")
    toy.train(model, optimizer, 3)
    table = model.ledger.step_bytes
    assert table["far to near"] > 0 and table["near to far"] > 0
    assert all(model._chunks.tiers.update_tier(group.index) == NEAR for group in model.layout.groups)


def test_model_data_larger_than_near_and_far_go_to_disk(tmp_path):
    """The whole model data are more than both: the rest is on disk, and every step reads and writes it."""
    model, optimizer = toy.build(near_budget="min", far_budget="30%", disk_path=str(tmp_path), default_chunk_size=5_000)
    assert toy.train(model, optimizer, STEPS) == toy.oracle(STEPS)[0]
    whole = model.model_data_bytes
    assert model.near.budget_bytes + model.far.budget_bytes < whole
    assert model.disk.used_bytes + model.far.used_bytes + model.near.used_bytes >= whole
    assert model.ledger.step_bytes["disk to far"] > 0 < model.ledger.step_bytes["far to disk"]
    kinds = {key[0] for key, block in model._store.blocks.items() if DISK in block.copies and FAR not in block.copies}
    assert "exp_avg" in kinds


def test_a_far_budget_too_small_names_the_disk_path(tmp_path):
    with pytest.raises(pstar.BudgetError, match="far budget 30% .* or a disk_path"):
        toy.build(near_budget="min", far_budget="30%")
    with pytest.raises(pstar.BudgetError, match="far budget 1%"):
        toy.build(near_budget="min", far_budget="1%", disk_path=str(tmp_path))


def test_a_full_disk_is_one_line_and_keeps_the_last_checkpoint(tmp_path):
    model, optimizer = toy.build(near_budget="min", far_budget="30%", disk_path=str(tmp_path / "disk"),
                                 default_chunk_size=5_000)
    toy.train(model, optimizer, 2)
    model.save_checkpoint(tmp_path / "checkpoint")
    state, _ = model.gather_state()
    model.disk.budget_bytes = model.disk.used_bytes // 2
    with pytest.raises(pstar.PstarError, match="disk"):
        toy.train(model, optimizer, 2, first=2)
    other, optimizer = toy.build(near_budget="100%")
    other.load_checkpoint(tmp_path / "checkpoint")
    found, _ = other.gather_state()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_the_room_for_chunks_follows_the_activations_in_near():
    """The first step measures what is no chunk; from then on chunks fill what near_memory leaves, and never more."""
    whole, expected = toy.build()[0].model_data_bytes, toy.oracle(STEPS)
    model, optimizer = toy.build(near_budget="100%", near_memory="1300KiB", default_chunk_size=5_000)
    peaks = []
    limit = model._store.limit

    def watched(num_bytes):
        limit(num_bytes)
        peaks.append((num_bytes, model.near.used_bytes))

    model._store.limit = watched
    assert toy.train(model, optimizer, STEPS) == expected[0]
    trace = model.schedule.trace
    assert max(trace.peaks) > 500_000 and min(trace.peaks) < 100_000, "activations come and go"
    assert len({room for room, _ in peaks}) > 5, "and the room for chunks with them"
    assert all(used <= room for room, used in peaks)
    assert 0 < model.near.peak_bytes < whole
    assert model.schedule.num_traced == 1


def test_states_move_near_when_the_measured_margin_allows_it():
    model, optimizer = toy.build(near_memory="2200KiB", default_chunk_size=5_000)
    tiers = model._chunks.tiers
    assert FAR in tiers.states_tier and NEAR not in tiers.states_tier, "before the margin is known"
    losses = toy.train(model, optimizer, STEPS)
    assert NEAR in tiers.states_tier and model.schedule.num_traced == 2, "the update's order changed once"
    assert losses == toy.oracle(STEPS)[0]
    assert model.near.used_bytes + max(model.schedule.known_peaks()) <= 2200 * 1024


@pytest.mark.parametrize("keys", [{}, {"prefetch": 0}, {"simulated_link": 3e7}, {"find_unused_parameters": True}], ids=str)
def test_states_in_the_margin_spare_the_link_what_their_groups_would_move(keys):
    """No parameter is copied more often for them, also where gradients wait for a slow link."""
    moved = {}
    for near in (True, False):
        model, optimizer = toy.build(near_budget="50%", default_chunk_size=5_000, **keys,
                                     optimizer={"type": "AdamW", "params": {"lr": toy.LR, "weight_decay": toy.WEIGHT_DECAY,
                                                                            "use_hybrid_adam": near}})
        assert toy.train(model, optimizer, STEPS) == toy.oracle(STEPS)[0]
        moved[near] = model.ledger.step_bytes
        if near:
            here = [group for group, tier in zip(model.layout.groups, model._chunks.tiers.states_tier, strict=True)
                    if tier == NEAR]
            assert here or "find_unused_parameters" in keys
    spared = 4 * sum(group.piece_elems for group in here)
    for way in ("far to near", "near to far"):
        assert moved[True][way] == moved[False][way] - spared


def test_a_near_memory_too_small_names_an_amount_that_suffices():
    """Too small for the chunks alone, it is refused before training; activations are known after the first step."""
    with pytest.raises(pstar.BudgetError, match="near_memory 30KiB is too small: chunks alone need .* bytes: give as much"):
        toy.build(near_memory="30KiB", default_chunk_size=5_000)
    model, optimizer = toy.build(near_memory="300KiB", default_chunk_size=5_000)
    with pytest.raises(pstar.BudgetError, match="near_memory 300 KiB is too small: .* give at least") as error:
        toy.train(model, optimizer, 1)
    enough = str(error.value).split("at least ")[1].split(" bytes")[0]
    model, optimizer = toy.build(near_memory=int(enough), default_chunk_size=5_000)
    assert toy.train(model, optimizer, STEPS) == toy.oracle(STEPS)[0]


def test_each_length_of_the_inputs_is_traced_once():
    """Another length leaves other room: it is another step."""
    model, optimizer = toy.build(near_budget="min", default_chunk_size=5_000)
    for number, length in enumerate([9, 9, 5, 9, 5, 9]):
        optimizer.zero_grad()
        model.backward(model(*toy.batch(number, length)))
        optimizer.step()
    assert model.schedule.num_traced == 2


def test_a_simulated_link_changes_no_number():
    model, optimizer = toy.build(near_budget="min", default_chunk_size=5_000, simulated_link=50e6)
    assert toy.train(model, optimizer, STEPS) == toy.oracle(STEPS)[0]
    assert model.step_scalars()["copy_wait_s"] > 0


def test_a_profile_is_written_and_drawn(tmp_path):
    from pstar.cli import main

    path = tmp_path / "profile.json"
    model, optimizer = toy.build(near_budget="min", default_chunk_size=5_000, profile=str(path), far_budget="30%",
                                 disk_path=str(tmp_path))
    assert toy.train(model, optimizer, STEPS) == toy.oracle(STEPS)[0]
    assert main(["trace", str(path), "--out", str(tmp_path / "drawn")]) == 0
    assert {file.suffix for file in (tmp_path / "drawn").iterdir()} == {".json", ".png"}
    recording = pstar.profile.recording.load_profile(path)
    assert len(recording.steps) == STEPS and {stage.name for stage in recording.stages} == {
        "forward", "backward", "adam", "idle"}
    assert {span.lane for span in recording.spans} >= {"far to near", "near to far", "far to disk", "disk to far"}
    assert max(used.num_bytes for used in recording.used if used.tier == "near") == model.near.peak_bytes
    moved = sum(span.args["bytes"] for span in recording.spans
                if span.lane == "disk to far" and span.begin >= recording.steps[0].at)
    whole, ahead = model.ledger.moved_bytes["disk to far"], model.ledger._came_early["disk to far"]
    assert whole - ahead <= moved <= whole, "copies for the next step may be under way when the profile is written"


def test_a_profile_shows_chunks_and_the_rest_below_near_memory_at_all_times(tmp_path):
    """From the first step that knows the peaks, chunks have left before activations are reported."""
    path, most = tmp_path / "profile.json", 1100 * 1024
    model, optimizer = toy.build(near_budget="100%", near_memory=most, default_chunk_size=5_000, profile=str(path))
    toy.train(model, optimizer, STEPS)
    recording = pstar.profile.recording.load_profile(path)
    assert recording.about["budget_includes_non_model"] and recording.budget("near") == most
    known = recording.steps[1].at
    levels = [(used.at, 0, used.num_bytes) for used in recording.used if used.tier == NEAR]
    levels += [(level.at, 1, level.num_bytes) for level in recording.non_model]
    now, sums = [0, 0], []
    for at, which, num_bytes in sorted(levels):
        now[which] = num_bytes
        sums += [sum(now)] if at >= known else []
    assert 0.9 * most < max(sums) <= most


def watch_copies(model: pstar.Engine) -> list[tuple[str, torch.dtype, str]]:
    """(kind, dtype, tier it goes to) of every block that is copied from now on."""
    came, begin = [], model._store._begin

    def watched(block, tier, *more):
        came.append((block.key[0], block.dtype, tier))
        begin(block, tier, *more)

    model._store._begin = watched
    return came


@pytest.mark.each
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("near", ["min", "22%", "25%"])
@pytest.mark.parametrize("bf16", [False, True])
def test_sums_over_micro_steps_never_cross_the_link(bf16, near, prefetch):
    """Gradients of groups updated far are summed there, in fp32. Those of each micro-step leave in the dtype of the
    parameters, and no sum ever comes back. The result equals that with everything near, bit for bit."""
    keys = {"gradient_accumulation_steps": 3, "default_chunk_size": 5_000, "bf16": {"enabled": bf16}}
    runs = {}
    for budget in (near, "100%"):
        model, optimizer = toy.build(near_budget=budget, prefetch=prefetch, **keys)
        came = watch_copies(model)
        losses = toy.train(model, optimizer, 3, num_micros=3)
        runs[budget] = losses, optimizer.grad_norm, model.gather_state()[0]
        if budget == near:
            size, elems = (2 if bf16 else 4), sum(group.piece_elems for group in model.layout.groups)
            assert model.ledger.step_bytes["near to far"] == 3 * size * elems
            assert {(kind, tier) for kind, _, tier in came if "grad" in kind} == {("micro_grad", FAR)}
            if bf16:
                assert torch.float32 not in {dtype for _, dtype, _ in came}
    assert runs[near][:2] == runs["100%"][:2]
    assert all(torch.equal(weight, runs["100%"][2][name]) for name, weight in runs[near][2].items())


@pytest.mark.each
@pytest.mark.parametrize("far", ["20%", "26%", "40%", "70%"])
@pytest.mark.parametrize("near", ["min", "30%"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_sums_over_micro_steps_may_wait_on_disk(far, near, prefetch, tmp_path):
    model, optimizer = toy.build(near_budget=near, prefetch=prefetch, default_chunk_size=5_000, far_budget=far,
                                 disk_path=str(tmp_path), gradient_accumulation_steps=3)
    losses, weights, norms = toy.oracle(STEPS, 3)
    assert toy.train(model, optimizer, STEPS, num_micros=3) == losses
    assert optimizer.grad_norm == norms[-1]
    assert all(torch.equal(weight, weights[name]) for name, weight in model.gather_state()[0].items())
    assert model.far.peak_bytes <= model.far.budget_bytes and model.ledger.moved_bytes["far to disk"] > 0


def test_gradients_thrown_away_between_micro_steps_leave_nothing_behind():
    model, optimizer = toy.build(near_budget="min", default_chunk_size=5_000, gradient_accumulation_steps=3)
    losses, weights, norms = toy.oracle(STEPS, 3)
    model.backward(model(*toy.share(7, 0, 1, 0, 3)))
    optimizer.zero_grad()
    assert toy.train(model, optimizer, STEPS, num_micros=3) == losses
    assert optimizer.grad_norm == norms[-1]
    assert all(torch.equal(weight, weights[name]) for name, weight in model.gather_state()[0].items())


def test_a_sum_over_micro_steps_counts_the_gradients_of_each():
    """A layer that only some micro-steps use, and the same table twice in one: sums are those of a plain loop."""
    class Sometimes(toy.Toy):
        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            x = self.embed(inputs)
            for block in self.blocks[: 1 if inputs[0, 0] % 2 else None]:
                x = block(x)
            return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    first_tokens = {int(toy.share(step, 0, 1, micro, 3)[0][0, 0]) % 2 for step in range(STEPS) for micro in range(3)}
    assert first_tokens == {0, 1}
    model, optimizer = toy.build(Sometimes, near_budget="min", default_chunk_size=5_000, gradient_accumulation_steps=3)
    losses, weights, norms = toy.oracle(STEPS, 3, model_func=Sometimes)
    assert toy.train(model, optimizer, STEPS, num_micros=3) == losses
    assert optimizer.grad_norm == norms[-1]
    assert all(torch.equal(weight, weights[name]) for name, weight in model.gather_state()[0].items())
