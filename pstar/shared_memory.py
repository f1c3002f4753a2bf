"""Collectives between processes of one host through shared memory. Knows no process group, only ranks and a file.

Loopback costs two trips through the kernel's network for every byte (some 0.6 GB/s with gloo); shared memory costs one
copy in and one copy out. Data pass through a staging area in slices:

    half 0 | slice of rank 0 | slice of rank 1 | ...      a rank writes its slice of one half, says so in its counter,
    half 1 | slice of rank 0 | slice of rank 1 | ...      waits for all counters, and reads what the others wrote

The halves alternate: nobody overwrites a half before every rank has entered the exchange after it, that is, has read it.
Sums are taken in the order of ranks, so that every run gives the same bits.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time

import torch

from pstar.errors import StateError

SLICE_BYTES = 4 * 2**20
COUNTER_BYTES = 64    # a cache line each, so that ranks do not wait for each other's writes
WAIT_S = 600.0


def available() -> bool:
    """Whether this machine can: it has /dev/shm, and its processors keep the order of writes (data, then counter)."""
    return os.path.isdir("/dev/shm") and platform.machine() in ("x86_64", "AMD64")


def make_file(num_ranks: int) -> str | None:
    """A file for num_ranks ranks, its bytes reserved; None where /dev/shm has no room for it."""
    try:
        handle, path = tempfile.mkstemp(prefix="pstar_", dir="/dev/shm")
    except OSError:
        return None
    try:
        # What does not fit is known now, not by a SIGBUS later.
        os.posix_fallocate(handle, 0, num_ranks * (COUNTER_BYTES + 2 * SLICE_BYTES))
    except OSError:
        os.unlink(path)
        return None
    finally:
        os.close(handle)
    return path


class SharedMemory:
    """The staging area of p ranks in one file of /dev/shm.

    Args:
        path: from make_file on one rank, which unlinks it when all have opened it: nothing is left behind.
        rank, num_ranks: which of how many.
    """

    def __init__(self, path: str, rank: int, num_ranks: int):
        self.rank, self.num_ranks = rank, num_ranks
        head = COUNTER_BYTES * num_ranks
        data = torch.from_file(path, shared=True, size=head + 2 * num_ranks * SLICE_BYTES, dtype=torch.uint8)
        self._counters = data[:head].view(torch.int64).view(num_ranks, -1)[:, 0]
        self._halves = data[head:].view(2, num_ranks, SLICE_BYTES)
        self._count = 0

    def all_gather(self, flat: torch.Tensor) -> None:
        """In place: flat, (p * S,), holds this rank's piece at its position and afterwards everyone's."""
        pieces = flat.view(self.num_ranks, -1)
        step = SLICE_BYTES // flat.itemsize
        for start in range(0, pieces.shape[1], step):
            part = pieces[:, start : start + step]
            staged = self._stage(part.shape[1], flat.dtype)
            staged[self.rank].copy_(part[self.rank])
            self._meet()
            for other in range(self.num_ranks):
                if other != self.rank:
                    part[other].copy_(staged[other])

    def reduce_scatter_mean(self, piece: torch.Tensor, flat: torch.Tensor) -> None:
        """piece, (S,), becomes this rank's part of the mean of flat, (p * S,): divided first, then summed in fp32."""
        pieces = flat.view(self.num_ranks, -1)
        step = SLICE_BYTES // (flat.itemsize * self.num_ranks)
        for start in range(0, pieces.shape[1], step):
            part = pieces[:, start : start + step]
            staged = self._stage(part.numel(), flat.dtype).view(self.num_ranks, self.num_ranks, -1)   # (writer, owner, n)
            torch.div(part, self.num_ranks, out=staged[self.rank])
            self._meet()
            total = staged[0, self.rank].to(torch.promote_types(flat.dtype, torch.float32), copy=True)
            for other in range(1, self.num_ranks):
                total += staged[other, self.rank]
            piece[start : start + step].copy_(total)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of values, (N,) with N at most SLICE_BYTES of them, over the ranks, in rank order."""
        staged = self._stage(values.numel(), values.dtype)
        staged[self.rank].copy_(values.reshape(-1))
        self._meet()
        total = staged[0].clone()
        for other in range(1, self.num_ranks):
            total += staged[other]
        return total.view(values.shape)

    def _stage(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The half for the next exchange, (p, numel): one row a rank."""
        return self._halves[self._count % 2].view(dtype)[:, :numel]

    def _meet(self) -> None:
        """Says that this rank's slice is written, and waits for all the others'."""
        self._count += 1
        self._counters[self.rank] = self._count
        deadline = time.monotonic() + WAIT_S
        while int(self._counters.min()) < self._count:
            os.sched_yield()
            if time.monotonic() > deadline:
                late = [rank for rank in range(self.num_ranks) if int(self._counters[rank]) < self._count]
                raise StateError(f"rank {self.rank} waited {WAIT_S:.0f} s in collective {self._count} for ranks {late}: "
                                 "they hang, died, or made other collective calls")
