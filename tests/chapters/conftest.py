"""What the tests of all chapters share: token caches of the session's own, the curve, ranks that start quickly."""

from __future__ import annotations

import pytest

from tests.chapters.law import curves
from tests.harness.pool import preload

# Each rank would import this anew with its first chapter, which takes seconds.
preload("tests.chapters.inside", "torch.utils.tensorboard")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPT2_CHINESE_CACHE", str(tmp_path_factory.mktemp("tokens")))
        yield


@pytest.fixture(scope="session")
def curve(ranks, _own_cache, tmp_path_factory: pytest.TempPathFactory):
    """curve(steps, grad_accum): the rows of chapter 00 in the run that tests/chapters/law.py describes."""
    return curves(ranks, tmp_path_factory.mktemp)
