"""far_states auto on several ranks: all of them choose what the slowest speeds say, and the choice changes no bit."""

from __future__ import annotations

import pytest
import torch

from pstar.planner import speeds
from pstar.planner.adam_choice import Speeds
from tests import toy
from tests.pstar.test_engine_ranks import STEPS, ddp_case, global_losses

ROOM = {"near_budget": "60%", "default_chunk_size": 5_000}
KINDS = ({}, {"communication": "chunk"}, {"ownership": "sharded"})
FAST, SLOW = Speeds(1e9, 1e11, 1e13), Speeds(1e9, 1e9, 1e13)


@pytest.fixture(scope="module")
def ddp(ranks):
    return ranks(2).run(ddp_case)[0]


def case(rank: int, num_ranks: int, keys: dict, found: list[Speeds] | None = None) -> dict:
    """found: what each rank is to measure; None for a real measurement."""
    real, calls = speeds.measure_speeds, []

    def measure(*args):
        calls.append(args)
        return real(*args) if found is None else found[rank]

    speeds.measure_speeds = measure
    try:
        model, optimizer = toy.build(**keys)
    finally:
        speeds.measure_speeds = real
    losses = toy.train(model, optimizer, STEPS, rank, num_ranks)
    weights, _ = model.gather_state()
    return {"losses": global_losses(losses, num_ranks), "weights": weights, "norm": optimizer.grad_norm,
            "far_states": model.far_states, "row": dict(model.memory_plan()).get("far states"), "measured": len(calls),
            "moved": model.ledger.step_bytes["near to far"]}


def same_bits(got: dict, ddp: dict) -> bool:
    return (got["losses"] == ddp["losses"] and got["norm"] == ddp["norm"]
            and all(torch.equal(value, got["weights"][name]) for name, value in ddp["weights"].items()))


@pytest.mark.each
@pytest.mark.parametrize("kind", KINDS, ids=["group", "chunk", "sharded"])
@pytest.mark.parametrize("found, where", [([FAST, FAST], "stream"), ([FAST, SLOW], "host"), ([SLOW, FAST], "host")])
def test_one_slow_rank_decides_for_all(ranks, ddp, found, where, kind):
    """Ranks with different choices would evict and gather differently."""
    keys = kind | ROOM | {"simulated_link": 1e9}
    results = ranks(2).run(case, keys, found)
    assert [each["far_states"] for each in results] == [where] * 2 and results[0]["row"] == results[1]["row"]
    assert [each["measured"] for each in results] == [1, 1] and same_bits(results[0], ddp)
    asked = ranks(2).run(case, keys | {"far_states": where})
    assert [each["measured"] for each in asked] == [0, 0] and same_bits(asked[0], ddp)
    assert [each["moved"] for each in asked] == [each["moved"] for each in results]


@pytest.mark.parametrize("link", [2e7, 1e12], ids=["slow", "fast"])
def test_a_real_measurement_changes_no_bit(ranks, ddp, link):
    results = ranks(2).run(case, ROOM | {"simulated_link": link})
    assert [each["measured"] for each in results] == [1, 1] and results[0]["row"] == results[1]["row"]
    assert same_bits(results[0], ddp)


def test_nothing_is_measured_without_a_link(ranks, ddp):
    results = ranks(2).run(case, ROOM, [FAST, FAST])
    assert [each["measured"] for each in results] == [0, 0] and same_bits(results[0], ddp)
    assert [each["far_states"] for each in results] == ["host"] * 2
