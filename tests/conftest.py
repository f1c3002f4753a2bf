"""Fixtures that all tests share."""

from __future__ import annotations

import gc
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

# Each rank does the same. Two threads would add a matrix product in another order, but tests compare references from this
# process with results of ranks bit for bit.
torch.set_num_threads(1)

# The same examples in every run, and no time limit for an example: the default 0.2 s are too short on a busy machine.
settings.register_profile("tests", derandomize=True, deadline=None, database=None)
settings.load_profile("tests")

# The tests are for a CPU, also where there is a GPU. Those that need one have the mark `gpu`, and a run of their own.
if os.environ.get("TESTS_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""

# Unbuffered, Python writes a line and its newline separately, and another process's output can come between them.
os.environ.pop("PYTHONUNBUFFERED", None)

# Where CI is set, pytest writes out the whole difference of two values. For long lists that takes an hour and more.
if "CI" in os.environ:
    os.environ[tally.STRICT_VARIABLE] = os.environ.pop("CI")
os.environ.pop("BUILD_NUMBER", None)

# A job that a script starts in the background (&) ignores Ctrl-C. Processes that tests interrupt would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_configure = tally.pytest_configure


@pytest.hookimpl(tryfirst=True)  # before pytest deselects tests by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests that only `--all` runs, and sorts the files."""
    cover.mark_deep(items)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and TESTS_GPU=1: bash benchmarks/gpu/run.sh --only tests"))
    workers.sort(items)


def pytest_collection_finish() -> None:
    """Keeps modules and collected tests out of garbage collections, each of which would visit them for half a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seeds every test, and the fixtures that it is the first to request, so that earlier tests do not matter."""
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Puts the caches of tokens and of torch.compile into folders of the session. Runs before the first rank: ranks copy
    the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPT2_CHINESE_CACHE", str(tmp_path_factory.mktemp("tokens")))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else torch.compile starts a pool of processes
        if os.environ.get(tally.WHOLE_VARIABLE) == "quick":
            # No vector instructions in kernels: for each kind torch compiles a program to see whether the compiler knows it.
            patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
        yield


@pytest.fixture(scope="session")
def ranks(_own_cache: None) -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n).run(case, *args)` runs a case on n gloo ranks that live as long as the session (see tests/harness)."""
    pools: dict[int, RankPool] = {}
    yield lambda num_ranks: pools.setdefault(num_ranks, RankPool(num_ranks))
    for pool in pools.values():
        pool.close()
