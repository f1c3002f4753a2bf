"""Collectives between processes of one host through shared memory. Knows no process group, only ranks and a file.

Over loopback every byte passes the kernel's network twice (some 0.6 GB/s with gloo); shared memory costs one copy in and one
copy out. Data pass through a staging area in slices:

    half 0 | slice of rank 0 | slice of rank 1 | ...      a rank writes its slice of one half, increments its counter,
    half 1 | slice of rank 0 | slice of rank 1 | ...      waits for all counters, and reads the slices of the other ranks

The halves alternate: no rank overwrites a half before every rank has entered the next exchange, and so has read it. Sums are
taken in the order of ranks, so every run gives the same bits.

A call begins a collective, and each call of `progress` advances it as far as possible without waiting. So a rank that is
ahead of the others computes instead of waiting for them, and no thread competes with the computation for its core.
Collectives are carried out one after the other, in the order of the calls, the same on all ranks.

Tensors of a GPU (ranks that share one cannot use NCCL) are copied to host memory first, and the result back, on the current
stream. That waits for the GPU.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch

from durable.calls import NUM_CALLS, Call, register
from durable.cores import num_cores
from pstar.errors import LateError, StateError

SLICE_BYTES = 4 * 2**20
COUNTER_BYTES = 64    # one cache line for each counter: no false sharing between ranks
NAP_S = 50e-6
"""Sleep of a waiting rank between two polls, if there are more ranks than cores: another rank can use its core."""


_KINDS = ("", "gather", "reduction", "broadcast", "reduction", "sum")


def available() -> bool:
    """Whether this machine has /dev/shm, and a processor that keeps the order of writes (data, then counter)."""
    return os.path.isdir("/dev/shm") and platform.machine() in ("x86_64", "AMD64")


def make_file(num_ranks: int) -> str | None:
    """Makes a file for num_ranks ranks, its bytes reserved, and returns its path; None if /dev/shm has no room for it."""
    try:
        handle, path = tempfile.mkstemp(prefix="pstar_", dir="/dev/shm")
    except OSError:
        return None
    try:
        # Reserved now: without room, a later write would end the process with SIGBUS.
        os.posix_fallocate(handle, 0, num_ranks * (COUNTER_BYTES + 2 * SLICE_BYTES))
    except OSError:
        os.unlink(path)
        return None
    finally:
        os.close(handle)
    return path


class Exchange:
    """A collective that was begun; `wait` ends it. Its tensors must not be used before that."""

    def __init__(self, memory: SharedMemory, tag: int, steps: Iterator[None]):
        self._memory, self.tag, self.steps = memory, tag, steps
        self.done = False

    def wait(self) -> None:
        """Returns when the result is there. Raises LateError if a rank does not come, StateError if its call is another."""
        self._memory.finish(self)


class SharedMemory:
    """The staging area of p ranks in one file of /dev/shm.

    Args:
        path: from make_file on one rank, which unlinks it when all ranks have opened it: no file remains.
        rank: this rank's place among the members.
        members: the numbers of the p ranks in the job, for the report of a hang.
        timeout: how long this rank waits for the others in a collective.
    """

    def __init__(self, path: str, rank: int, members: Sequence[int], timeout: timedelta):
        self.rank, self.timeout_s = rank, timeout.total_seconds()
        self._members, self._name = tuple(members), f"shared memory {os.path.basename(path)}"
        num_ranks = self.num_ranks
        head = COUNTER_BYTES * num_ranks
        data = torch.from_file(path, shared=True, size=head + 2 * num_ranks * SLICE_BYTES, dtype=torch.uint8)
        cells = data[:head].view(torch.int64).view(num_ranks, -1)
        self._counters = cells[:, 0]
        # Each rank's tags for its even and its odd exchange: a rank may be one exchange ahead of the others.
        self._tags = cells[:, 1:3]
        self._halves = data[head:].view(2, num_ranks, SLICE_BYTES)
        self._naps = num_ranks > num_cores()
        self._count = 0
        self._begun: deque[Exchange] = deque()
        self._last_look, self._waits = 0, False
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=NUM_CALLS)    # (number, tag, seconds since 1970)
        self.subject = -1
        """Number of the next collective's unit, -1 for none; it is part of the tag that ranks compare."""
        self._staged = False    # whether the first begun exchange has written its slice and waits for the others
        register(self)

    @property
    def num_ranks(self) -> int:
        return len(self._members)

    def all_gather(self, flat: torch.Tensor) -> Exchange:
        """In place: flat, (p * S,), holds this rank's piece at its position, and afterwards the pieces of all ranks."""
        def steps(flat: torch.Tensor) -> Iterator[None]:
            yield from self._gather(flat.view(self.num_ranks, -1).unbind(0))

        return self._begin(1, flat.numel(), on_host(steps, flat))

    def all_gather_rows(self, flats: Sequence[Sequence[torch.Tensor]]) -> Exchange:
        """The same for several flats, each of p pieces, (S,), anywhere in host memory."""
        steps = (step for pieces in flats for step in self._gather(pieces))
        return self._begin(1, sum(piece.numel() for pieces in flats for piece in pieces), steps)

    def _gather(self, pieces: Sequence[torch.Tensor]) -> Iterator[None]:
        own = pieces[self.rank]
        step = SLICE_BYTES // own.itemsize
        for start in range(0, own.numel(), step):
            part = own[start : start + step]
            staged = self._stage(part.numel(), own.dtype)
            staged[self.rank].copy_(part)
            yield
            for other in range(self.num_ranks):
                if other != self.rank:
                    pieces[other][start : start + step].copy_(staged[other])

    def reduce_scatter_mean(self, piece: torch.Tensor, flat: torch.Tensor) -> Exchange:
        """piece, (S,), becomes this rank's part of the mean of flat, (p * S,): divided first, then summed in fp32."""
        def steps(piece: torch.Tensor, flat: torch.Tensor) -> Iterator[None]:
            yield from self._reduce_scatter(piece, flat.view(self.num_ranks, -1).unbind(0), self.num_ranks)

        return self._begin(2, flat.numel(), on_host(steps, piece, flat))

    def reduce_scatter_rows(self, targets: torch.Tensor, flats: Sequence[Sequence[torch.Tensor]], divisor: int) -> Exchange:
        """The same for several flats, each of p pieces, (S,), anywhere in host memory.

        Each row of targets, (number of flats, S), becomes the sum of this rank's pieces of a flat, each divided by divisor.
        """
        each = zip(targets, flats, strict=True)
        steps = (step for row, pieces in each for step in self._reduce_scatter(row, pieces, divisor))
        return self._begin(2, sum(piece.numel() for pieces in flats for piece in pieces), steps)

    def _reduce_scatter(self, piece: torch.Tensor, pieces: Sequence[torch.Tensor], divisor: int) -> Iterator[None]:
        ranks = range(self.num_ranks)
        step = SLICE_BYTES // (piece.itemsize * self.num_ranks)
        for start in range(0, piece.numel(), step):
            target = piece[start : start + step]
            part = [each[start : start + step] for each in pieces]
            staged = self._stage(self.num_ranks * target.numel(), piece.dtype).view(*(2 * [self.num_ranks]), -1)
            for owner in ranks:    # staged: (writer, owner, n)
                if owner != self.rank:
                    torch.div(part[owner], divisor, out=staged[self.rank, owner])
            yield
            own = part[self.rank].div_(divisor)
            add_up([own if other == self.rank else staged[other, self.rank] for other in ranks], target)

    def broadcast(self, flat: torch.Tensor, owner: int) -> Exchange:
        """In place: flat, (S,), receives the owner's values."""
        def steps(flat: torch.Tensor) -> Iterator[None]:
            step = SLICE_BYTES // flat.itemsize
            for start in range(0, flat.numel(), step):
                part = flat[start : start + step]
                staged = self._stage(part.numel(), flat.dtype)
                if self.rank == owner:
                    staged[owner].copy_(part)
                yield
                if self.rank != owner:
                    part.copy_(staged[owner])

        return self._begin(3 + 16 * owner, flat.numel(), on_host(steps, flat))

    def reduce_mean(self, flat: torch.Tensor, owner: int, divisor: int | None = None) -> Exchange:
        """In place on the owner: flat, (S,), becomes the mean over the ranks, with the bits of reduce_scatter_mean.

        divisor: of the sum, instead of the number of ranks.
        """
        divisor = divisor or self.num_ranks

        def steps(flat: torch.Tensor) -> Iterator[None]:
            step = SLICE_BYTES // flat.itemsize
            for start in range(0, flat.numel(), step):
                part = flat[start : start + step]
                staged = self._stage(part.numel(), flat.dtype)
                if self.rank != owner:
                    torch.div(part, divisor, out=staged[self.rank])
                yield
                if self.rank == owner:
                    own = part.div_(divisor)
                    add_up([own if other == owner else staged[other] for other in range(self.num_ranks)], part)

        return self._begin(4 + 16 * owner, flat.numel(), on_host(steps, flat))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of values over the ranks, in rank order; waits for it."""
        total = torch.empty_like(values).view(-1)
        self.begin_sum(total, values).wait()
        return total.view(values.shape)

    def begin_sum(self, total: torch.Tensor, values: torch.Tensor) -> Exchange:
        """total, (N,), becomes the sum of values, of N elements, over the ranks, in rank order."""
        def steps(total: torch.Tensor, values: torch.Tensor) -> Iterator[None]:
            step = SLICE_BYTES // values.itemsize
            for start in range(0, values.numel(), step):
                part = values.reshape(-1)[start : start + step]
                staged = self._stage(part.numel(), values.dtype)
                staged[self.rank].copy_(part)
                yield
                target = total[start : start + step].copy_(staged[0])
                for other in range(1, self.num_ranks):
                    target += staged[other]

        return self._begin(5, values.numel(), on_host(steps, total, values))

    # ------------------------------------------------------------- exchanges run in order

    def progress(self) -> None:
        """Advances the begun exchanges as far as possible without waiting."""
        while self._begun:
            first = self._begun[0]
            if self._staged:
                if int(self._counters.min()) < self._count:
                    return
                self._compare_calls(first)
            try:
                next(first.steps)
            except StopIteration:
                first.done, self._staged = True, False
                self._begun.popleft()
                continue
            # This rank's slice is written. The tag comes before the counter: a rank that sees the counter reads the tag.
            self._tags[self.rank, self._count % 2] = first.tag
            self._count += 1
            self._counters[self.rank] = self._count
            self._staged = True

    def finish(self, exchange: Exchange) -> None:
        """Waits until this exchange, and all that were begun before it, are done."""
        with self.watched():
            self._finish(exchange)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While somebody waits for a collective in this memory, a hang is reported."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def _finish(self, exchange: Exchange) -> None:
        deadline = time.monotonic() + self.timeout_s
        self.progress()
        while not exchange.done:
            if self._naps:
                time.sleep(NAP_S)
            else:
                os.sched_yield()
            self.progress()
            if time.monotonic() > deadline:
                raise self.late()

    def late(self) -> LateError:
        """The error of a rank that has waited for the timeout; it names those that have not come."""
        return LateError(f"rank {self._members[self.rank]} waited {self.timeout_s:.0f} s in collective {self._count} for "
                         f"ranks {list(self._missing())}: they hang, died, or made other collective calls")

    def _missing(self) -> tuple[int, ...]:
        """The ranks that have not written their slices of the exchange for which this rank waits."""
        count = self._count
        return tuple(member for rank, member in enumerate(self._members) if int(self._counters[rank]) < count)

    def _begin(self, kind: int, numel: int, steps: Iterator[None]) -> Exchange:
        tag = (numel << 26) + ((self.subject + 1) % 2**16 << 10) + kind
        exchange = Exchange(self, tag, steps)
        self._recent.append((self._num_begun() + 1, tag, time.time()))
        self.subject = -1
        self._begun.append(exchange)
        self.progress()
        return exchange

    # ------------------------------------------------------------- a source of durable.calls, for the report of a hang

    def is_moving(self) -> bool:
        """True if collectives were begun since the last look."""
        before, self._last_look = self._last_look, self._num_begun()
        return before != self._last_look

    def _num_begun(self) -> int:
        """How many collectives were begun."""
        return self._recent[-1][0] if self._recent else 0

    def waiting(self) -> list[Call]:
        """The collective for which this rank waits, and those ranks that have not written their slices; at most one."""
        num_begun, recent = len(self._begun), self._recent.copy()
        if not self._waits or not self._staged or not 0 < num_begun <= len(recent):
            return []
        missing = self._missing()
        return [replace(self._described(*recent[-num_begun]), missing=missing)] if missing else []

    def recent(self) -> list[Call]:
        """The last collectives, oldest first."""
        return [self._described(*begun) for begun in self._recent.copy()]

    def _described(self, number: int, tag: int, began: float) -> Call:
        unit = (tag >> 10) % 2**16 - 1
        what = f"unit {unit}, " * (unit >= 0) + f"{tag >> 26} elements"
        return Call(_KINDS[tag & 15], what, self._name, self._members, number, began)

    def _compare_calls(self, exchange: Exchange) -> None:
        """Called when every rank has staged this exchange. Raises StateError unless all ranks have the same tag."""
        tags = self._tags[:, (self._count - 1) % 2].tolist()
        if any(tag != exchange.tag for tag in tags):
            other = next(rank for rank, tag in enumerate(tags) if tag != exchange.tag)
            raise StateError(f"collective {self._count}: rank {self._members[other]} is in {_call(tags[other])} where rank "
                             f"{self._members[self.rank]} is in {_call(exchange.tag)}: every rank must run the same modules "
                             "in the same order")

    def _stage(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The half for the next exchange, (p, numel) of dtype: one row for each rank."""
        return self._halves[self._count % 2].view(dtype)[:, :numel]


def add_up(terms: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """target = the sum of terms in their order, computed at least in fp32. target may be one of the terms."""
    if len(terms) == 2 and target.dtype == torch.float32:
        torch.add(*terms, out=target)
        return
    total = terms[0].to(torch.promote_types(target.dtype, torch.float32), copy=True)
    for term in terms[1:]:
        total += term
    target.copy_(total)


Begun = TypeVar("Begun")


def on_host(steps: Callable[..., Iterator[Begun]], *tensors: torch.Tensor) -> Iterator[Begun]:
    """The steps of a collective on copies of these tensors in host memory; the first tensor receives the result. Tensors in
    host memory are not copied."""
    on_host = [tensor.cpu() for tensor in tensors]
    yield from steps(*on_host)
    if on_host[0] is not tensors[0]:
        tensors[0].copy_(on_host[0])


def _call(tag: int) -> str:
    """A tag as text."""
    subject = (tag >> 10) % 2**16
    return f"a {_KINDS[tag & 15]}" + (f" of unit {subject - 1}" if subject else "") + f" ({tag >> 26} elements)"
