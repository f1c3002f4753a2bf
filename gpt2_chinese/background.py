"""One piece of work at a time, in a thread that the end of the process waits for: writing a checkpoint during training.

There is one for the whole process, so two saves never write at the same time, whoever asked for them.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable

_thread: threading.Thread | None = None
_errors: list[BaseException] = []


def start(work: Callable[[], object]) -> None:
    """Runs work() in a thread, once the work before it has ended."""
    global _thread
    wait()
    _thread = threading.Thread(target=_run, args=(work,), name="background", daemon=False)
    _thread.start()


def _run(work: Callable[[], object]) -> None:
    try:
        work()
    except BaseException as error:
        _errors.append(error)


def is_running() -> bool:
    """True while work is under way."""
    return _thread is not None and _thread.is_alive()


def wait(limit_s: float | None = None) -> None:
    """Returns when no work is under way, or after the limit; at once inside the work itself."""
    if _thread is not None and _thread is not threading.current_thread():
        _thread.join(limit_s)


def has_failed() -> bool:
    """True if work has ended with an error that `take_error` has not returned yet."""
    return bool(_errors)


def take_error() -> BaseException | None:
    """The error of the work that has ended, once."""
    return _errors.pop() if _errors else None


def end(limit_s: float | None = None) -> None:
    """For the end of a process: waits, and prints an error that nobody has reported."""
    wait(limit_s)
    if error := take_error():
        print(f"error: {error}", file=sys.stderr, flush=True)


atexit.register(end)
