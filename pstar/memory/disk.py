"""The disk tier: one rank's file on a local disk, with the interface of a Tier. allocate returns an extent of the file.

The file grows as needed and does not shrink: training needs the same space again in every step, and other programs could
take space that was returned. A released extent becomes a gap, and neighbouring gaps are merged. A new extent takes the
smallest gap that holds it. Without one it takes several gaps, and the file grows by the missing bytes. So the file is never
longer than the extents that were in use at once. All free bytes can be used, in whatever order extents were released.

    file   | extent | padding | gap      | extent, first piece | extent | padding | extent, second piece | padding |

Reads and writes bypass the page cache if the file system supports it (O_DIRECT): else bytes on disk would be in host memory
as well, which is scarce. The kernel then requires whole blocks: offsets, sizes and addresses that are multiples of ALIGN.
Every extent begins at such an offset. The rest of an extent after its last whole block, and unaligned memory, go through a
second, buffered descriptor. Linux keeps the two consistent.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from pstar.errors import BudgetError, ConfigError, DiskError, StateError
from pstar.memory.tier import DISK, format_bytes

ALIGN = max(4096, mmap.PAGESIZE)
"""Extents begin at multiples of this. Not less than a page of memory, so that no two extents share one in the page cache."""

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
RESUME = "the last checkpoint is complete"


@dataclass(eq=False)
class Extent:
    """A part of the file: one piece of whole blocks, seldom several; the first nbytes bytes are content."""

    nbytes: int
    pieces: tuple[tuple[int, int], ...]
    """(offset, bytes) of each, multiples of ALIGN."""
    kind: str
    num_users: int = 0
    """Reads and writes under way."""

    @property
    def offset(self) -> int:
        """Where the first piece begins."""
        return self.pieces[0][0] if self.pieces else 0


class DiskTier:
    """One file in which extents are allocated, written, read and released.

    It is opened under a unique name and unlinked at once: it is not visible in the folder, and its space is free again when
    the process ends, even if it is killed. (A network file system may show it under another name until then.)
    All methods may be called by several threads; reads and writes run at the same time, without the GIL. A forked child
    shares the file: it must not use the tier.

    Args:
        folder: made if it is missing.
        budget_bytes: the most that the file may take, padding included; None for no bound but the disk.
        rank: part of the name under which the file is opened.
        direct: True for direct I/O, False for buffered; None: direct if the file system supports it (see property `direct`).

    used_bytes, peak_bytes and used_by_kind count content without padding, idle_bytes the bytes of gaps.

    Raises DiskError if the file cannot be made, ConfigError for direct=True on a file system without direct I/O.
    """

    name = DISK
    device = torch.device("cpu")

    def __init__(self, folder: Path, budget_bytes: int | None = None, rank: int = 0, direct: bool | None = None):
        self.folder, self.budget_bytes = Path(folder), budget_bytes
        self.used_bytes = 0
        self.idle_bytes = 0
        self.peak_bytes = 0
        self.used_by_kind: Counter[str] = Counter()
        self.file_bytes = 0
        """Length of the file: content, padding and gaps."""
        self._block_bytes = 0                   # of content and padding
        self._gaps: dict[int, int] = {}         # bytes by offset
        self._taken: set[Extent] = set()
        self._change = threading.Condition()    # guards all attributes and Extent.num_users
        self._buffered, self._direct = self._open(rank, direct is not False)
        self._closing = weakref.finalize(self, _close, self._buffered, self._direct)
        self._closing.atexit = False            # at exit the system closes the files, and a thread may still be writing
        if direct and self._direct is None:
            self.close()
            raise ConfigError(f"{self.folder}: this file system has no direct I/O; leave direct out or give another folder")

    @property
    def direct(self) -> bool:
        """Whether whole blocks bypass the page cache."""
        return self._direct is not None

    @property
    def bound_bytes(self) -> int | None:
        """As in Tier; here always the budget: a disk has no limit of the moment."""
        return self.budget_bytes

    @property
    def reserved_bytes(self) -> int:
        return self.used_bytes + self.idle_bytes

    def has_room(self, num_bytes: int) -> bool:
        """Whether num_bytes more, padded, fit into the budget; does not ask how much room the disk has."""
        return self.budget_bytes is None or self._block_bytes + _padded(num_bytes) <= self.budget_bytes

    def allocate(self, numel: int, dtype: torch.dtype, kind: str) -> Extent:
        """An extent for numel elements, its content undefined, its space reserved: a later write finds room.

        (On a copy-on-write file system, such as btrfs or ZFS, a write may still fail.)
        Raises BudgetError over budget and DiskError if the disk is full; nothing is changed then.
        """
        num_bytes = numel * dtype.itemsize
        with self._change:
            self._must_be_open()
            if not self.has_room(num_bytes):
                raise BudgetError(f"{self.name}: {num_bytes} bytes for {kind} do not fit: {self._block_bytes} of "
                                  f"{self.budget_bytes} bytes are in use, counted in blocks of {ALIGN}")
            extent = Extent(num_bytes, tuple(self._take(_padded(num_bytes))), kind)
            self._taken.add(extent)
            self._block_bytes += _padded(num_bytes)
            self.used_bytes += num_bytes
            self.used_by_kind[kind] += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            self._check()
        return extent

    def release(self, extent: Extent) -> None:
        """Releases an extent. Raises StateError for one that is not in use here, or that is being read or written."""
        with self._change:
            if extent not in self._taken:
                raise StateError(f"{self.name}: an extent of {extent.nbytes} bytes was released that is not in use")
            if extent.num_users:
                raise StateError(f"{self.name}: an extent of {extent.nbytes} bytes was released while it is read or written")
            self._taken.remove(extent)
            self.used_bytes -= extent.nbytes
            self.used_by_kind[extent.kind] -= extent.nbytes
            self._block_bytes -= _padded(extent.nbytes)
            self._add_gaps(extent.pieces)
            self._check()

    def write(self, extent: Extent, tensor: torch.Tensor) -> None:
        """Writes the whole content; returns when it is written (or, buffered, when it is in the page cache).

        tensor: contiguous, on the CPU, extent.nbytes bytes of any dtype.
        Raises DiskError if the disk fails: the extent's content is then undefined, the tier and its other extents are as
        before. Raises StateError for an extent that is not in use here, or a tensor of another size, layout or device.
        """
        self._transfer(os.pwritev, "writing", extent, tensor)

    def read(self, extent: Extent, tensor: torch.Tensor) -> None:
        """Reads the whole content into tensor; arguments and errors as in write."""
        self._transfer(os.preadv, "reading", extent, tensor)

    def close(self) -> None:
        """Closes the file when reads and writes under way have ended; all extents are gone. A second call has no effect."""
        with self._change:
            self._change.wait_for(lambda: not any(extent.num_users for extent in self._taken))
            self._closing()
            self._taken.clear()
            self._gaps.clear()
            self.used_by_kind.clear()
            self.used_bytes = self.idle_bytes = self.file_bytes = self._block_bytes = 0

    # ------------------------------------------------------------------ bytes

    def _transfer(self, call: Callable, doing: str, extent: Extent, tensor: torch.Tensor) -> None:
        """Moves extent.nbytes bytes between the file and the tensor's memory, piece by piece."""
        if tensor.nbytes != extent.nbytes or not tensor.is_contiguous() or tensor.device != self.device:
            raise StateError(f"{self.name}: {doing} {extent.nbytes} bytes needs a contiguous tensor of that size on the "
                             f"CPU, not {tensor.nbytes} bytes of {tuple(tensor.shape)} on {tensor.device}")
        with self._using(extent):
            # The tensor's memory as bytes, whatever its dtype; valid as long as the caller keeps the tensor.
            memory = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
            begin = 0
            try:
                for offset, num_bytes in extent.pieces:
                    part = memory[begin:begin + num_bytes]
                    self._transfer_piece(call, offset, part, tensor.data_ptr() + begin)
                    begin += num_bytes
            except OSError as error:
                raise self._error(f"{doing} {format_bytes(extent.nbytes)}", error, extent.nbytes) from error

    def _transfer_piece(self, call: Callable, offset: int, memory: memoryview, address: int) -> None:
        """Moves all of memory, which begins at address. The system may move less than asked for (Python itself repeats a
        call that a signal has interrupted); the rest of a block is then buffered like every other part of a block."""
        done = 0
        while done < len(memory):
            whole = (len(memory) - done) // ALIGN * ALIGN
            if self.direct and whole and (offset + done) % ALIGN == 0 and (address + done) % ALIGN == 0:
                file, end = self._direct, done + whole
            else:
                file, end = self._buffered, len(memory)
            moved = call(file, [memory[done:end]], offset + done)
            if moved == 0:
                raise OSError(errno.EIO, "the file ends early")
            done += moved

    @contextmanager
    def _using(self, extent: Extent) -> Iterator[None]:
        """Keeps the extent and the file open inside. (The number of a closed descriptor may be reused for another file.)"""
        with self._change:
            self._must_be_open()
            if extent not in self._taken:
                raise StateError(f"{self.name}: an extent of {extent.nbytes} bytes is read or written that is not in use")
            extent.num_users += 1
        try:
            yield
        finally:
            with self._change:
                extent.num_users -= 1
                self._change.notify_all()

    # ------------------------------------------------------------------ space

    def _take(self, num_bytes: int) -> list[tuple[int, int]]:
        """Takes pieces of num_bytes in total (a multiple of ALIGN) from the gaps; the file grows by the missing bytes."""
        if num_bytes > self.idle_bytes:
            self._grow(num_bytes - self.idle_bytes)
        pieces = []
        while num_bytes:
            enough = [offset for offset, size in self._gaps.items() if size >= num_bytes]
            offset = min(enough, key=self._gaps.__getitem__) if enough else max(self._gaps, key=self._gaps.__getitem__)
            size = min(num_bytes, self._gaps[offset])
            left = self._gaps.pop(offset) - size
            if left:
                self._gaps[offset + size] = left
            self.idle_bytes -= size
            num_bytes -= size
            pieces.append((offset, size))
        return pieces

    def _grow(self, num_bytes: int) -> None:
        """Appends num_bytes to the file, reserved on the disk: a full disk is an error now, not at a later write."""
        try:
            _reserve(self._buffered, self.file_bytes, num_bytes)
        except OSError as error:
            with suppress(OSError):      # a part of it may have been reserved
                os.ftruncate(self._buffered, self.file_bytes)
            raise self._error(f"reserving {format_bytes(num_bytes)}", error, num_bytes) from error
        self._add_gaps([(self.file_bytes, num_bytes)])
        self.file_bytes += num_bytes

    def _add_gaps(self, pieces: list[tuple[int, int]] | tuple[tuple[int, int], ...]) -> None:
        """Turns pieces into gaps and merges neighbouring ones."""
        self._gaps.update(pieces)
        self.idle_bytes += sum(size for _, size in pieces)
        merged: list[tuple[int, int]] = []
        for offset, size in sorted(self._gaps.items()):
            if merged and sum(merged[-1]) == offset:
                offset, size = merged[-1][0], merged.pop()[1] + size
            merged.append((offset, size))
        self._gaps = dict(merged)

    def _check(self) -> None:
        over = self.budget_bytes is not None and self.file_bytes > self.budget_bytes
        if over or self.used_bytes < 0 or self._block_bytes + self.idle_bytes != self.file_bytes:
            raise StateError(f"{self.name}: the ledger says {self._block_bytes} bytes used and {self.idle_bytes} idle, the "
                             f"file has {self.file_bytes}, the budget is {self.budget_bytes}")

    # ------------------------------------------------------------------ the file

    def _open(self, rank: int, try_direct: bool) -> tuple[int, int | None]:
        """Opens and unlinks a new file. Returns a buffered descriptor and one for direct I/O, or None."""
        try:
            _make_folder(self.folder)
            buffered, path = tempfile.mkstemp(prefix=f"pstar_rank{rank}_", dir=self.folder)
        except OSError as error:
            raise self._error("making a file", error) from error
        direct = None
        try:
            direct = _open_direct(path) if try_direct else None
            os.unlink(path)
        except OSError as error:
            _close(buffered, direct)
            raise self._error("unlinking an open file", error) from error
        return buffered, direct

    def _must_be_open(self) -> None:
        if not self._closing.alive:
            raise StateError(f"{self.name}: the tier is closed")

    def _error(self, doing: str, error: OSError, num_bytes: int = 0) -> DiskError:
        """A DiskError that names the failed operation and what to do, in one line."""
        if error.errno in NO_SPACE and num_bytes:
            advice = f"free {format_bytes(num_bytes)} there or give another --disk-path"
        elif error.errno == errno.EFBIG:
            advice = "raise the limit on the size of files (ulimit -f) or give another --disk-path"
        else:
            advice = "give another --disk-path"
        return DiskError(f"{self.name}: {doing} in {self.folder} failed: {error.strerror or error}; {advice}"
                         + (f"; {RESUME}" if num_bytes else ""))


def check_disk_path(folder: Path | str) -> None:
    """Makes the folder, if it is missing, and a file in it, and removes them again. Raises ConfigError if that fails.

    For the start of a program, before it starts processes that would all fail with this error.
    """
    try:
        missing = [each for each in (Path(folder), *Path(folder).parents) if not each.exists()]
        _make_folder(Path(folder))
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(ALIGN))
        for each in missing:
            each.rmdir()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--disk-path {folder}: {reason}; give a folder that this user may write to") from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


def _close(*files: int | None) -> None:
    for file in files:
        if file is not None:
            os.close(file)


def _open_direct(path: str) -> int | None:
    """A second descriptor of the file, for direct I/O; None if the file system does not support it. Writes and reads a page:
    open may succeed where these fail."""
    if not hasattr(os, "O_DIRECT"):
        return None
    file = None
    with mmap.mmap(-1, ALIGN) as page:
        try:
            file = os.open(path, os.O_RDWR | os.O_DIRECT)
            page.write(b"\1" * ALIGN)
            wrote = os.pwritev(file, [page], 0)
            page.seek(0)
            page.write(bytes(ALIGN))
            if wrote == ALIGN == os.preadv(file, [page], 0) and page[:] == b"\1" * ALIGN:
                os.ftruncate(file, 0)
                return file
        except OSError:
            pass
    _close(file)
    return None


def _reserve(file: int, offset: int, num_bytes: int) -> None:
    """Reserves space on the disk for these bytes; writes zeros if the file system cannot reserve."""
    try:
        return os.posix_fallocate(file, offset, num_bytes)
    except AttributeError:
        pass
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
    zeros = bytes(min(num_bytes, 2**20))
    end = offset + num_bytes
    while offset < end:
        offset += os.pwrite(file, zeros[:end - offset], offset)
