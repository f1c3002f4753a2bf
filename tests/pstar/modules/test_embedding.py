"""Embeddings that are computed far: the same numbers, less near, and a tied table stays in its chunk."""

from __future__ import annotations

import pytest
import torch

import pstar
from tests import toy

BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize("keys", [{}, BF16, BF16 | {"gradient_accumulation_steps": 2}], ids=["fp32", "bf16", "accumulation"])
def test_far_embeddings_change_no_bit(keys: dict) -> None:
    runs = []
    micros = keys.get("gradient_accumulation_steps", 1)
    for far in (False, True):
        model, optimizer = toy.build(toy.Untied, use_cpu_embedding=far, **keys)
        losses = toy.train(model, optimizer, 5, num_micros=micros)
        runs.append((losses, model.gather_state()[0], model.near.peak_bytes))
        assert ("tokens.weight" in model.layout.slots) is not far
    (losses, state, near), (far_losses, far_state, far_near) = runs
    assert losses == far_losses
    assert state.keys() == far_state.keys() and all(torch.equal(state[name], far_state[name]) for name in state)
    assert far_near < near, "the largest table is not near any more"


class TwoLookups(toy.Untied):
    """Uses one table twice in a forward."""

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs, targets) + 0.3 * super().forward(targets, inputs)


@pytest.mark.parametrize("bits", ["bf16", "fp16"])
def test_two_gradients_of_a_far_table_are_summed_as_those_of_a_chunk(bits: str) -> None:
    keys = {bits: {"enabled": True}, "gradient_accumulation_steps": 3}
    runs = []
    for far in (False, True):
        model, optimizer = toy.build(TwoLookups, use_cpu_embedding=far, **keys)
        runs.append((toy.train(model, optimizer, 4, num_micros=3), model.gather_state()[0]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(value, runs[1][1][name]) for name, value in runs[0][1].items())


def test_a_plan_leaves_far_embeddings_out_of_the_chunks() -> None:
    far, near = (pstar.plan_engine(toy.Untied, {"use_cpu_embedding": value}) for value in (True, False))
    assert near.layout.num_params - far.layout.num_params == (toy.VOCAB + toy.LENGTH) * toy.WIDTH


def test_a_table_that_is_the_head_too_stays_near() -> None:
    with pytest.warns(UserWarning, match="use_cpu_embedding: every embedding of this model shares its table"):
        model, optimizer = toy.build(toy.Toy, use_cpu_embedding=True)
    assert "embed.weight" in model.layout.slots
    assert toy.train(model, optimizer, 2) == toy.train(*toy.build(toy.Toy), 2)
