"""A copy queue runs copies one after the other, on a background thread or at once. It does not know what is copied.

One direction of a link moves one copy at a time, so one worker for it suffices. Copies run in the order in which they were
submitted; a copy that needs the end of one in another queue waits for its handle. A copy must release the GIL while
it moves bytes (torch's copy_, os.preadv and os.pwritev do), else it does not overlap with computation.

In a queue *by need* a copy is submitted with the copies that must end before it, and with the time at which its bytes are
needed. Of those that may begin, the worker runs the most urgent one (Jayarajan et al., MLSys 2019, P3: backward computes the
gradient of the first layer last, but the next forward needs this layer first). No worker waits inside a copy, and a copy
follows only copies that were submitted earlier, so the earliest one that has not ended may always run.

On a GPU a job only issues its copy to a stream, and returns it as a DeviceCopy. The copy ends when the device says so.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from pstar.errors import StateError
from pstar.memory.device_stream import DeviceCopy

Job = Callable[[], object]
"""Copies, or issues a copy to a stream and returns it as a DeviceCopy."""

EXIT_WAIT_S = 60.0
"""How long the exit of a process waits for the copy under way."""

ENDED = (0, None)
"""Tells a worker that a copy has ended for which one of its own waits."""


class Handle:
    """A copy that was submitted."""

    def __init__(self, copy_queue: CopyQueue, job: Job, before: Sequence[Handle] = (), needed: float = 0.0):
        self._copy_queue = copy_queue    # keeps the queue alive: a collected queue would drop this copy
        self._job: Job | None = job
        self._freed_by: int | None = None    # the thread that has run the job and drops it
        self._before = list(before)
        self._needed, self._wanted = needed, False
        self._heard: Handle | None = None           # the copy that tells this one's worker when it ends
        self._listeners: list[queue.SimpleQueue] = []    # workers to tell when this copy ends
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

    def follows(self, other: Handle) -> bool:
        """Whether this copy has not begun and cannot begin before the other one has ended."""
        return other is not self and other in self._with_all_before()

    def _with_all_before(self) -> list[Handle]:
        """This copy and all that must end before it and have not ended; without recursion, whose depth Python limits."""
        found = {self}
        handles = [self]
        for handle in handles:
            new = {*handle._before} - found
            found |= new
            handles += new
        return handles

    def may_begin(self, jobs: queue.SimpleQueue) -> bool:
        """Whether all copies before this one have ended. If not, `jobs` gets ENDED when the state may have changed."""
        while self._before and self._before[-1].issued:
            self._before.pop()
        if self._before and self._heard is not self._before[-1]:
            self._heard = self._before[-1]
            self._heard._listeners.append(jobs)
            if self._heard.issued:    # perhaps it ended before it knew this listener
                jobs.put(ENDED)
        return not self._before

    @property
    def urgency(self) -> tuple[bool, float]:
        """The smallest one runs first: somebody waits for it, or its bytes are needed soonest."""
        return not self._wanted, self._needed

    def _want(self) -> None:
        """Somebody waits for this copy: it comes first, behind those that must end before it."""
        if not self._wanted:
            for each in self._with_all_before():
                each._wanted = True

    def _raise_error(self) -> None:
        self._told = True
        if self._error is not None:
            raise self._error

    def _wait_for_job(self) -> None:
        if not self.issued:
            if self._freed_by == threading.get_ident():    # a tier that this job kept alive to the last: its job is over
                return
            if self._copy_queue.pid != os.getpid():
                raise StateError(f"copy queue {self._copy_queue.name}: this process was forked while its parent copied")
            if self._copy_queue.by_need:
                self._want()
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
            self._freed_by = threading.get_ident()
            self._job = None

    def _end(self, error: BaseException | None) -> None:
        self._job, self._error, self._heard = None, error, None
        self._before.clear()    # else each handle would keep all earlier ones
        self._job_ended.set()
        for jobs in self._listeners:
            jobs.put(ENDED)
        self._listeners.clear()

    @property
    def _owes_error(self) -> bool:
        return self.done and self._error is not None and not self._told


class CopyQueue:
    """One worker that runs copies in the order in which they were submitted, or by urgency.

    Args:
        name: for messages and the thread's name.
        asynchronous: False runs each copy at once, in submit.
        bytes_per_s: simulates a link of this speed: a copy takes at least num_bytes / bytes_per_s seconds. None: no limit.
        by_need: of the copies that may begin, the most urgent one runs; else they run in the order of their submission.

    Submit from one thread at a time. That is the program's thread; in backward of operations on a GPU it is autograd's
    thread for that device, while the program's thread is in backward() and runs only operations on the CPU, which use no
    chunk (torch/csrc/autograd/engine.cpp).

    The first submission starts the background thread. When the process exits, the thread finishes the copy under way and
    drops the queued ones. A forked child has no threads: make queues after the fork. A queue that was made before it raises
    StateError in the child.
    """

    def __init__(self, name: str, asynchronous: bool = True, bytes_per_s: float | None = None, by_need: bool = False):
        self.name, self.asynchronous, self.by_need, self.pid = name, asynchronous, by_need, os.getpid()
        self._worker = _Worker(bytes_per_s, by_need)
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
        """Whether all jobs have ended, in a queue that runs them in the order of their submission."""
        return not self._open or self._open[-1].issued

    def submit(self, job: Job, num_bytes: int = 0, at_once: bool = False, before: Sequence[Handle] = (),
               needed: float = 0.0) -> Handle:
        """Runs job after all earlier ones, or by urgency; at_once: on this thread, for a queue that is idle. Its error is
        kept for wait or drain, even if the job runs at once.

        before: the copies for which the job waits, of this queue and others; a queue by need begins it when they have ended.
        needed: when its bytes are needed; a smaller number is more urgent.
        """
        if not self._stop.alive or self.pid != os.getpid():
            reason = "it was made before a fork, make queues after it" if self._stop.alive else "it is closed"
            raise StateError(f"copy queue {self.name} takes no more copies: {reason}")
        handle = Handle(self, job, before if self.by_need else (), needed)
        del job    # only the handle keeps it now, and drops it when it has run
        while self._open and self._open[0].done and not self._open[0]._owes_error:
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

    def __init__(self, bytes_per_s: float | None, by_need: bool):
        self.bytes_per_s, self.by_need = bytes_per_s, by_need
        self.busy_s = 0.0
        self.jobs: queue.SimpleQueue[tuple[int, Handle | None] | None] = queue.SimpleQueue()
        self.waiting: list[tuple[int, Handle]] = []    # received from `jobs`; used under the lock
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
            if threading.current_thread() is not self.thread:    # which waits for the None, or has dropped all
                self._drop()
            self.copying.release()

    def work(self) -> None:
        """Runs the jobs. Jobs and their tensors are freed under the lock: stop must wait for that C++ code as well."""
        goes_on = True
        while goes_on:
            item = self.jobs.get()
            with self.copying:
                goes_on = self._take(item)
                item = None
                while goes_on and self._run_next():
                    goes_on = self.jobs.empty() or self._take(self.jobs.get())

    def _take(self, item: tuple[int, Handle | None] | None) -> bool:
        """Takes an item and all those behind it in the queue. Returns False, and drops all jobs, after the None of stop."""
        while item is not None:
            if item is not ENDED:
                self.waiting.append(item)
            if self.jobs.empty():
                return True
            item = self.jobs.get()
        self._drop()
        return False

    def _run_next(self) -> bool:
        """Runs a job that may begin: the most urgent one or, without by_need and of equal ones, the first. Returns whether
        there was one."""
        ready = [] if self.stopping.is_set() else [item for item in self.waiting if item[1].may_begin(self.jobs)]
        if not ready:
            return False
        item = min(ready, key=lambda item: item[1].urgency) if self.by_need else ready[0]
        self.waiting.remove(item)
        ready.clear()
        self.run(*item)
        return True

    def _drop(self) -> None:
        for _, handle in self.waiting:
            handle._end(StateError("the process ends: this copy was dropped"))
        self.waiting.clear()

    def run(self, num_bytes: int, handle: Handle) -> None:
        begin = time.perf_counter()
        error = handle._run()
        end = begin + num_bytes / self.bytes_per_s if self.bytes_per_s else begin
        while (left := end - time.perf_counter()) > 0 and not self.stopping.is_set():
            self.stopping.wait(left)
        if handle._on_device is None:
            self.busy_s += time.perf_counter() - begin
        handle._end(error)
