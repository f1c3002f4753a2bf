"""A copy queue runs copies one after the other, on a background thread or at once. It does not know what is copied.

One direction of a link moves one copy at a time, so one worker for it suffices. Copies run in the order in which they were
submitted; a copy that needs the end of one in another queue waits for its handle. A copy must release the GIL while
it moves bytes (torch's copy_, os.preadv and os.pwritev do), else it does not overlap with computation.

On a GPU a job only issues its copy to a stream, and returns it as a DeviceCopy. The copy ends when the device says so.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from pstar.errors import StateError
from pstar.memory.device_stream import DeviceCopy

Job = Callable[[], object]
"""Copies, or issues a copy to a stream and returns it as a DeviceCopy."""

EXIT_WAIT_S = 60.0
"""How long the exit of a process waits for the copy under way."""


class Handle:
    """A copy that was submitted."""

    def __init__(self, copy_queue: CopyQueue, job: Job):
        self._copy_queue = copy_queue    # keeps the queue alive: a collected queue would drop this copy
        self._job: Job | None = job
        self._job_ended = threading.Event()
        self._on_device: DeviceCopy | None = None
        self._error: BaseException | None = None
        self._told = False

    @property
    def issued(self) -> bool:
        """Whether the job has ended: on a GPU the copy may not have begun."""
        return self._job_ended.is_set()

    @property
    def done(self) -> bool:
        """Whether the copy has ended, with or without an error."""
        return self.issued and (self._on_device is None or self._on_device.done)

    def wait(self) -> None:
        """Returns when the copy is done; raises its error, on every call. A copy may itself wait only for copies that were
        submitted before it: else the two may wait for each other.

        Raises StateError for a copy that will never be done: it was dropped at the exit of the process, or this process is
        a fork of the one that carries it out.
        """
        self._wait_for_end()
        self._raise_error()

    def order(self) -> None:
        """Lets work that is queued on the current stream from now on run after the copy; waits only until it is issued. A
        copy without a device is waited for. Raises as `wait` does."""
        self._wait_for_job()
        if self._on_device is not None:
            self._on_device.order()
        self._raise_error()

    def _raise_error(self) -> None:
        self._told = True
        if self._error is not None:
            raise self._error

    def _wait_for_job(self) -> None:
        if not self.issued and self._copy_queue.pid != os.getpid():
            raise StateError(f"copy queue {self._copy_queue.name}: this process was forked while its parent copied")
        self._job_ended.wait()

    def _wait_for_end(self) -> None:
        self._wait_for_job()
        if self._on_device is not None:
            self._on_device.wait()

    def _run(self) -> BaseException | None:
        """Runs the job and drops its tensors, before any wait returns. Returns the job's error or None."""
        try:
            result = self._job()
            self._on_device = result if isinstance(result, DeviceCopy) else None
        except BaseException as error:
            return error
        finally:
            self._job = None

    def _end(self, error: BaseException | None) -> None:
        self._job, self._error = None, error
        self._job_ended.set()

    @property
    def _owes_error(self) -> bool:
        return self.done and self._error is not None and not self._told


class CopyQueue:
    """One worker that runs copies in the order in which they were submitted.

    Args:
        name: for messages and the thread's name.
        asynchronous: False runs each copy at once, in submit.
        bytes_per_s: simulates a link of this speed: a copy takes at least num_bytes / bytes_per_s seconds. None: no limit.

    Submit from one thread at a time. That is the program's thread; in backward of operations on a GPU it is autograd's
    thread for that device, while the program's thread is in backward() and runs only operations on the CPU, which use no
    chunk (torch/csrc/autograd/engine.cpp).

    The first submission starts the background thread. When the process exits, the thread finishes the copy under way and
    drops the queued ones. A forked child has no threads: make queues after the fork. A queue that was made before it raises
    StateError in the child.
    """

    def __init__(self, name: str, asynchronous: bool = True, bytes_per_s: float | None = None):
        self.name, self.asynchronous, self.pid = name, asynchronous, os.getpid()
        self._worker = _Worker(bytes_per_s)
        self._open: deque[Handle] = deque()    # copies under way, and copies whose error was not raised yet
        # Runs at the exit of the process or when the queue is collected, whichever comes first.
        self._stop = weakref.finalize(self, self._worker.stop)

    @property
    def busy_s(self) -> float:
        """Seconds spent copying, including the waits of a simulated link."""
        return self._worker.busy_s

    def add_busy(self, seconds: float) -> None:
        """Counts the seconds of a copy on a device, which its job does not know."""
        self._worker.busy_s += seconds

    @property
    def idle(self) -> bool:
        """Whether all jobs have ended."""
        return not self._open or self._open[-1].issued

    def submit(self, job: Job, num_bytes: int = 0, at_once: bool = False) -> Handle:
        """Runs job after all earlier ones; at_once: on this thread, for a queue that is idle. Its error is kept for wait or
        drain, even if the job runs at once."""
        if not self._stop.alive or self.pid != os.getpid():
            reason = "it was made before a fork, make queues after it" if self._stop.alive else "it is closed"
            raise StateError(f"copy queue {self.name} takes no more copies: {reason}")
        handle = Handle(self, job)
        del job    # only the handle keeps it now, and drops it when it has run
        while self._open and self._open[0].done and not self._open[0]._owes_error:    # they end in their order
            self._open.popleft()
        self._open.append(handle)
        if self.asynchronous and not at_once:
            self._worker.start(f"pstar copy queue {self.name}")
            self._worker.jobs.put((num_bytes, handle))
        else:
            self._worker.run(num_bytes, handle)
            if not isinstance(handle._error, Exception | None):    # Ctrl-C is raised at once: it is no error of the copy
                handle.wait()
        return handle

    def drain(self) -> None:
        """Waits for all copies; then raises the first error that no wait has raised yet."""
        for handle in list(self._open):
            handle._wait_for_end()
        ended, self._open = self._open, deque()
        errors = [handle for handle in ended if handle._owes_error]
        for handle in errors:
            handle._told = True
        if errors:
            raise errors[0]._error

    def close(self) -> None:
        """Waits for all copies and ends the thread; does not raise the copies' errors. A second call has no effect."""
        if self.pid == os.getpid():
            for handle in list(self._open):
                handle._wait_for_end()
            self._stop()
            if self._worker.thread is not None:
                self._worker.thread.join()
        self._open.clear()


class _Worker:
    """The thread and its queue. It has no reference to the CopyQueue, so that an unused CopyQueue is garbage-collected."""

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
        """Ends the thread after the copy under way; drops the others. (If the interpreter exits while a daemon thread is
        copying, in C++ code, the process may abort.)"""
        self.stopping.set()
        self.jobs.put(None)
        if self.copying.acquire(timeout=EXIT_WAIT_S):    # not join: the garbage collector may call this on any thread
            self.copying.release()

    def work(self) -> None:
        """Runs the jobs. An item and its tensors are freed under the lock: stop must wait for that C++ code as well."""
        item = self.jobs.get()
        while item is not None:
            with self.copying:
                if not self.stopping.is_set():
                    self.run(*item)
                    item = None
                while self.stopping.is_set():    # drop items up to the None that stop has put
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
        if handle._on_device is None:
            self.busy_s += time.perf_counter() - begin
        handle._end(error)
