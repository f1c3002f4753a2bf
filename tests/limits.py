"""Limits. They end what hangs and decide nothing else: a busy machine must not meet them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

HANGS_S = 600.0  # of a program, a process that is waited for, or a condition that must come


@contextmanager
def limited(seconds: float, error: BaseException) -> Iterator[None]:
    """Raises error in a block of this process where that has not ended after so many seconds."""

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
    """Returns when true() is; fails where alive() is not before that, or nothing has come after HANGS_S.

    Args:
        what: is waited for, in words.
        alive: whether that can still come, e.g. the process is there.
    """
    __tracebackhide__ = True
    end = time.monotonic() + HANGS_S
    while True:
        can_come = alive()  # asked first: what a process did last counts
        if true():
            return
        assert can_come, f"{_words(what)}: the process that was to do it has ended"
        assert time.monotonic() < end, f"{_words(what)}: not after {HANGS_S:g} s"
        time.sleep(0.02)


def _words(what: Callable[[], str] | str) -> str:
    return what if isinstance(what, str) else what()
