"""far_states auto: speeds are measured where they decide, the slowest rank's count, and no choice changes a number.

No test compares with a clock: the expected speed follows from the simulated link, or the test gives it.
"""

from __future__ import annotations

import itertools
import json
import random
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pstar
from pstar import cli
from pstar.layout.budget import smallest_streaming_budget
from pstar.memory.links import Links
from pstar.memory.tier import NEAR
from pstar.numerics.precision import Precision
from pstar.planner import speeds
from pstar.planner.adam_choice import Speeds, adam_traffic_bytes, choose_adam
from pstar.planner.plan import plan_engine
from pstar.planner.predict import costs_of
from tests import toy

STEPS = 3
GPU = Speeds(1e9, 1e11, 1e13)
"""A host so slow beside its link that states are streamed."""
SLOW_LINK = Speeds(1e9, 1e9, 1e13)
ROOM = {"near_budget": "60%", "default_chunk_size": 5_000}
"""Near has room for a group's model data, and not for all states."""


@pytest.fixture
def measured(monkeypatch):
    """measured(speeds) sets the result of every measurement; the list that it returns has one entry for each."""

    def set_to(found: Speeds) -> list:
        calls: list = []
        monkeypatch.setattr(speeds, "measure_speeds", lambda *args: calls.append(args) or found)
        return calls

    return set_to


def on_a_slow_link(**keys) -> dict:
    """Without a simulated link a CPU measures nothing."""
    return {"simulated_link": 1e8} | keys


# ---------------------------------------------------------------- the choice


@pytest.mark.parametrize("found, where", [(GPU, "stream"), (SLOW_LINK, "host")])
def test_auto_chooses_the_faster_by_the_speeds(measured, found, where):
    calls = measured(found)
    model, optimizer = toy.build(**on_a_slow_link(**ROOM))
    assert model.far_states == where and len(calls) == 1
    assert model.far_states == choose_adam(found, model.costs, 10**6).where
    toy.train(model, optimizer, 2)
    assert all(model._chunks.tiers.update_tier(group.index) == NEAR for group in model.layout.groups) == (where == "stream")
    states = sum(group.piece_elems * model.costs.states for group in model.layout.groups
                 if model._chunks.tiers.states_tier[group.index] != NEAR)
    assert states > 0 and (model.ledger.step_bytes["far to near"] >= states) == (where == "stream"), "states travel, or not"


@pytest.mark.parametrize("where", ["host", "stream"])
def test_explicit_far_states_are_not_measured(measured, where):
    calls = measured(SLOW_LINK if where == "stream" else GPU)
    model, _ = toy.build(**on_a_slow_link(**ROOM, far_states=where))
    assert model.far_states == where and not calls and ("as far_states says" in dict(model.memory_plan())["far states"])


@pytest.mark.parametrize("keys, why", [
    (on_a_slow_link(near_budget="100%"), "no group's states are far"),
    (ROOM, "near is host memory too"),
    (on_a_slow_link(**ROOM, overlap_update=True), "overlap_update"),
    (on_a_slow_link(**ROOM, optimizer={"type": "AdamW", "params": {"use_hybrid_adam": False}}), "use_hybrid_adam"),
    (on_a_slow_link(near_budget="min", default_chunk_size=5_000), "near has no certain room"),
    (on_a_slow_link(near_memory="2200KiB", default_chunk_size=11_000), "near has no certain room"),
    (on_a_slow_link(near_budget="60%", default_chunk_size=5_000, far_budget="95%"), "far has no certain room"),
], ids=lambda value: value if isinstance(value, str) else None)
def test_where_the_answer_is_known_nothing_is_measured(measured, keys, why):
    calls = measured(GPU)
    model, _ = toy.build(**keys)
    assert model.far_states == "host" and not calls and why in model._far_choice[1]
    row = dict(model.memory_plan()).get("far states", "")
    if why in speeds.NO_CHOICE:
        assert not row, "there is nothing to say"
    else:
        assert row.startswith("updated by the host") and why in row


class Pair(nn.Module):
    """Two layers of one chunk each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.layers(F.one_hot(inputs % 64, 64).to(self.layers[0].weight.dtype)).float().square().mean()


def test_states_in_near_leave_no_room_for_others(measured):
    """In bf16 near needs 14 bytes an element of a group for streaming. Here it has 18.2, of which the other group's states
    never leave 10."""
    calls = measured(GPU)
    keys = on_a_slow_link(near_budget="65%", default_chunk_size=64 * 64, bf16={"enabled": True})
    model, optimizer = toy.build(Pair, **keys)
    assert model._chunks.tiers.states_tier.count(NEAR) == 1 and model.far_states == "host" and not calls
    losses = toy.train(model, optimizer, 2)
    streaming, optimizer = toy.build(Pair, **keys, far_states="stream")
    assert streaming._chunks.tiers.states_tier.count(NEAR) == 0, "an explicit stream reserves room"
    assert toy.train(streaming, optimizer, 2) == losses


def test_states_that_may_be_on_disk_are_the_hosts(measured, tmp_path):
    calls = measured(GPU)
    model, _ = toy.build(**on_a_slow_link(**ROOM, disk_path=str(tmp_path)))
    assert model.far_states == "host" and not calls


def test_the_row_of_the_memory_plan_has_the_choice_and_the_speeds(measured):
    measured(GPU)
    row = dict(toy.build(**on_a_slow_link(**ROOM))[0].memory_plan())["far states"]
    assert row.startswith("updated by near, streamed (")
    assert "host Adam 1 G parameters/s, link 93.13 GiB/s each way, near memory 9.095 TiB/s" in row


def test_another_word_is_refused_with_the_known_ones():
    with pytest.raises(pstar.ConfigError, match="choose auto, host or stream"):
        pstar.load_config({"far_states": "both"})
    assert pstar.load_config(None).far_states == "auto"


def test_the_slowest_rank_counts_in_each_speed():
    assert speeds.slowest([Speeds(3, 5, 7), Speeds(4, 2, 9)]) == Speeds(3, 2, 7)
    assert speeds.slowest([GPU]) == GPU


# ---------------------------------------------------------------- no number changes


@pytest.fixture(scope="module")
def plain():
    return toy.oracle(STEPS)


@pytest.mark.parametrize("link", [1e7, 1e12], ids=["slow", "fast"])
@pytest.mark.parametrize("far_states", ["auto", "host", "stream"])
def test_the_choice_never_changes_a_number(plain, link, far_states):
    """Here the measurement is a real one."""
    model, optimizer = toy.build(**ROOM, simulated_link=link, far_states=far_states)
    assert toy.train(model, optimizer, STEPS) == plain[0] and optimizer.grad_norm == plain[2][-1]
    found, _ = model.gather_state()
    assert all(torch.equal(found[name], weight) for name, weight in plain[1].items())
    if far_states == "auto":
        assert model.far_states == "host", "near is no faster at Adam than the host: it is the host"


def placements(num: int) -> list[dict]:
    """Budgets from the tightest on, in every combination that could make streaming fail; the same ones at every run."""
    near = [{"near_budget": share} for share in ("min", "35%", "50%", "70%", "90%")] + [{"near_memory": "1500KiB"}]
    far = [None, 0, 0.5]    # beside what must be there; None: no bound
    sums = [{}, {"find_unused_parameters": True}]
    everything = list(itertools.product(near, (3_000, 5_000, 11_000, 20_000), far, (0, 2), sums, (False, True)))
    return random.Random(3).sample(everything, num)


def least_far(keys: dict) -> int:
    """The far budget that the plan asks for, from what it says of one that is too small."""
    with pytest.raises(pstar.BudgetError) as error:
        plan_engine(toy.Toy, toy.config(**keys, far_budget="1%"))
    return int(str(error.value).split("need ")[1].split(":")[0])


@pytest.mark.pairs
@pytest.mark.parametrize("room, chunk, far, prefetch, sums, offload", placements(40))
def test_auto_refuses_nothing_that_host_can_run(room, chunk, far, prefetch, sums, offload, plain, measured):
    measured(GPU)
    keys = room | sums | {"default_chunk_size": chunk, "prefetch": prefetch, "offload_activations": offload}
    try:
        whole = plan_engine(toy.Toy, toy.config(**keys)).layout.total_elems * 16
        if far is not None:
            least = least_far(keys)
            keys["far_budget"] = least + int(far * max(whole - least, 0))
        model, optimizer = toy.build(**on_a_slow_link(**keys, far_states="host"))
        assert toy.train(model, optimizer, STEPS) == plain[0]
    except pstar.BudgetError as error:
        pytest.skip(f"host cannot: {error}")
    model, optimizer = toy.build(**on_a_slow_link(**keys))
    assert toy.train(model, optimizer, STEPS) == plain[0]
    found, _ = model.gather_state()
    assert all(torch.equal(found[name], weight) for name, weight in plain[1].items())
    assert model.near.peak_bytes <= model.near.budget_bytes


def test_some_of_these_placements_do_stream(measured):
    """Else the test above could pass by never streaming."""
    measured(GPU)
    chosen = []
    for room, chunk, _, prefetch, sums, offload in placements(40):
        try:
            model, _ = toy.build(**on_a_slow_link(**room, **sums, default_chunk_size=chunk, prefetch=prefetch,
                                                  offload_activations=offload))
        except pstar.BudgetError:
            continue
        if model.far_states == "stream":
            assert smallest_streaming_budget(model.layout, model.costs) <= model.near.budget_bytes
        chosen.append(model.far_states)
    assert chosen.count("stream") >= 10 and chosen.count("host") >= 5


# ---------------------------------------------------------------- the measurement


def measure(precision: str = "fp32", link: float | None = None, elems: int = 5_000, asynchronous: bool = True,
            far_elems: int = 5_000) -> Speeds:
    kind, links = Precision(precision), Links(asynchronous, link)
    try:
        return speeds.measure_speeds(kind, kind.grad_dtype(False), costs_of(precision), links, torch.device("cpu"), elems,
                                     far_elems)
    finally:
        links.close()    # with its threads


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("link", [1e6, 3e7])
def test_a_simulated_link_is_never_faster_than_it_pretends_to_be(link, asynchronous):
    found = measure(link=link, asynchronous=asynchronous)
    assert 0 < found.link_bytes_per_s <= link / (1 if asynchronous else 2), "one way after the other takes twice as long"
    assert choose_adam(found, costs_of("fp32"), 10**6).where == "host"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_measurement_leaves_nothing_behind(precision, monkeypatch):
    made, bytes_made = [], []

    def watched(make):
        def watching(*args, **options):
            tensor = make(*args, **options)
            made.append(weakref.ref(tensor.untyped_storage()))
            bytes_made.append(tensor.nbytes)
            return tensor
        return watching

    monkeypatch.setattr(speeds.torch, "ones", watched(torch.ones))
    monkeypatch.setattr(speeds.Tier, "allocate", watched(speeds.Tier.allocate))
    before, drawn = torch.get_rng_state(), random.getstate()
    found = measure(precision)
    assert all(speed > 0 for name, speed in vars(found).items() if name != "host_memory_bytes_per_s")
    assert len(made) >= 8 and all(storage() is None for storage in made), "scratch is freed"
    costs = costs_of(precision)
    assert sum(bytes_made) == costs.total * 5_000 + 4 * 4 * 5_000, "no more than the pieces it is about"
    assert torch.equal(torch.get_rng_state(), before) and random.getstate() == drawn


def test_scratch_is_small_however_large_the_groups():
    for precision in ("fp32", "bf16", "fp16"):
        assert (costs_of(precision).total + 2) * speeds.MOST_ADAM_ELEMS <= 2**28
    assert 4 * speeds.MOST_COPY_BYTES <= 2**28


@pytest.mark.parametrize("far_elems, num_updates", [(4_999, 1), (5_000, 1), (15_500, 3), (10**9, 12)])
def test_the_hosts_adam_goes_around_what_is_far_or_more_than_a_cache_holds(far_elems, num_updates, monkeypatch):
    seen = []
    monkeypatch.setattr(speeds, "MOST_ADAM_BYTES", 12 * 16 * 5_000)
    monkeypatch.setattr(speeds, "adam_steps", lambda updates: seen.append(updates[0]))
    monkeypatch.setattr(speeds, "_median_s", lambda run: [run() for _ in range(24)] and 1.0)
    measure(far_elems=far_elems)
    assert len(set(map(id, seen[:num_updates]))) == len(set(map(id, seen))) == num_updates


def test_the_start_leaves_tiers_and_ledger_as_they_are(monkeypatch):
    seen = []
    real = speeds.measure_speeds

    def watched(*args):
        found = real(*args)
        seen.append(torch.get_rng_state())
        return found

    monkeypatch.setattr(speeds, "measure_speeds", watched)
    model, _ = toy.build(**on_a_slow_link(**ROOM))
    plain, _ = toy.build(**ROOM)
    for tier, other in ((model.near, plain.near), (model.far, plain.far)):
        assert (tier.used_bytes, tier.idle_bytes, tier.peak_bytes) == (other.used_bytes, other.idle_bytes, other.peak_bytes)
    assert len(seen) == 1 and not model.ledger.moved_bytes and model.ledger.copy_waited_s == 0
    found, expected = model.gather_state()[0], plain.gather_state()[0]
    assert all(torch.equal(found[name], value) for name, value in expected.items()), "the weights are drawn after it"


@given(st.integers(1, 10**12), st.sampled_from(["fp32", "bf16", "fp16"]), st.integers(0, 10**12))
def test_without_a_gpu_it_is_host_however_fast_the_link(host, precision, num_params):
    """Speeds as measure_speeds gives them on a CPU: near is exactly as fast, to the last bit of a float."""
    costs = costs_of(precision)
    found = Speeds(float(host), 1e18, float(host * adam_traffic_bytes(costs)))
    assert choose_adam(found, costs, num_params).where == "host"


# ---------------------------------------------------------------- the plan


def test_the_plan_takes_measured_speeds_when_it_is_told_to(monkeypatch, capsys):
    asked = []
    arguments = ["plan", "--model", "2x64", "--machine", "cpu2", "--precision", "fp32", "--seq-len", "64",
                 "--gpu-memory", "90MiB", "--json"]
    monkeypatch.setattr("pstar.planner.plan_command.measure_here", lambda *given: asked.append(given) or GPU)
    answers = []
    for more in ([], ["--measure"]):
        cli.main([*arguments, *more])
        answers.append(json.loads(capsys.readouterr().out))
    assert asked == [("fp32", 32)]
    assert answers[0]["near_bytes"] == answers[1]["near_bytes"] and answers[0]["seconds"] != answers[1]["seconds"]
    cli.main([*arguments[:-1], "--measure"])
    assert "link, GPU memory and host Adam: measured here, now" in capsys.readouterr().out


def test_this_machine_can_be_measured(monkeypatch):
    monkeypatch.setattr(speeds, "MOST_ADAM_ELEMS", 50_000)
    found = speeds.measure_here("bf16")
    assert min(found.host_adam_params_per_s, found.link_bytes_per_s, found.gpu_memory_bytes_per_s) > 0
