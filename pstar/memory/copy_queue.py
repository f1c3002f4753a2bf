"""A mover carries copies out one after the other, on a thread of its own or at once. Does not know what is copied.

A link between two tiers moves one thing at a time, so one worker a link suffices, and the order of the submissions is the
order of the copies: who submits a write and then a read of the same place reads what was written. Copies must give the
interpreter's lock back while they move bytes (torch's copy_ does, and os.preadv and os.pwritev), else nothing is gained.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable

from pstar.errors import StateError

EXIT_WAIT_S = 60.0
"""How long the exit of a process waits for the copy that is under way."""


class Handle:
    """A copy that was submitted."""

    def __init__(self, mover: Mover, job: Callable[[], None]):
        self._mover = mover                  # which must not be collected while somebody may wait
        self._job: Callable[[], None] | None = job
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._told = False

    @property
    def done(self) -> bool:
        """Whether the copy has ended, well or badly."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Returns when the copy is done; raises what it raised, every time. Inside a copy
        only for one that was submitted before it: else the two may wait for each other.

        Raises StateError for a copy that will not be done: it was dropped at the exit of the process, or this process is a
        fork of the one in which it is under way.
        """
        self._wait_for_end()
        self._told = True
        if self._error is not None:
            raise self._error

    def _wait_for_end(self) -> None:
        if not self.done and self._mover.pid != os.getpid():
            raise StateError(f"mover {self._mover.name}: this process was forked while the copy was under way elsewhere")
        self._ended.wait()

    def _run(self) -> BaseException | None:
        """Carries it out and lets go of its tensors, before anybody hears that it has ended. What it raised."""
        try:
            self._job()
        except BaseException as error:
            return error
        finally:
            self._job = None

    def _end(self, error: BaseException | None) -> None:
        self._job, self._error = None, error
        self._ended.set()

    @property
    def _owes_error(self) -> bool:
        return self.done and self._error is not None and not self._told


class Mover:
    """One worker that runs copies in the order in which they were submitted.

    Args:
        name: for messages and the thread's name.
        asynchronous: False runs each copy at once, in submit.
        bytes_per_s: simulates a link of this speed: a copy takes at least num_bytes / bytes_per_s. None: as fast as it goes.

    Submit from one thread only. The thread starts with the first submission. At the exit of the process it ends the copy
    under way, and what was still waiting is dropped. A fork takes no threads along: make movers after it; one that was made
    before raises StateError in the child.
    """

    def __init__(self, name: str, asynchronous: bool = True, bytes_per_s: float | None = None):
        self.name, self.asynchronous, self.pid = name, asynchronous, os.getpid()
        self._worker = _Worker(bytes_per_s)
        self._open: list[Handle] = []        # those under way, and those whose error nobody has heard of
        # Runs at the exit of the process or when the mover is collected, whichever comes first.
        self._stop = weakref.finalize(self, self._worker.stop)

    @property
    def busy_s(self) -> float:
        """Seconds in which it was copying, what a simulated link takes included."""
        return self._worker.busy_s

    def submit(self, job: Callable[[], None], num_bytes: int = 0) -> Handle:
        """Runs job after all those before it. What it raises is kept for wait or drain, also where it runs at once."""
        if not self._stop.alive or self.pid != os.getpid():
            reason = "it was made before a fork, make movers after it" if self._stop.alive else "it is closed"
            raise StateError(f"mover {self.name} takes no more copies: {reason}")
        handle = Handle(self, job)
        del job    # the handle's, which drops it when it is done
        self._open = [each for each in self._open if not each.done or each._owes_error] + [handle]
        if self.asynchronous:
            self._worker.start(f"pstar mover {self.name}")
            self._worker.jobs.put((num_bytes, handle))
        else:
            self._worker.run(num_bytes, handle)
            if not isinstance(handle._error, Exception | None):    # Ctrl-C is the user's, not the copy's
                handle.wait()
        return handle

    def drain(self) -> None:
        """Waits for all copies; then raises the first error that no wait has raised yet, so that none is lost."""
        for handle in self._open:
            handle._wait_for_end()
        ended, self._open = self._open, []
        errors = [handle for handle in ended if handle._owes_error]
        for handle in errors:
            handle._told = True
        if errors:
            raise errors[0]._error

    def close(self) -> None:
        """Waits for all copies and ends the thread; raises nothing that a copy raised. A second time: nothing."""
        if self.pid == os.getpid():
            for handle in self._open:
                handle._wait_for_end()
            self._stop()
            if self._worker.thread is not None:
                self._worker.thread.join()
        self._open = []


class _Worker:
    """The thread and what it works on. Knows no Mover, so that one that nobody holds can be collected."""

    def __init__(self, bytes_per_s: float | None):
        self.bytes_per_s = bytes_per_s
        self.busy_s = 0.0
        self.jobs: queue.SimpleQueue[tuple[int, Handle] | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.copying = threading.RLock()    # the garbage collector may call stop on the very thread that copies
        self.stopping = threading.Event()

    def start(self, name: str) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self.work, name=name, daemon=True)
            self.thread.start()

    def stop(self) -> None:
        """Ends the thread after the copy under way; drops the others. (A daemon thread that is in the middle of a copy when
        the interpreter goes away may take the process down with it, in C++ code that it must not be stopped in.)"""
        self.stopping.set()
        self.jobs.put(None)
        if self.copying.acquire(timeout=EXIT_WAIT_S):    # not a join: this may be called by the garbage collector, anywhere
            self.copying.release()

    def work(self) -> None:
        """An item and its tensors end under the lock: freeing memory is C++ code too, so stop must wait for that as well."""
        item = self.jobs.get()
        while item is not None:
            with self.copying:
                if not self.stopping.is_set():
                    self.run(*item)
                    item = None
                while self.stopping.is_set():    # and None is the last that was put
                    if item is not None:
                        item[1]._end(StateError("the process ends: this copy was dropped"))
                    if (item := self.jobs.get()) is None:
                        return
            item = self.jobs.get()

    def run(self, num_bytes: int, handle: Handle) -> None:
        begin = time.perf_counter()
        error = handle._run()
        end = begin + num_bytes / self.bytes_per_s if self.bytes_per_s else begin
        while (left := end - time.perf_counter()) > 0 and not self.stopping.is_set():
            self.stopping.wait(left)
        self.busy_s += time.perf_counter() - begin
        handle._end(error)
