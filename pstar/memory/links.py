"""Workers in the background: one for each link between the tiers (into near, out of near, the disk), one for updates."""

import time
from collections.abc import Callable

import numpy as np
import torch

from pstar.memory.copy_queue import Handle, Mover
from pstar.memory.tier import DISK, NEAR


class Movers:
    """Carries out copies between tiers: in the background, or at once.

    A link of two directions moves both at the same time (PCIe does), so each has a worker; a disk has one for both.

    Args:
        asynchronous: copies run beside the computation; False: each one at once.
        bytes_per_s: simulates links between near and far of this speed, each direction for itself.
        device: of near. On a GPU each worker has a stream of its own, on which a copy begins when all that the GPU had been
            given before the copy was submitted is done: what it reads is written by then, and what it overwrites was read.
    """

    def __init__(self, asynchronous: bool = True, bytes_per_s: float | None = None, device: torch.device | None = None):
        self._in = Mover("far to near", asynchronous, bytes_per_s)
        self._out = Mover("near to far", asynchronous, bytes_per_s)
        self._disk = Mover("disk", asynchronous)
        self._update = Mover("update")
        self.asynchronous, self.simulated = asynchronous, bytes_per_s is not None
        self._device = device if device is not None and device.type == "cuda" else None
        self._streams = {mover: torch.cuda.Stream(self._device) for mover in (self._in, self._out)} if self._device else {}

    now = staticmethod(time.perf_counter)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """What a job calls to copy a buffer to one of the same size and dtype.

        In the background and in host memory it keeps to its own thread. torch would share a large copy among a team of
        threads; with a team of its own in a worker, the process has more OpenMP threads than the machine has cores, and from
        then on OpenMP lets the model's threads sleep between any two operators: 1,000 times a step, seen as 7 % of it.
        """
        if self.asynchronous and target.device.type == source.device.type == "cpu":
            np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())    # releases Python's lock
        else:
            target.copy_(source)

    def submit(self, source: str, target: str, job: Callable[[], object], num_bytes: int) -> Handle:
        """Begins a copy of num_bytes between two tiers, after those that were submitted for the same link before."""
        mover = self._disk if DISK in (source, target) else self._in if target == NEAR else self._out
        if mover in self._streams:
            job = self._on_stream(mover, job)
        return mover.submit(job, num_bytes)

    def update(self, job: Callable[[], object]) -> Handle:
        """Begins an update on the host, after those before it."""
        return self._update.submit(job)

    def _on_stream(self, mover: Mover, job: Callable[[], object]) -> Callable[[], None]:
        given = torch.cuda.Event()
        given.record(torch.cuda.current_stream(self._device))

        def on_stream() -> None:
            stream = self._streams[mover]
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                stream.wait_event(given)
                job()
                stream.synchronize()

        return on_stream

    def drain(self) -> None:
        """Waits for all copies; raises the first error that nobody was told of."""
        for mover in (self._in, self._out, self._disk, self._update):
            mover.drain()

    def close(self) -> None:
        """Waits for all copies and ends the workers."""
        for mover in (self._in, self._out, self._disk, self._update):
            mover.close()
