"""Fixtures that all tests share."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from tests import cover, tally, workers
from tests.harness import RankPool
from tests.workers import pytest_xdist_make_scheduler  # noqa: F401  (a hook of pytest-xdist)

# As each rank does: a matrix product shared by two threads adds in another order, and a reference computed in this process
# is compared bit for bit with what ranks computed.
torch.set_num_threads(1)

# The same examples at every run, and no limit of time for one of them: 0.2 s are little on a busy machine.
settings.register_profile("tests", derandomize=True, deadline=None, database=None)
settings.load_profile("tests")

# Unbuffered, Python writes a line and its end apart, and between them comes what another process says.
os.environ.pop("PYTHONUNBUFFERED", None)

# What a script starts in the background (&) ignores Ctrl-C, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_configure = tally.pytest_configure


@pytest.hookimpl(tryfirst=True)  # before pytest drops what -m leaves out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what only `--all` runs, and puts the files in order."""
    cover.mark_deep(items)
    workers.sort(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Each test, and each fixture that it is the first to ask for, draws the same numbers whatever ran before."""
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Token caches go to a folder of the session. Here, before the first rank: ranks keep the environment of that moment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPT2_CHINESE_CACHE", str(tmp_path_factory.mktemp("tokens")))
        yield


@pytest.fixture(scope="session")
def ranks(_own_cache: None) -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n).run(case, *args)` runs a case on n gloo ranks that live as long as the session (see tests/harness)."""
    pools: dict[int, RankPool] = {}
    yield lambda num_ranks: pools.setdefault(num_ranks, RankPool(num_ranks))
    for pool in pools.values():
        pool.close()
