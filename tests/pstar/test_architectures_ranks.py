"""Architectures on two ranks, each with rows of its own: the bits of plain PyTorch with gradients averaged by all-reduce."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests import toy
from tests.pstar.test_architectures import PARTS, train_part
from tests.pstar.test_zoo import STEPS, ZOO, loss_of


def languages(rank: int, num_ranks: int, part: int) -> None:
    train_part(part)


def zoo(rank: int, num_ranks: int, name: str) -> None:
    model_func, inputs = ZOO[name]

    def loss_of_step(model, step: int) -> torch.Tensor:
        return loss_of(model(**inputs(step)))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lazy start")
        for near in ("min", "45%", "auto"):
            toy.compare(model_func, loss_of_step, STEPS, near_budget=near)


@pytest.mark.deep
@pytest.mark.parametrize("part", range(PARTS))
def test_language_models_of_transformers(ranks, part: int) -> None:
    ranks(2).run(languages, part, timeout=240)


@pytest.mark.deep
@pytest.mark.parametrize("name", ZOO)
def test_an_architecture(ranks, name: str) -> None:
    ranks(2).run(zoo, name)
