"""What the tests of all chapters share: the curve, ranks that start quickly."""

from __future__ import annotations

import pytest

from tests.chapters.law import curves
from tests.harness.pool import preload

# Each rank would import this anew with its first chapter, which takes seconds.
preload("tests.chapters.inside", "torch.utils.tensorboard", "torch.distributed.run")


@pytest.fixture(scope="session")
def curve(ranks, tmp_path_factory: pytest.TempPathFactory):
    """curve(steps, grad_accum): the rows of chapter 00 in the run that tests/chapters/law.py describes."""
    return curves(ranks, tmp_path_factory.mktemp)
