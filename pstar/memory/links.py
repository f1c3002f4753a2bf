"""The copy queues of an engine: one for each link between tiers (to near, from near, the disk), and one for updates."""

import time
from collections.abc import Callable

import numpy as np
import torch

from pstar.memory import accelerator
from pstar.memory.copy_queue import CopyQueue, Handle
from pstar.memory.tier import DISK, NEAR


class Links:
    """Carries out copies between tiers: in the background, or at once.

    A link such as PCIe moves bytes in both directions at the same time, so each direction has a worker; a disk has one.

    Args:
        asynchronous: copies overlap with computation; False: each copy is finished in submit.
        bytes_per_s: simulates links of this speed between near and far, each direction separately.
        device: near's device. On a GPU the workers to and from near each have a stream. A copy waits for all work that was
            queued on the current stream before it was submitted: its source is written then, and its target no longer read.
            The worker itself waits, for the work and for the copy, so that the profile's times are those of the copy. It
            sleeps meanwhile and leaves its core to the host's Adam.
    """

    def __init__(self, asynchronous: bool = True, bytes_per_s: float | None = None, device: torch.device | None = None):
        self._in = CopyQueue("far to near", asynchronous, bytes_per_s)
        self._out = CopyQueue("near to far", asynchronous, bytes_per_s)
        self._disk = CopyQueue("disk", asynchronous)
        self._update = CopyQueue("update")
        self.asynchronous, self.simulated = asynchronous, bytes_per_s is not None
        self._device = device if accelerator.is_accelerator(device) else None
        self._streams = {queue: accelerator.module_of(self._device).Stream(self._device)
                         for queue in (self._in, self._out)} if self._device else {}

    now = staticmethod(time.perf_counter)

    def copy(self, target: torch.Tensor, source: torch.Tensor, then: Callable[[], object] = lambda: None) -> None:
        """Copies a buffer to one of the same size and dtype, then calls `then`, whose kernels run behind the copy; called by
        jobs.

        A background copy in host memory uses one thread. torch would share a large copy among a team of threads. With a
        second team, in a worker, the process has more OpenMP threads than the machine has cores. From then on OpenMP lets
        the model's threads sleep between any two operators: 1,000 times a step, measured as 7 % of it.
        """
        if self._streams:    # on a worker's stream; without non_blocking torch would wait in a loop, which takes a core
            target.copy_(source, non_blocking=True)
            then()
            copied = accelerator.sleeping_event(self._device)
            copied.record()
            copied.synchronize()
            return
        if self.asynchronous and target.device.type == source.device.type == "cpu":
            np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())    # releases the GIL
        else:
            target.copy_(source)
        then()

    def submit(self, source: str, target: str, job: Callable[[], object], num_bytes: int) -> Handle:
        """Queues a copy of num_bytes between two tiers, behind the earlier ones of the same link."""
        queue = self._disk if DISK in (source, target) else self._in if target == NEAR else self._out
        if queue in self._streams:
            job = self._on_stream(queue, job)
        return queue.submit(job, num_bytes)

    def update(self, job: Callable[[], object]) -> Handle:
        """Queues an update on the host, behind the earlier ones."""
        return self._update.submit(job)

    def _on_stream(self, queue: CopyQueue, job: Callable[[], object]) -> Callable[[], None]:
        given = accelerator.sleeping_event(self._device)
        module = accelerator.module_of(self._device)
        given.record(module.current_stream(self._device))

        def on_stream() -> None:
            given.synchronize()
            with module.device(self._device), module.stream(self._streams[queue]):
                job()

        return on_stream

    def drain(self) -> None:
        """Waits for all copies; raises the first error that no wait has raised yet."""
        for queue in (self._in, self._out, self._disk, self._update):
            queue.drain()

    def close(self) -> None:
        """Waits for all copies and ends the workers."""
        for queue in (self._in, self._out, self._disk, self._update):
            queue.close()
