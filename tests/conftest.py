"""Fixtures that all tests share."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from tests import cover, tally, workers
from tests.harness import RankPool
from tests.workers import pytest_xdist_make_scheduler  # noqa: F401  (a hook of pytest-xdist)

# As each rank does: a matrix product shared by two threads adds in another order, and a reference computed in this process
# is compared bit for bit with what ranks computed.
torch.set_num_threads(1)

# What a script starts in the background (&) ignores Ctrl-C, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_configure = tally.pytest_configure


@pytest.hookimpl(tryfirst=True)  # before pytest drops what -m leaves out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what only `--all` runs, and puts the files in order."""
    cover.mark_deep(items)
    workers.sort(items)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n).run(case, *args)` runs a case on n gloo ranks that live as long as the session (see tests/harness)."""
    pools: dict[int, RankPool] = {}
    yield lambda num_ranks: pools.setdefault(num_ranks, RankPool(num_ranks))
    for pool in pools.values():
        pool.close()
