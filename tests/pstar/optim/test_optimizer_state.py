"""Programs that read or reset Adam's moments in `optimizer.state`: refused in one line, because moments are in chunks."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import pstar
from tests import toy

STEPS = 3


def trained(near: str) -> tuple[pstar.Engine, torch.optim.Optimizer]:
    model, optimizer = toy.build(near_budget=near)
    toy.train(model, optimizer, STEPS)
    return model, optimizer


def state_dict_of_torch() -> dict:
    """Of torch's AdamW, with moments."""
    model = toy.Toy()
    optimizer = torch.optim.AdamW(model.parameters())
    model(*toy.batch(0)).backward()
    optimizer.step()
    return optimizer.state_dict()


USES = {
    "read": lambda optimizer: optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"],
    "write": lambda optimizer: optimizer.state.update({optimizer.param_groups[0]["params"][0]: {}}),
    "clear": lambda optimizer: optimizer.state.clear(),
    "replace": lambda optimizer: setattr(optimizer, "state", {}),
    "load": lambda optimizer: optimizer.load_state_dict(state_dict_of_torch()),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_of_the_moments_is_refused_in_one_line_and_changes_nothing(use: str) -> None:
    model, optimizer = trained("min")
    before = optimizer.state_dict()
    with pytest.raises(pstar.StateError, match=r"moments are in chunks, .*model\.load_state\(weights, moments\)"):
        USES[use](optimizer)
    assert optimizer.state_dict() == before
    same, other = trained("min")
    assert toy.train(model, optimizer, STEPS, first=STEPS) == toy.train(same, other, STEPS, first=STEPS)


def test_a_program_may_look_whether_there_are_states_and_load_its_own_param_groups() -> None:
    _, optimizer = trained("100%")
    assert not optimizer.state and list(optimizer.state.items()) == [] and len(optimizer.state) == 0
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("near", ["min", "100%"])
def test_load_state_resets_the_moments(near: str) -> None:
    """As plain PyTorch with the same weights and a new optimizer."""
    model, optimizer = trained(near)
    weights, moments = model.gather_state()
    model.load_state(weights, {name: torch.zeros_like(values) for name, values in moments.items()})
    plain = toy.Toy()
    plain.load_state_dict(weights, strict=False)    # the head is tied, and has one name in the engine
    new = toy.adamw(plain.parameters(), lr=toy.LR, weight_decay=toy.WEIGHT_DECAY)
    losses = toy.losses_of_both(plain, new, model, optimizer, lambda model, step: model(*toy.batch(STEPS + step)), STEPS)
    for expected, loss in losses:
        assert loss == expected


def test_torchs_distributed_checkpoints_make_no_step() -> None:
    """They call step() of an optimizer without states, to make it have some."""
    model, optimizer = trained("min")
    assert get_optimizer_state_dict(model, optimizer)["state"] == {}
    assert set(optimizer.steps.values()) == {STEPS}
