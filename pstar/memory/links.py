"""The copy queues of an engine: one for each direction of a link (to and from near, to and from disk), one for updates."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from pstar.memory import accelerator
from pstar.memory.copy_queue import CopyQueue, Handle
from pstar.memory.device_stream import CopyStream, DeviceCopy, EventTimes, Record
from pstar.memory.tier import DISK, NEAR


class Links:
    """Carries out copies between tiers: in the background, or at once.

    A link such as PCIe moves bytes in both directions at the same time, and so does a disk: each direction has a worker.

    Args:
        asynchronous: copies overlap with computation; False: each copy is finished in submit.
        bytes_per_s: simulates links of this speed between near and far, each direction separately.
        device: near's device. On a GPU copies to and from near are issued to two streams (device_stream.py) and not waited
            for. The caller issues a copy itself, if no job of the host is before it; else the link's worker does.
        by_need: for updates that begin during backward: updates, and copies between near and far, are made in the order in
            which their results are needed. Else, and on a GPU, in which they were submitted.
    """

    def __init__(self, asynchronous: bool = True, bytes_per_s: float | None = None, device: torch.device | None = None,
                 by_need: bool = False):
        on_device = asynchronous and device is not None and accelerator.is_accelerator(device)
        self.by_need = by_need and asynchronous and not on_device
        self._in = CopyQueue("far to near", asynchronous, bytes_per_s, self.by_need)
        self._out = CopyQueue("near to far", asynchronous, bytes_per_s, self.by_need)
        self._read, self._write = CopyQueue("disk to far", asynchronous), CopyQueue("far to disk", asynchronous)
        self._update = CopyQueue("update", by_need=self.by_need)
        self.asynchronous, self.simulated = asynchronous, bytes_per_s is not None
        self._streams: dict[CopyQueue, CopyStream] = {}
        if on_device:
            self._streams = {queue: CopyStream(device, self.now) for queue in (self._in, self._out)}
            self._waits = EventTimes(device, self.now)
            self._device = device

    now = staticmethod(time.perf_counter)

    @property
    def on_device(self) -> bool:
        """Whether copies to and from near run on streams of a GPU."""
        return bool(self._streams)

    def copy(self, target: torch.Tensor, source: torch.Tensor, then: Callable[[], object] = lambda: None) -> None:
        """Copies a buffer to one of the same size and dtype, then calls `then`, whose kernels run behind the copy; called by
        jobs.

        A background copy in host memory uses one thread. torch would share a large copy among a team of threads. With a
        second team, in a worker, the process has more OpenMP threads than the machine has cores. From then on OpenMP lets
        the model's threads sleep between any two operators: 1,000 times a step, measured as 7 % of it.
        """
        if self.asynchronous and target.device.type == source.device.type == "cpu" and not self._streams:
            np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())    # releases the GIL
        else:
            target.copy_(source, non_blocking=bool(self._streams))
        then()

    def submit(self, source: str, target: str, job: Callable[[], object], num_bytes: int, before: Sequence[Handle] = (),
               record: Record = lambda begin, end: None, needed: float = 0.0) -> Handle:
        """Queues a copy of num_bytes between two tiers, behind the earlier ones of the same link and the copies `before`.

        job: calls `copy`, or reads or writes the disk. record: receives the times at which the copy begins and ends. needed:
        with by_need, when the copied bytes are needed: the smallest number comes first.
        """
        if DISK in (source, target):
            queue = self._read if source == DISK else self._write
        else:
            queue = self._in if target == NEAR else self._out
        if queue in self._streams:
            return self._issue(queue, job, num_bytes, before, record)

        def run() -> None:
            for handle in before:
                handle.wait()
            begin = self.now()
            job()
            record(begin, self.now())

        return queue.submit(run, num_bytes, before=before, needed=needed)

    def _issue(self, queue: CopyQueue, job: Callable[[], object], num_bytes: int, before: Sequence[Handle],
               record: Record) -> Handle:
        stream = self._streams[queue]
        given = stream.given()

        def timed(begin: float, end: float) -> None:
            queue.add_busy(end - begin)
            record(begin, end)

        def run() -> DeviceCopy:
            return stream.issue(given, before, job, timed)

        self.report_times()
        at_once = not self.simulated and queue.idle and all(handle.issued for handle in before)
        return queue.submit(run, num_bytes, at_once)

    def order(self, handles: Sequence[Handle], waited: Callable[[float], None]) -> None:
        """Lets near's later work run after copies. On a GPU its current stream waits, not this thread.

        waited: receives the seconds that the stream has waited, at some later call of this object. Raises a copy's error.
        """
        if not self._streams or all(handle.done for handle in handles):
            for handle in handles:
                handle.order()
            return
        stream = accelerator.current_stream(self._device)
        began, ended = (accelerator.event(self._device, timed=True) for _ in range(2))
        began.record(stream)
        for handle in handles:
            handle.order()
        ended.record(stream)
        self._waits.add(began, ended, lambda begin, end: waited(end - begin))

    def update(self, job: Callable[[], object], before: Sequence[Handle] = (), needed: float = 0.0) -> Handle:
        """Queues an update on the host, behind the earlier ones and the copies `before`, for which the job waits as well."""
        return self._update.submit(job, before=before, needed=needed)

    def report_times(self) -> None:
        """Reports the times of the copies and waits on a GPU that have ended."""
        if self._streams:
            for stream in self._streams.values():
                stream.times.report()
            self._waits.report()

    def drain(self) -> None:
        """Waits for all copies; raises the first error that no wait has raised yet."""
        for queue in (self._in, self._out, self._read, self._write, self._update):
            queue.drain()
        self.report_times()

    def close(self) -> None:
        """Waits for all copies and ends the workers."""
        for queue in (self._in, self._out, self._read, self._write, self._update):
            queue.close()
        self.report_times()
