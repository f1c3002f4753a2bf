"""Host memory for a GPU's copies: mapped exactly, page-locked by registration, unlocked before it is unmapped.

A GPU copies page-locked memory at the link's speed and behind other work; other host memory goes through a small buffer of
the driver. torch's pinned allocator (CachingHostAllocator, torch 2.13) gives the next power of two of the bytes asked for,
and keeps what is freed: 12.7 billion parameters lock a third more than their bytes. Here each buffer has its own anonymous
pages, a whole number of them, and cudaHostRegister locks exactly these (CUDA Runtime API, "Memory Management").

    allocate    map -> register     one registration for each buffer: no copy crosses the end of a registration
    last view   unregister -> unmap tensors that view the buffer keep its pages
    close, exit unregister          the pages stay until their last view goes, and are pageable

If the system refuses to lock a buffer, this one and all later ones are pageable, after one warning: copies are slower then,
and right.
"""

import ctypes
import os
import warnings
import weakref
from contextlib import suppress
from typing import Protocol

import torch

from pstar.memory.pages import PAGE_BYTES, Pages, whole_pages

PORTABLE = 1
"""cudaHostRegisterPortable: locked for all devices, not only the current one."""


class Registration(Protocol):
    """Locks and unlocks pages."""

    def register(self, address: int, num_bytes: int) -> str | None:
        """Locks whole pages, which are new and keep their zeros; returns None, or the reason why the system refused. Then
        nothing is locked."""

    def unregister(self, address: int) -> None:
        """Unlocks all pages of the registration that begins there. No copy of them may be under way."""


class CudaRegistration:
    """cudaHostRegister of torch's own CUDA runtime (on ROCm torch has hipHostRegister under that name).

    Args:
        device: the GPU whose copies use the memory.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def register(self, address: int, num_bytes: int) -> str | None:
        runtime = torch.cuda.cudart()
        # CUDA takes pages one after the other, under a lock; all threads of torch take them first.
        torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8).zero_()
        with torch.cuda.device(self.device):
            status = runtime.cudaHostRegister(address, num_bytes, PORTABLE)
            if int(status) == 0:
                return None
            self._forget_error()
        return f"{runtime.cudaGetErrorString(status)} (CUDA error {int(status)})"

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self.device), suppress(RuntimeError):
            torch.cuda.synchronize(self.device)    # a stream may still copy from a buffer that the program has forgotten
            if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
                self._forget_error()

    def _forget_error(self) -> None:
        """The runtime reports a failed call again at the next launch of a kernel, and then forgets it: launches one."""
        with suppress(RuntimeError):
            torch.ones(1, dtype=torch.float32, device=self.device).add_(1)


def registration_for(device: torch.device) -> Registration | None:
    """How far memory is locked for copies to and from a device; None: it is not."""
    return CudaRegistration(device) if device.type == "cuda" else None


def far_page_bytes(device: torch.device) -> int:
    """Buffers of far are a multiple of this: of a page if registration_for locks them, else of any size."""
    return 1 if registration_for(device) is None else PAGE_BYTES


class LockedPages:
    """Makes buffers of whole pages and registers each of them.

    Args:
        registration: locks and unlocks; called in the thread that drops a buffer's last view, too.
    """

    def __init__(self, registration: Registration):
        self.registration, self._pid = registration, os.getpid()
        self._locked: dict[int, int] = {}    # bytes by address; whoever removes an entry unregisters it
        self._refused = False
        # At the exit of the process finalizers run in reverse order, so a copy queue that was made later has stopped before.
        self._close = weakref.finalize(self, _unlock_all, registration, self._locked, self._pid)

    @property
    def locked_bytes(self) -> int:
        return sum(self._locked.values())

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """num_bytes, uint8, zeros, at the begin of new pages, which live as long as tensors that view them."""
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        pages = _LockedPages(whole_pages(num_bytes), self)
        buffer = torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes)
        pages.address = buffer.data_ptr()
        if not self._refused and self._close.alive:
            self._lock(pages.address, whole_pages(num_bytes))
        return buffer

    def _lock(self, address: int, num_bytes: int) -> None:
        reason = self.registration.register(address, num_bytes)
        if reason is None:
            self._locked[address] = num_bytes
            return
        self._refused = True
        warnings.warn(f"the system locks no more than {self.locked_bytes} bytes of host memory for the GPU ({reason}): the "
                      "rest of far is pageable, and its copies are slower; raise the limit of locked memory (ulimit -l, or "
                      "the container's), or give a smaller far_budget with a disk_path", stacklevel=2)

    def unlock(self, address: int) -> None:
        """Unregisters the buffer that begins there, unless that was done."""
        if self._locked.pop(address, None) is not None and self._pid == os.getpid():
            self.registration.unregister(address)

    def close(self) -> None:
        """Unregisters all buffers, which stay valid. Buffers made later are pageable. A second call has no effect."""
        self._close()


class _LockedPages(Pages):
    """Pages of one buffer. (A weak reference would report their end too late: mmap unmaps before it does.)"""

    def __init__(self, num_bytes: int, owner: LockedPages):
        super().__init__(num_bytes)
        self.owner, self.address = owner, 0

    def __del__(self) -> None:
        self.owner.unlock(self.address)


def _unlock_all(registration: Registration, locked: dict[int, int], pid: int) -> None:
    while locked:
        address, _ = locked.popitem()
        if pid == os.getpid():    # a fork has the addresses, and no device
            registration.unregister(address)
