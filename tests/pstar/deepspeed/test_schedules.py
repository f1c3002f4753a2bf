"""DeepSpeed's schedules: its own numbers, the engine that steps them, and checkpoints.

The expected rates were printed by DeepSpeed 0.19.8 (runtime/lr_schedules.py on torch's AdamW with lr 0.003): the rates of
updates 0 to 12. They have ten digits, hence the tolerance.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import pstar
from pstar.deepspeed.schedules import PARAMS
from pstar.numerics.grad_norm import clip_grad_norm_
from tests import toy

DIGITS = 1e-9
EXPECTED = [
    ("WarmupLR", {"warmup_min_lr": 0.0001, "warmup_num_steps": 6},
     [0.0001, 0.0001, 0.001221873141, 0.001878126859, 0.002343746282, 0.002704908765, *[0.003] * 7], None),
    ("WarmupLR", {"warmup_max_lr": 0.01, "warmup_num_steps": 1, "warmup_type": "linear"}, [0, 0, 0.005, *[0.01] * 10], None),
    ("WarmupDecayLR", {"total_num_steps": 10, "warmup_num_steps": 4, "warmup_type": "linear"},
     [0, 0, 0.00025, 0.0005, 0.00075, 0.001, 0.0008333333333, 0.0006666666667, 0.0005, 0.0003333333333, 0.0001666666667,
      0, 0], None),
    ("WarmupDecayLR", {"total_num_steps": 3, "warmup_num_steps": 6},
     [0, 0, 0.0003868528072, 0.0006131471928, 0.0007737056145, 0.0008982444017, 0.001, *[0] * 6], None),
    ("WarmupCosineLR", {"total_num_steps": 10, "warmup_num_steps": 3, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05},
     [0, 0.0003, 0.002003510335, 0.003, 0.002858880637, 0.002463472968, 0.001892092331, 0.001257907669, 0.0006865270324,
      0.0002911193632, *[0.00015] * 3], None),
    ("OneCycle", {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 4, "cycle_second_step_size": 6,
                  "decay_step_size": 2, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01},
     [0.001, 0.00325, 0.0055, 0.00775, 0.01, 0.0085, 0.007, 0.0055, 0.004, 0.0025, 0.001, 0.0008, 0.0006666666667],
     [0.8, 0.875, 0.85, 0.825, 0.8, 0.8166666667, 0.8333333333, 0.85, 0.8666666667, 0.8833333333, 0.9, 0.9045, 0.909]),
    ("OneCycle", {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 6, "cycle_first_stair_count": 2,
                  "cycle_momentum": False},
     [0.001, 0.001, 0.001, 0.0055, 0.0055, 0.0055, 0.01, 0.0055, 0.0055, 0.0055, 0.001, 0.001, 0.001], None),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.0001, "lr_range_test_step_size": 3, "lr_range_test_staircase": True},
     [0.0001, 0.0001, 0.0001, 0.0002, 0.0002, 0.0002, 0.0003, 0.0003, 0.0003, 0.0004, 0.0004, 0.0004, 0.0005], None),
]


@pytest.mark.parametrize("kind, params, rates, momenta", EXPECTED)
def test_the_rates_are_deepspeeds(kind: str, params: dict, rates: list[float], momenta: list[float] | None) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.003)
    scheduler = pstar.DeepSpeedLR(optimizer, kind, params)
    for number, rate in enumerate(rates):
        group = optimizer.param_groups[0]
        assert group["lr"] == pytest.approx(rate, rel=DIGITS, abs=DIGITS), number
        assert scheduler.get_last_lr() == [group["lr"]]
        if momenta:
            assert group["betas"] == (pytest.approx(momenta[number], rel=DIGITS), 0.99)
        else:
            assert group["betas"] == (0.9, 0.999)
        optimizer.step()
        scheduler.step()


def test_every_schedule_is_held_against_deepspeed() -> None:
    assert {kind for kind, *_ in EXPECTED} == set(PARAMS)


WARMUP = {"type": "WarmupDecayLR", "params": {"total_num_steps": 8, "warmup_max_lr": 0.004, "warmup_num_steps": 3,
                                              "warmup_type": "linear"}}
RATES = [0, 0, 0.004 / 3, 0.008 / 3, 0.004, 0.0032, 0.0024]
"""Of updates 0 to 6, by hand: iteration k - 1 of 3 iterations up and 5 down."""


def plain(num_steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """torch alone, with the rates above written into its groups."""
    torch.manual_seed(0)
    model, losses = toy.Toy(), []
    optimizer = toy.adamw(model.parameters(), lr=toy.LR, weight_decay=toy.WEIGHT_DECAY)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = RATES[step]
        optimizer.zero_grad()
        loss = model(*toy.batch(step))
        loss.backward()
        clip_grad_norm_(model.parameters(), toy.CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def test_the_engine_steps_the_schedule_and_a_checkpoint_goes_on_in_it(tmp_path: Path) -> None:
    """Equal bits: the rates are the same numbers up to a rounding of 1e-16, which fp32 Adam does not see."""
    losses, weights = plain(7)
    model, optimizer = toy.build(near_budget="min", scheduler=WARMUP)
    first = toy.train(model, optimizer, 4)
    assert model.lr_scheduler.get_last_lr() == [pytest.approx(RATES[4])]
    model.save_checkpoint(tmp_path / "saved")
    model, optimizer = toy.build(near_budget="min", scheduler=WARMUP)
    assert optimizer.param_groups[0]["lr"] == 0
    model.load_checkpoint(tmp_path / "saved")
    assert optimizer.param_groups[0]["lr"] == pytest.approx(RATES[4])
    assert first + toy.train(model, optimizer, 3, first=4) == losses
    state = model.gather_state()[0]
    assert all(torch.equal(state[name], value) for name, value in weights.items())


def test_a_skipped_step_does_not_move_the_schedule() -> None:
    """DeepSpeed steps its schedule only after an update. The first scale overflows fp16 on purpose."""
    model, optimizer = toy.build(scheduler=WARMUP, fp16={"enabled": True, "initial_scale_power": 32, "hysteresis": 1})
    toy.train(model, optimizer, 1)
    assert optimizer.skipped and model.lr_scheduler.last_epoch == 0
    while optimizer.skipped:
        toy.train(model, optimizer, 1)
    assert model.lr_scheduler.last_epoch == 1


def test_without_a_schedule_the_loop_sets_the_rate() -> None:
    model, optimizer = toy.build()
    toy.train(model, optimizer, 1)
    assert model.lr_scheduler is None and optimizer.param_groups[0]["lr"] == toy.LR


@pytest.mark.parametrize("scheduler, line", [
    ({"type": "Cosine"}, "scheduler.type is 'Cosine'; choose WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRange"),
    ({"type": "WarmupDecayLR"}, "scheduler.params.total_num_steps is missing: WarmupDecayLR needs it"),
    ({"type": "WarmupLR", "params": {"warmup_steps": 5}}, "'scheduler.params.warmup_steps'; did you mean "
                                                           "'scheduler.params.warmup_num_steps'?"),
    ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "scheduler.params.warmup_num_steps is 0; give at least 1"),
    ({"type": "WarmupLR", "params": {"warmup_max_lr": [1, 2]}}, "warmup_max_lr must be a number, the same for all"),
    ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, "warmup_type is 'cubic'; choose log or linear"),
    ({"type": "OneCycle", "params": {"cycle_momentum": 1}}, "params.cycle_momentum must be true or false, found 1"),
    ({"params": {"warmup_num_steps": 5}}, "scheduler.params is given without scheduler.type"),
])
def test_a_schedule_that_cannot_be_followed_is_refused(scheduler: dict, line: str) -> None:
    with pytest.raises(pstar.ConfigError) as error:
        pstar.load_config({"scheduler": scheduler})
    assert line in str(error.value) and "\n" not in str(error.value)
