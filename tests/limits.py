"""Limits of time, which only end a hanging test and are so long that a busy machine does not reach them; peaks of memory."""

from __future__ import annotations

import signal
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

HANGS_S = 600.0  # limit for a program, for a process that a test waits for, or for a condition


@contextmanager
def limited(seconds: float, error: BaseException) -> Iterator[None]:
    """Raises `error` in a block of this process that has not ended after `seconds`."""

    def end(*_: object) -> None:
        raise error

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def wait_until(
    true: Callable[[], object], what: Callable[[], str] | str, alive: Callable[[], object] = lambda: True
) -> None:
    """Returns as soon as true() is true. Fails if alive() is false before that, or after HANGS_S.

    Args:
        what: a description of the condition.
        alive: whether the condition can still become true, e.g. whether the process is running.
    """
    __tracebackhide__ = True
    end = time.monotonic() + HANGS_S
    while True:
        can_come = alive()  # before true(): the last action of a process counts
        if true():
            return
        assert can_come, f"{_words(what)}: the process that was to do it has ended"
        assert time.monotonic() < end, f"{_words(what)}: not after {HANGS_S:g} s"
        time.sleep(0.02)


def _words(what: Callable[[], str] | str) -> str:
    return what if isinstance(what, str) else what()


def timeout_s(group: Any) -> float:
    """Seconds that a call of a gloo group waits for the other ranks."""
    import torch  # not at the top: programs without torch have limits too

    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that Python allocates while `run` runs: the least of three runs, because other threads only add."""
    peaks = []
    for _ in range(3):
        tracemalloc.start()
        try:
            run()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    return min(peaks)
