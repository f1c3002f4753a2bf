"""Tiers: memory arenas with a byte budget, and the ledger that counts every copy and collective.

`near` is the accelerator's memory, `far` the host's. Without a GPU near is an arena of host memory with the budget that
the user gives: budget, evictions and copies are the same, only the memory is another. The budget is an invariant: it is
checked after every operation, in production too.
"""

import contextlib
import ctypes
import os
import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from pstar.errors import BudgetError, ConfigError, PstarError, StateError
from pstar.memory.copy_queue import Handle
from pstar.memory.pages import buffer_of, is_out_of_host_memory, whole_pages
from pstar.memory.pinned import LockedPages, Registration

NEAR, FAR, DISK = "near", "far", "disk"
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

MOST_BYTES = 1 << 63  # more than any machine can address
SUM = "sum"    # tensors that all ranks sum, such as norms
BETWEEN_NODES = "between nodes"    # what this rank receives from other nodes, whatever for
MOVES = ("far to near", "near to far", "disk to far", "far to disk", "gather", "reduce")


# mallopt's numbers in glibc's malloc.h, and the largest values it takes.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES, MMAP_BYTES, START_MMAP_BYTES = 2**31 - 1, 32 * 2**20, 2**18


def keep_freed_memory(keep: bool = True) -> bool:
    """Lets this process keep the host memory that it frees for its next step; returns whether malloc could be tuned.

    At the end of a step glibc returns the pages of freed activations and gradients to the system. The next step allocates
    them anew: on a CPU one page fault for every 4096 bytes, measured as 15 % of a step. (With a GPU they are not in host
    memory.) keep=False: large tensors get separate pages, which are returned when they are freed. It is used during the
    start, when large temporary tensors are allocated between small ones that stay. It is also used with offloaded
    activations: kept memory in addition to their copies was measured as a tenth of the process. Nothing is changed if the
    user's environment tunes malloc, or without glibc.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    mmap_bytes, kept_bytes = (MMAP_BYTES, KEPT_BYTES) if keep else (START_MMAP_BYTES, 2 * START_MMAP_BYTES)
    return bool(mallopt(M_MMAP_THRESHOLD, mmap_bytes)) and bool(mallopt(M_TRIM_THRESHOLD, kept_bytes))


SAVE_HOST_MEMORY = "give a far_budget with a disk_path, state_bits 8, or fewer processes on a machine"
"""What to do without enough of it."""


OWN_PAGES_BYTES = 2**16
"""From this size on a host buffer has separate pages, unless it is in malloc's heap (Tier.use_heap)."""


OWN_USES = 3
"""References to a buffer's storage without kept views: the tier's tensor, the user's view of it, the one in `shared`."""


class Ledger:
    """Bytes and counts of copies between tiers and of collectives, in total and in the last whole step."""

    def __init__(self) -> None:
        self.kinds = MOVES
        """What it reports; SUM and BETWEEN_NODES, too, if chunks are exchanged in two levels."""
        self.moved_bytes: Counter[str] = Counter()
        self.moves: Counter[str] = Counter()
        self.step_bytes: Counter[str] = Counter()
        """Bytes moved for the last ended step; bytes that were moved ahead for the next step count for that one."""
        self.waited_s = 0.0
        """Seconds in which this process only waited for collectives."""
        self.step_waited_s = 0.0
        """waited_s of the last ended step."""
        self.copy_waited_s = 0.0
        """Seconds in which this process only waited for copies between tiers: those that prefetch could not hide."""
        self.step_copy_waited_s = 0.0
        """copy_waited_s of the last ended step."""
        self._at_begin: Counter[str] = Counter()
        self._early: Counter[str] = Counter()         # moved in this step for the next one
        self._came_early: Counter[str] = Counter()    # moved in the last step for this one
        self._waited_at_begin = self._copy_waited_at_begin = 0.0

    def add(self, kind: str, num_bytes: int, for_next_step: bool = False) -> None:
        """One movement of num_bytes; kind is one of MOVES, SUM and BETWEEN_NODES."""
        self.moved_bytes[kind] += num_bytes
        if for_next_step:
            self._early[kind] += num_bytes
        self.moves[kind] += 1

    def begin_step(self) -> None:
        self._at_begin = self.moved_bytes.copy()
        self._waited_at_begin, self._copy_waited_at_begin = self.waited_s, self.copy_waited_s

    def end_step(self) -> None:
        self.step_bytes = self.moved_bytes - self._at_begin + self._came_early - self._early
        self._came_early, self._early = self._early, Counter()
        self.step_waited_s = self.waited_s - self._waited_at_begin
        self.step_copy_waited_s = self.copy_waited_s - self._copy_waited_at_begin

    def reset(self) -> None:
        self.moved_bytes.clear()
        self.moves.clear()


class Fence(Protocol):
    """A copy in the background that still reads or writes a buffer."""

    def wait(self) -> None: ...

    def order(self) -> None:
        """Lets later work of the current stream wait, not this thread; on the host it waits."""


class Tier:
    """One arena. Released buffers are kept for the next allocation of the same size, inside the budget, or freed (use_heap).

    A buffer may be released while copies still use it, together with their handles (its fences). The next allocation waits
    for the fences, or returns them to a caller that begins a copy. So the ledger depends on the program alone, never on the
    speed of a copy.

    Args:
        name: 'near' or 'far', for messages.
        device: the device of the buffers.
        budget_bytes: the most that may be reserved at once; None for no bound.
        registration: locks the pages of host buffers, so that copies to and from a GPU run at the link's speed. Buffers then
            are whole pages, and count as such. None: they are not locked, and count their bytes.
    """

    def __init__(self, name: str, device: torch.device, budget_bytes: int | None = None,
                 registration: Registration | None = None):
        self.name, self.device, self.budget_bytes = name, device, budget_bytes
        self.locked = None if registration is None else LockedPages(registration)
        self._heap_kinds: Collection[str] = ()
        self.limit_bytes: int | None = None
        """Bytes that may be in use at this moment, if less than the budget: activations take the rest."""
        self.used_bytes = 0
        self.idle_bytes = 0
        self.peak_bytes = 0
        self._step_bytes = self._last_step_bytes = 0
        """The most bytes in use in this step, and in the last one."""
        self.used_by_kind: Counter[str] = Counter()
        self._idle: dict[int, list[tuple[torch.Tensor, Sequence[Fence]]]] = defaultdict(list)
        self._taken: dict[int, tuple[torch.Tensor, str]] = {}    # by address of the buffer
        weakref.finalize(self, _wait_for_all, self._idle, name == NEAR).atexit = False

    @property
    def reserved_bytes(self) -> int:
        return self.used_bytes + self.idle_bytes

    def holds(self, address: int) -> bool:
        """Whether a buffer that is in use begins at this address."""
        return address in self._taken

    @property
    def bound_bytes(self) -> int | None:
        """The most that may be in use now: the budget, or the limit of this moment."""
        if self.limit_bytes is None:
            return self.budget_bytes
        return self.limit_bytes if self.budget_bytes is None else min(self.budget_bytes, self.limit_bytes)

    def size_of(self, num_bytes: int) -> int:
        """The bytes that a buffer of num_bytes takes: whole pages if they are locked."""
        return num_bytes if self.locked is None else whole_pages(num_bytes)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a buffer of num_bytes fits in addition to the bytes in use (idle buffers are freed for it)."""
        bound = self.bound_bytes
        return bound is None or self.used_bytes + self.size_of(num_bytes) <= bound

    def use_heap(self, kinds: Collection[str]) -> None:
        """From now on takes host buffers of these kinds from malloc's heap, and frees them when they are released.

        For kinds that live for a part of a step only, in a process that keeps freed memory (keep_freed_memory). Activations
        then use the memory of released chunks, and chunks of other sizes, too. Separate pages are returned to the system
        whenever a chunk of another size needs the budget: measured as 68 MiB of page faults and 4 % of a step of 12 layers.
        Kinds that live longer would leave holes between activations, measured as a third of a rank's memory.
        """
        if self.device.type == "cpu" and self.locked is None:
            self._heap_kinds = kinds

    def _in_heap(self, num_bytes: int, kind: str) -> bool:
        return kind in self._heap_kinds and num_bytes < MMAP_BYTES    # malloc never keeps larger ones

    def limit(self, num_bytes: int | None) -> None:
        """Sets the limit of this moment and frees idle buffers above it. The caller must evict what is in use above it."""
        self.limit_bytes = num_bytes
        if num_bytes is not None:
            self._shrink_idle(0)

    def allocate(self, numel: int, dtype: torch.dtype, kind: str, fences: list[Fence] | None = None,
                 after: Sequence[Handle] = ()) -> torch.Tensor:
        """A buffer (numel,) of dtype, its content undefined.

        fences: a list that receives the copies for which the buffer's user must wait; None: this call waits for them.
        after: copies for which that user waits in any case.
        Raises BudgetError if it does not fit; the caller makes room.
        """
        num_bytes = numel * dtype.itemsize
        size = self.size_of(num_bytes)
        if not self.has_room(num_bytes):
            raise self._too_many(num_bytes, kind)
        idle = self._idle[num_bytes]
        if idle:
            number = self._of_copies_before(idle, after) if after else None
            if number is None:
                # The last released one without fences (it may be in a cache), else the first, whose copies will end first.
                free = [number for number, (_, pending) in enumerate(idle) if not pending]
                number = free[-1] if free else 0
            buffer, pending = idle.pop(number)
            self.idle_bytes -= size
            if fences is not None:
                fences.extend(pending)
            else:
                self._wait_for(pending)
        else:
            self._shrink_idle(size)
            buffer = self._new_buffer_or_error(num_bytes, kind)
        self._taken[buffer.data_ptr()] = (buffer, kind)
        self._use(size, kind)
        return buffer.view(dtype)

    @staticmethod
    def _of_copies_before(idle: list[tuple[torch.Tensor, Sequence[Fence]]], after: Sequence[Handle]) -> int | None:
        """The number of an idle buffer whose copies end before those of `after` do, or None. Who waits for `after` does not
        wait longer for it, and a buffer that is free now stays for somebody who need not wait."""
        for number, (_, fences) in enumerate(idle):
            if fences and all(any(each.follows(fence) for each in after) for fence in fences):
                return number
        return None

    def release(self, tensor: torch.Tensor, fences: Sequence[Fence] = (), keep: bool = True) -> None:
        """Releases a buffer, which is free when its fences have ended. keep: reuse it for the next allocation; False: other
        tensors are views of it (see shared) and keep its memory.

        Raises StateError for a buffer that is not from this tier or was released before.
        """
        taken = self._taken.pop(tensor.data_ptr(), None)
        if taken is None:
            raise StateError(f"{self.name}: a buffer of {tensor.nbytes} bytes was released that is not in use")
        buffer, kind = taken
        size = self.size_of(buffer.nbytes)
        self._use(-size, kind)
        if keep and (fences or not self._in_heap(buffer.nbytes, kind)):
            self._idle[buffer.nbytes].append((buffer, tuple(fences)))
            self.idle_bytes += size
        else:
            self._wait_for(fences)    # the tier forgets the buffer now, and a copy on a stream does not keep it
        self._check()

    def charge(self, num_bytes: int, kind: str) -> None:
        """Counts bytes that something else has allocated on the tier's device, until discharge. Raises BudgetError."""
        if not self.has_room(num_bytes):
            raise self._too_many(num_bytes, kind)
        self._shrink_idle(num_bytes)
        self._use(num_bytes, kind)

    def discharge(self, num_bytes: int, kind: str) -> None:
        """Ends a charge."""
        self._use(-num_bytes, kind)

    def _use(self, num_bytes: int, kind: str) -> None:
        self.used_bytes += num_bytes
        self.used_by_kind[kind] += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self._step_bytes = max(self._step_bytes, self.used_bytes)
        self._check()

    def _too_many(self, num_bytes: int, kind: str) -> BudgetError:
        return BudgetError(f"{self.name}: {num_bytes} bytes for {kind} do not fit: "
                           f"{self.used_bytes} of {self.budget_bytes} bytes are in use")

    @staticmethod
    def shared(tensor: torch.Tensor) -> bool:
        """Whether tensors other than the tier's and its user's are views of a buffer's memory."""
        storage = tensor.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata) > OWN_USES

    def _new_buffer_or_error(self, num_bytes: int, kind: str) -> torch.Tensor:
        try:
            return self._new_buffer(num_bytes, kind)
        except (OSError, RuntimeError, MemoryError) as error:
            if not isinstance(error, OSError) and not is_out_of_host_memory(error):
                raise
            raise BudgetError(f"{self.name}: the system has no {format_bytes(num_bytes)} of host memory for {kind}, with "
                              f"{format_bytes(self.reserved_bytes)} in {self.name}: {SAVE_HOST_MEMORY}") from error

    def _new_buffer(self, num_bytes: int, kind: str) -> torch.Tensor:
        """num_bytes of memory, uint8. Large host buffers that stay get separate pages, outside malloc's heap: activations
        that are freed between them would leave holes there."""
        if self.locked is not None:
            return self.locked.allocate(num_bytes)
        if self.device.type == "cpu" and num_bytes >= OWN_PAGES_BYTES and not self._in_heap(num_bytes, kind):
            return buffer_of(num_bytes)    # the tensor owns the pages: they are freed with it
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def end_step(self, first: bool) -> None:
        """Frees idle buffers beyond the most that this step and the last one used; after the first step, in which parameters
        came from where they were initialised, all idle ones."""
        if first:
            self._step_bytes = self._last_step_bytes = self.used_bytes
        self._shrink_idle(0)
        self._last_step_bytes, self._step_bytes = self._step_bytes, self.used_bytes

    def close(self) -> None:
        """Drops idle buffers and unlocks the pages of the others, which stay valid as long as they are used."""
        _wait_for_all(self._idle, self.name == NEAR)
        self._idle.clear()
        self.idle_bytes = 0
        if self.locked is not None:
            self.locked.close()

    def _shrink_idle(self, num_bytes: int) -> None:
        """Drops idle buffers until num_bytes fit into the budget and into the most bytes that this step or the last one
        used. So idle buffers never make a process larger than the buffers that it needed at once."""
        if not self.idle_bytes:    # at most moments of a step
            return
        bound = max(self._step_bytes, self._last_step_bytes, self.used_bytes + num_bytes)
        if self.bound_bytes is not None:
            bound = min(bound, self.bound_bytes)
        if self.reserved_bytes + num_bytes <= bound:
            return
        for size in list(self._idle):    # the garbage collector may release an activation's buffer meanwhile
            buffers = self._idle[size]
            while buffers and self.reserved_bytes + num_bytes > bound:
                buffer, fences = buffers.pop()
                self._wait_for(fences)
                del buffer    # only now: a copy on a stream does not keep memory alive
                self.idle_bytes -= self.size_of(size)

    def _wait_for(self, fences: Sequence[Fence]) -> None:
        _wait_for(fences, self.name == NEAR)

    def _check(self) -> None:
        if self.used_bytes < 0 or (self.budget_bytes is not None and self.reserved_bytes > self.budget_bytes):
            raise StateError(f"{self.name}: the ledger says {self.used_bytes} bytes used and {self.idle_bytes} idle, "
                             f"the budget is {self.budget_bytes}")


def _wait_for(fences: Sequence[Fence], near: bool) -> None:
    """A GPU's memory that is freed goes to later work of the current stream, which waits in place of this thread."""
    for fence in fences:
        fence.order() if near else fence.wait()


def _wait_for_all(idle: dict[int, list[tuple[torch.Tensor, Sequence[Fence]]]], near: bool) -> None:
    """A tier's end: no copy may use its memory any more."""
    for buffers in idle.values():
        for _, fences in buffers:
            with contextlib.suppress(PstarError):    # a copy that was dropped, at the end of its queue
                _wait_for(fences, near)


def parse_bytes(text: str | int, whole_bytes: int) -> int:
    """'64MiB', '1.5 GB', '25%' (of whole_bytes) or a plain number, in bytes. Raises ConfigError for anything else."""
    if isinstance(text, int) and not isinstance(text, bool):
        number, unit = float(min(text, MOST_BYTES)), ""
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%|[A-Za-z]*)\s*", str(text))
        unit = match.group(2).upper() if match else "?"
        if not match or (unit != "%" and unit not in UNITS):
            raise ConfigError(f"{text!r} is no amount of memory; write for example 25%, 64MiB or 2GiB")
        number = float(match.group(1))
    amount = number / 100 * whole_bytes if unit == "%" else number * UNITS[unit]
    if not amount < MOST_BYTES:
        raise ConfigError(f"{str(text)[:40]} is more memory than a program can address; write for example 25% or 2GiB")
    num_bytes = int(amount)
    if num_bytes <= 0:
        raise ConfigError(f"{text!r} is no memory at all; write for example 25%, 64MiB or 2GiB")
    return num_bytes


def format_bytes(num_bytes: float) -> str:
    """'5.1 MiB': three digits and a binary unit."""
    units = ["TiB", "GiB", "MiB", "KiB", "bytes"]
    while abs(num_bytes) >= 1024 and len(units) > 1:
        num_bytes /= 1024
        units.pop()
    return f"{num_bytes:.4g} {units[-1]}"
