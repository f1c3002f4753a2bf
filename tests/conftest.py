"""Fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.harness import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n).run(case, *args)` runs a case on n gloo ranks that live as long as the session (see tests/harness)."""
    pools: dict[int, RankPool] = {}
    yield lambda num_ranks: pools.setdefault(num_ranks, RankPool(num_ranks))
    for pool in pools.values():
        pool.close()
