"""16 bit on several ranks: bit for bit an independent reference that plays all ranks in one process; overflows together."""

from __future__ import annotations

import math

import pytest
import torch

from tests import toy
from tests.pstar.test_engine_ranks import global_losses
from tests.reference import mixed_reference

FP16 = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 3, "hysteresis": 2}
STEPS = 12


def case(rank: int, num_ranks: int, keys: dict, num_micros: int = 1, bad: tuple[int, int] | None = None):
    model, optimizer = toy.build(gradient_accumulation_steps=num_micros, **keys)
    losses, trace = [], []
    for step in range(STEPS):
        scale = optimizer.loss_scale
        total = 0.0
        optimizer.zero_grad()
        for micro in range(num_micros):
            loss = model(*toy.share(step, rank, num_ranks, micro, num_micros))
            loss = loss * float("inf") if bad == (step, rank) else loss
            model.backward(loss)
            total += (loss / num_micros).item()
        optimizer.step()
        losses.append(total)
        trace.append((scale, optimizer.skipped, optimizer.grad_norm))
    return {"losses": global_losses(losses, num_ranks), "trace": trace, "weights": model.gather_state()[0],
            "steps": dict(optimizer.steps), "traced": model.schedule.num_traced}


def assert_bits(results: list[dict], expected) -> None:
    for result in results:
        assert [entry[:2] for entry in result["trace"]] == expected.trace
        assert result["losses"] == pytest.approx(expected.losses, rel=1e-12, nan_ok=True)
        assert [norm for _, skipped, norm in result["trace"] if not skipped] == [
            norm for norm in expected.norms if math.isfinite(norm)]
        assert result["traced"] == 1 and set(result["steps"].values()) == {
            STEPS - sum(skipped for _, skipped in expected.trace)}
    weights = results[0]["weights"]
    assert all(torch.equal(weights[name], master) for name, master in expected.masters.items())


@pytest.mark.each
@pytest.mark.parametrize("num_micros", [1, 3])
@pytest.mark.parametrize("near", ["min", "100%"])
@pytest.mark.parametrize("fp16", [FP16, None])
def test_bits_and_scales_of_an_independent_reference_at_two_ranks(ranks, fp16, near, num_micros):
    """Chunks of 11,000 elements hold every parameter whole, so that its norm is one rank's."""
    keys = {"fp16": fp16} if fp16 else {"bf16": {"enabled": True}}
    keys |= {"near_budget": near, "default_chunk_size": 11_000}
    assert_bits(ranks(2).run(case, keys, num_micros), mixed_reference(STEPS, fp16, num_micros, 2))


@pytest.mark.each
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("bad", [(0, 0), (0, 1), (4, 1)])
def test_an_infinity_on_one_rank_makes_all_skip(ranks, precision, bad):
    """Also in the first step, which is traced. The scale of fp16 begins where nothing else overflows."""
    fp16 = {"enabled": True, "initial_scale_power": 10, "hysteresis": 1} if precision == "fp16" else None
    keys = {"fp16": fp16} if fp16 else {precision: {"enabled": True}} if precision == "bf16" else {}
    results = ranks(2).run(case, keys | {"near_budget": "min", "default_chunk_size": 11_000}, 1, bad)
    for result in results:
        assert [step for step, entry in enumerate(result["trace"]) if entry[1]] == [bad[0]]
        assert result["traced"] == 1 and set(result["steps"].values()) == {STEPS - 1}
        assert repr(result["trace"]) == repr(results[0]["trace"])
    if precision != "fp32":
        expected = mixed_reference(STEPS, fp16, 1, 2, bad=bad)
        weights = results[0]["weights"]
        assert all(torch.equal(weights[name], master) for name, master in expected.masters.items())


def bytes_case(rank: int, num_ranks: int, num_micros: int):
    model, _ = toy.build(near_budget="min", default_chunk_size=5_000, fp16={"enabled": True},
                         gradient_accumulation_steps=num_micros)
    for micro in range(num_micros):
        model.backward(model(*toy.share(0, rank, num_ranks, micro, num_micros)))
    return model.model_data_bytes, model.layout.elems_per_rank


@pytest.mark.each
@pytest.mark.parametrize("num_micros, per_param", [(1, 16), (3, 18)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bytes_per_parameter_in_fp16_divided_by_the_ranks(ranks, num_ranks, num_micros, per_param):
    for held, elems in ranks(num_ranks).run(bytes_case, num_micros):
        assert held == per_param * elems


def resume_case(rank: int, num_ranks: int, state: tuple):
    model, optimizer = toy.build(near_budget="50%", default_chunk_size=5_000, fp16=FP16)
    model.load_state(*state)
    scale = optimizer.loss_scale
    return scale, global_losses(toy.train(model, optimizer, 4, rank, num_ranks, first=6), num_ranks), optimizer.skipped_steps


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_scale_goes_on_at_another_number_of_ranks(ranks, num_ranks):
    """Losses within 1 %: gradients are rounded to fp16 on each rank before they are added."""
    model, optimizer = toy.build(near_budget="min", fp16=FP16)
    toy.train(model, optimizer, 6)
    state, scale, skipped = model.gather_state(), optimizer.loss_scale, optimizer.skipped_steps
    losses = toy.train(model, optimizer, 4, first=6)
    for got_scale, got, got_skipped in ranks(num_ranks).run(resume_case, state):
        assert got_scale == scale and got_skipped >= skipped > 0
        assert got == pytest.approx(losses, rel=0.01)
