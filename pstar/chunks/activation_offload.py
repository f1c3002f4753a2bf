"""Offload of activations: tensors saved for backward wait in far, not near. Does not know modules or chunks.

A transformer block's forward saves tensors that are not read until its backward, at the other end of the step. They are
copied to far when they are saved. Their near memory is free when forward drops its last reference, and they are copied back
when backward unpacks them. With checkpointing only the blocks' inputs are saved: a model's depth then costs no near memory.

A *storage* is copied once, however many nodes of the graph save views of it (q, k and v of attention are views of one). The
copy is made when the tensor is saved. So a later change in place does no harm: backward gets the values that forward used,
where plain autograd raises an error. (Neither here nor there is a change through `.data` noticed.)

In host memory all copies are made at once: when `pack` returns the bytes are in far, when `unpack` returns they are in near.
On a GPU they run on streams behind computation, and later kernels wait for them (activation_streams.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pstar.chunks.activation_streams import ActivationStreams, Leaving
from pstar.errors import StateError
from pstar.memory.accelerator import is_accelerator
from pstar.memory.device_stream import DeviceCopy
from pstar.memory.tier import Ledger, Tier

KIND = "activation"

# Below this size a tensor stays near: small tensors do not fill a memory. One copy costs some ten microseconds whatever its
# size, the time in which a link of 10 GB/s moves 100 KB.
LEAST_BYTES = 64 * 1024

# A view of a storage more than four times its size stays near: other tensors use the rest (a batch is a view of the corpus),
# and to copy all of it would cost far more than it frees. A third of a storage (q of q, k and v) is still copied.
LARGEST_SHARE = 4


class Copy:
    """One storage's bytes in a far buffer, which is released with the last node of the graph that refers to this object."""

    def __init__(self, tensor: torch.Tensor, far: Tier, ledger: Ledger):
        storage = tensor.untyped_storage()
        self.device, self.ledger = storage.device, ledger
        self.data = self._allocate(storage.nbytes(), far)
        self._take(tensor)
        ledger.add("near to far", self.data.nbytes)
        self._back: weakref.ref[torch.UntypedStorage] | None = None

    def _allocate(self, num_bytes: int, far: Tier) -> torch.Tensor:
        data = far.allocate(num_bytes, torch.uint8, KIND)
        weakref.finalize(self, far.release, data).atexit = False    # before the copy, which may fail
        return data

    def _take(self, tensor: torch.Tensor) -> None:
        self.data.copy_(_bytes_of(tensor.untyped_storage()))

    def bring_back(self) -> torch.UntypedStorage:
        """The bytes in near; copied once for all nodes that hold them at the same time."""
        storage = self._back() if self._back else None
        if storage is None:
            storage = torch.empty(self.data.nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
            self._give(_bytes_of(storage))
            self.ledger.add("far to near", self.data.nbytes)
            self._back = weakref.ref(storage)
        return storage

    def _give(self, target: torch.Tensor) -> None:
        target.copy_(self.data)


class StreamCopy(Copy):
    """A Copy whose bytes move on a GPU's streams.

    Args:
        streams: carry the bytes.
        previous: the copy that was made before this one, which backward needs after it.
    """

    def __init__(self, tensor: torch.Tensor, far: Tier, ledger: Ledger, streams: ActivationStreams, previous: Copy | None):
        self._streams, self._uses = streams, []
        self._previous = weakref.ref(previous) if previous is not None else lambda: None
        self._ahead: torch.UntypedStorage | None = None
        self._fences: list[DeviceCopy] = []
        super().__init__(tensor, far, ledger)

    def _allocate(self, num_bytes: int, far: Tier) -> torch.Tensor:
        data = far.allocate(num_bytes, torch.uint8, KIND, self._fences)
        weakref.finalize(self, _release, far, data, self._uses).atexit = False
        return data

    def _take(self, tensor: torch.Tensor) -> None:
        source = _bytes_of(tensor.untyped_storage())
        self._leaving: Leaving = self._streams.leave(self.data, source, tensor, self._fences)
        self._uses.append(self._leaving.copy)

    def _give(self, target: torch.Tensor) -> None:
        self._uses.append(self._streams.bring_back(target, self.data))

    def bring_back(self) -> torch.UntypedStorage:
        """As Copy.bring_back; the current stream waits for the bytes. Also begins to bring the previous copy's.

        Raises StateError if the tensor was changed in place while it was copied to far.
        """
        storage = Copy.bring_back(self)
        if self._leaving.changed:
            raise StateError("a tensor that backward needs was changed in place while it was copied to far: change a clone, "
                             "as plain autograd asks for")
        self._uses[-1].order()
        self._ahead = None
        if (previous := self._previous()) is not None:
            previous.begin_back()
        return storage

    def begin_back(self) -> None:
        """Begins to bring the bytes back, before bring_back asks for them."""
        if self._back is None:
            self._ahead = Copy.bring_back(self)


@dataclass(frozen=True)
class Away:
    """What the graph keeps instead of a tensor that is in far."""

    copy: Copy
    dtype: torch.dtype
    offset: int
    """In elements, inside the storage."""
    size: torch.Size
    stride: tuple[int, ...]

    def unpack(self) -> torch.Tensor:
        """The tensor in new near memory, with its old size and strides."""
        tensor = torch.empty(0, dtype=self.dtype, device=self.copy.device)
        return tensor.set_(self.copy.bring_back(), self.offset, self.size, self.stride)


class Offload:
    """Decides which saved tensors are copied to far.

    Args:
        far, ledger: the tier that holds the copies, and the ledger that counts them.
        device: near's device; tensors on devices of other types stay.
        room_bytes: the most that activations may take of far, None for no bound. It is far's budget less all that chunks may
            ever need there, so activations never take a chunk's room. Activations that do not fit stay near, without an
            error.
    """

    def __init__(self, far: Tier, ledger: Ledger, device: torch.device, room_bytes: int | None = None):
        self.far, self.ledger, self.device, self.room_bytes = far, ledger, device, room_bytes
        self._streams = ActivationStreams(device) if is_accelerator(device) else None
        self._last: weakref.ref[Copy] | None = None
        self._staying: set[int] = set()

    def stay(self, tensors: Iterable[torch.Tensor]) -> None:
        """Names tensors that are never copied (buffers, parameters outside of chunks): copies would free no memory."""
        self._staying = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def pack(self, tensor: torch.Tensor) -> Away | None:
        """Copies a tensor that autograd is about to save to far; None: it stays near.

        While backward runs, every tensor stays: recomputed ones are needed at once.
        """
        if torch._C._current_autograd_node() is not None or not self._may_leave(tensor):
            return None
        storage, version = tensor.untyped_storage(), tensor._version
        # (version, weak reference to the Copy) is an attribute of the storage, not in a table by address: the next tensor
        # may get the address. Another version means that the content was changed in place since it was copied.
        copied_version, copy = getattr(storage, "_pstar_copy", (None, None))
        found = copy() if copy is not None and copied_version == version else None
        if found is None:
            if tensor.nbytes * LARGEST_SHARE < storage.nbytes() or not self._has_room(storage.nbytes()):
                return None
            found = self._copy(tensor)
            storage._pstar_copy = (version, weakref.ref(found))
        return Away(found, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _copy(self, tensor: torch.Tensor) -> Copy:
        if self._streams is None:
            return Copy(tensor, self.far, self.ledger)
        copy = StreamCopy(tensor, self.far, self.ledger, self._streams, self._last() if self._last else None)
        self._last = weakref.ref(copy)
        return copy

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.device.type != self.device.type:
            return False    # a parameter, a subclass with other kinds of memory, a sparse tensor, an input in host memory
        if tensor.is_inference() or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            return False    # has no version, or its values differ from its bytes
        storage = tensor.untyped_storage()
        return storage.nbytes() >= LEAST_BYTES and storage.data_ptr() not in self._staying

    def _has_room(self, num_bytes: int) -> bool:
        taken = self.far.used_by_kind[KIND] + self.far.size_of(num_bytes)
        return (self.room_bytes is None or taken <= self.room_bytes) and self.far.has_room(num_bytes)


def _release(far: Tier, data: torch.Tensor, uses: list[DeviceCopy]) -> None:
    """Releases a far buffer with the copies that still use it. Near memory that they fill is freed after this: its next user
    is a kernel that the current stream runs after them."""
    far.release(data, uses)
    for copy in uses:
        copy.order()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
