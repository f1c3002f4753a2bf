"""fp16 and bf16 on one process against an independent short reference, bit for bit; the loss scale; skipped steps."""

from __future__ import annotations

import math

import pytest
import torch

import pstar
from pstar.numerics.loss_scaler import LossScaler
from tests import toy
from tests.reference import mixed_reference

FP16 = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 3, "hysteresis": 2}
SCALER_KEYS = {"scaler.loss_scale", "scaler.good_steps", "scaler.forgiving", "scaler.skipped_steps"}


def train(model, optimizer, num_steps: int, first: int = 0, num_micros: int = 1) -> tuple[list[float], list[tuple]]:
    """(losses, [(loss scale of the step, whether it was skipped, its norm)])."""
    losses, trace = [], []
    for step in range(first, first + num_steps):
        scale = optimizer.loss_scale
        losses += toy.train(model, optimizer, 1, num_micros=num_micros, first=step)
        trace.append((scale, optimizer.skipped, optimizer.grad_norm))
    return losses, trace


@pytest.mark.each
@pytest.mark.parametrize("near", ["min", "100%"])
@pytest.mark.parametrize("num_micros", [1, 3])
@pytest.mark.parametrize("fp16", [FP16, FP16 | {"consecutive_hysteresis": True}, FP16 | {"hysteresis": 1},
                                  FP16 | {"min_loss_scale": 2.0**22}, FP16 | {"loss_scale": 2.0**10}, None])
def test_bits_and_scales_of_an_independent_reference(fp16, num_micros, near):
    """None is bf16. Losses, weights, norms and the trace of the scale: grown, forgiven, halved, held at the minimum."""
    keys = {"fp16": fp16} if fp16 else {"bf16": {"enabled": True}}
    model, optimizer = toy.build(near_budget=near, default_chunk_size=5_000, gradient_accumulation_steps=num_micros, **keys)
    losses, trace = train(model, optimizer, 16, num_micros=num_micros)
    expected = mixed_reference(16, fp16, num_micros)
    assert losses == expected.losses
    assert [entry[:2] for entry in trace] == expected.trace
    assert [norm for _, skipped, norm in trace if not skipped] == [n for n in expected.norms if math.isfinite(n)]
    weights, moments = model.gather_state()
    assert all(torch.equal(weights[name], master) for name, master in expected.masters.items())
    skipped = sum(entry[1] for entry in trace)
    assert optimizer.skipped_steps == skipped and moments["step.norm.weight"] == 16 - skipped
    assert model.schedule.num_traced == 1, "a skipped first step is a valid trace"
    if fp16 and "loss_scale" not in fp16:
        scales = [entry[0] for entry in trace]
        assert trace[0][1] and scales[-1] < scales[0], "the scale begins too large on purpose, and falls until it works"
        assert min(scales) >= fp16.get("min_loss_scale", 1)
        if fp16 == FP16:
            assert scales[1] == scales[0] and any(b > a for a, b in zip(scales, scales[1:], strict=False))


@pytest.mark.parametrize("keys, per_param", [
    ({"fp16": {"enabled": True}}, 16), ({"fp16": {"enabled": True}, "gradient_accumulation_steps": 2}, 18)])
def test_bytes_per_parameter_in_fp16_to_the_byte(keys, per_param):
    model, _ = toy.build(near_budget="min", **keys)
    for micro in range(keys.get("gradient_accumulation_steps", 1)):
        model.backward(model(*toy.share(0, 0, 1, micro, keys.get("gradient_accumulation_steps", 1))))
    assert model.model_data_bytes == per_param * model.layout.total_elems
    assert model.costs.total == per_param


PRECISIONS = [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}]


@pytest.mark.parametrize("keys", PRECISIONS, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("bad_step", [0, 2])
def test_a_skipped_step_leaves_everything_as_it_was(keys, bad_step):
    """In every precision, and in the first step, which is the one that is traced."""
    model, optimizer = toy.build(near_budget="min", default_chunk_size=5_000, **keys)
    toy.train(model, optimizer, bad_step)
    before = model.gather_state()
    loss = model(*toy.batch(bad_step))
    model.backward(loss * float("inf"))
    optimizer.step()
    assert optimizer.skipped and optimizer.skipped_steps == 1 and not math.isfinite(optimizer.grad_norm)
    for old, new in zip(before, model.gather_state(), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old if name not in SCALER_KEYS)
    assert optimizer.loss_scale == (128 if "fp16" in keys else 1)
    same, other = toy.build(near_budget="min", default_chunk_size=5_000, **keys)
    toy.train(same, other, bad_step)
    other.scaler.scale = optimizer.scaler.scale
    assert toy.train(model, optimizer, 3, first=5) == toy.train(same, other, 3, first=5)
    assert not optimizer.skipped and model.schedule.num_traced == 1


def test_a_run_goes_on_with_its_scale():
    keys = {"near_budget": "min", "fp16": FP16}
    model, optimizer = toy.build(**keys)
    train(model, optimizer, 7)
    weights, moments = model.gather_state()
    assert moments.keys() >= SCALER_KEYS
    second, other = toy.build(**keys, default_chunk_size=5_000)
    second.load_state(weights, moments)
    assert other.skipped_steps == optimizer.skipped_steps > 0
    assert train(second, other, 8, first=7) == train(model, optimizer, 8, first=7)
    plain, adam = toy.build()
    plain.load_state(weights, moments)
    assert adam.loss_scale == 1, "another precision of compute takes the weights, not the scale"
    assert not SCALER_KEYS & plain.gather_state()[1].keys()


def test_fault_hysteresis_is_a_count_and_not_the_factor():
    scaler = LossScaler(2.0**10, dynamic=True, hysteresis=4)
    for expected in (10, 10, 10, 9, 8):
        scaler.update(overflow=True)
        assert scaler.scale == 2.0**expected


def test_fault_the_clip_threshold_is_not_scaled():
    """The norm is that of unscaled gradients, so the threshold means the same at every scale."""
    norms = []
    for power in (0, 8):
        model, optimizer = toy.build(gradient_clipping=0.01, fp16={"enabled": True, "loss_scale": 2.0**power})
        losses = toy.train(model, optimizer, 3)
        norms.append(optimizer.grad_norm)
        assert optimizer.clip_norm == 0.01
        weights, _ = model.gather_state()
        fp32 = toy.oracle(3, clip=0.01)
        assert losses == pytest.approx(fp32[0], rel=0.01)
        assert sum((weights[name] - value).square().sum() for name, value in fp32[1].items()) < 1e-2
    assert norms[0] == pytest.approx(norms[1], rel=0.01) == pytest.approx(fp32[2][-1], rel=0.01)


def deepspeed_scale(overflows: list[bool], scale: float, window: int, hysteresis: int, consecutive: bool,
                    minimum: float) -> list[float]:
    """The rule as DeepSpeed documents it, by iteration numbers."""
    last, left, scales = -1, hysteresis, []
    for iteration, overflow in enumerate(overflows):
        if overflow:
            if left == 1:
                scale = max(scale / 2, minimum)
            else:
                left -= 1
            last = iteration
        else:
            if consecutive:
                left = hysteresis
            if (iteration - last) % window == 0:
                left, scale = hysteresis, scale * 2
        scales.append(scale)
    return scales


@pytest.mark.parametrize("window, hysteresis, consecutive, minimum", [
    (3, 2, False, 1.0), (3, 2, True, 1.0), (1, 1, False, 4.0), (5, 3, False, 512.0), (2, 4, True, 1.0)])
def test_the_scale_follows_deepspeeds_rule(window, hysteresis, consecutive, minimum):
    generator = torch.Generator().manual_seed(window)
    for odds in (0.1, 0.3, 0.6):
        overflows = (torch.rand(100, generator=generator) < odds).tolist()
        scaler, scales = LossScaler(1024.0, True, window, hysteresis, consecutive, minimum), []
        for overflow in overflows:
            scaler.update(overflow)
            scales.append(scaler.scale)
        expected = deepspeed_scale(overflows, 1024.0, window, hysteresis, consecutive, minimum)
        assert scales == [min(scale, 2.0**32) for scale in expected] or max(expected) > 2.0**32
        assert scaler.skipped_steps == sum(overflows)


@pytest.mark.parametrize("scaler, message", [
    (LossScaler(2.0**20), "fp16.loss_scale 1.04858e\\+06 is too large; give a smaller one, or 0"),
    (LossScaler(4.0, dynamic=True, hysteresis=1), "down to a loss scale of 1: the loss itself overflows"),
    (LossScaler(), "20 steps in a row were skipped .* look for a division by zero"),
])
def test_a_run_that_only_skips_ends_with_one_line(scaler, message):
    with pytest.raises(pstar.StateError, match=message) as error:
        for _ in range(30):
            scaler.update(overflow=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("values, message", [
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true; choose one"),
    ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale is -1.0"),
    ({"fp16": {"initial_scale_power": 65536}}, "fp16.initial_scale_power is 65536"),
    ({"fp16": {"hysteresis": 0}}, "fp16.hysteresis is 0; give at least 1"),
    ({"fp16": {"loss_scale_windw": 1}}, "did you mean 'fp16.loss_scale_window'?"),
    ({"fp16": {"min_loss_scale": 0}}, "fp16.min_loss_scale is 0.0"),
])
def test_a_loss_scale_that_cannot_be(values, message):
    with pytest.raises(pstar.ConfigError) as error:
        pstar.plan_engine(toy.Toy, values)
    assert message in str(error.value) and "\n" not in str(error.value)
