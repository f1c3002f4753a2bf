"""Offload of activations: what backward needs later waits in far, not near. Does not know modules or chunks.

A block's forward saves tensors that nobody looks at until its backward, at the other end of the step. They are copied into
far as they are saved, their near memory is free as soon as forward lets go of it, and they come back when backward asks for
them. With checkpointing only the inputs of the blocks are saved: a model's depth then costs no near memory at all.

What is copied is a *storage*, once, however many nodes of the graph save views of it (the q, k and v of attention are
views of one). The copy is made when the tensor is saved. So a tensor that is changed in place afterwards does no harm:
backward gets the values that forward used, where plain autograd raises an error. (Changes through `.data` are as invisible
here as there.)

All copies are synchronous: when `pack` returns the bytes are in far, when `unpack` returns they are near, on the stream
that is current. A buffer of far that is given back has no copy under way, so that no events are needed. On a GPU this makes
forward wait for the link.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pstar.memory.tier import Ledger, Tier

KIND = "activation"

# Below this size a tensor stays near: one copy costs some ten microseconds whatever its size, the time in which a link of 10
# GB/s moves 100 KB, and small tensors are not what fills a memory.
LEAST_BYTES = 64 * 1024

# A view of a much larger storage stays near as well: the rest is somebody else's (a batch cut from a whole corpus), and to
# copy all of it would cost far more than it frees. A third of the storage, q of q, k and v, is still worth it.
LARGEST_SHARE = 4


class Copy:
    """One storage's bytes in a buffer of far, which is given back when the last node lets go of this object."""

    def __init__(self, storage: torch.UntypedStorage, far: Tier, ledger: Ledger):
        self.device, self.ledger = storage.device, ledger
        self.data = far.allocate(storage.nbytes(), torch.uint8, KIND)
        weakref.finalize(self, far.release, self.data).atexit = False    # whatever happens from here on
        self.data.copy_(_bytes_of(storage))
        ledger.add("near to far", self.data.nbytes)
        self._back: weakref.ref[torch.UntypedStorage] | None = None

    def bring_back(self) -> torch.UntypedStorage:
        """The bytes near; copied once for all nodes that hold them at the same time."""
        storage = self._back() if self._back else None
        if storage is None:
            storage = torch.empty(self.data.nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
            _bytes_of(storage).copy_(self.data)
            self.ledger.add("far to near", self.data.nbytes)
            self._back = weakref.ref(storage)
        return storage


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
        """The tensor, near, in new memory but laid out as it was."""
        tensor = torch.empty(0, dtype=self.dtype, device=self.copy.device)
        return tensor.set_(self.copy.bring_back(), self.offset, self.size, self.stride)


class Offload:
    """Decides what goes to far.

    Args:
        far, ledger: where to, and where the copies are written down.
        device: of near; tensors on devices of other kinds stay.
        room_bytes: the most that activations may take of far, None for no bound. It is what far's budget leaves over when
            all that chunks may ever need there is taken off: activations never make a chunk homeless. Where they do not fit,
            they stay near, and nothing fails.
    """

    def __init__(self, far: Tier, ledger: Ledger, device: torch.device, room_bytes: int | None = None):
        self.far, self.ledger, self.device, self.room_bytes = far, ledger, device, room_bytes
        self._staying: set[int] = set()

    def stay(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are there anyway (buffers, parameters outside the chunks): copies of them would free nothing."""
        self._staying = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def pack(self, tensor: torch.Tensor) -> Away | None:
        """Copies what autograd is about to save into far; None for what stays near.

        While backward runs, everything stays: what is recomputed there is needed at once.
        """
        if torch._C._current_autograd_node() is not None or not self._may_leave(tensor):
            return None
        storage, version = tensor.untyped_storage(), tensor._version
        # The note is kept by the storage itself, not by its address, which the next tensor may get. A version that differs
        # says that the content was changed in place since it was copied.
        noted, copy = getattr(storage, "_pstar_copy", (None, None))
        found = copy() if copy is not None and noted == version else None
        if found is None:
            if tensor.nbytes * LARGEST_SHARE < storage.nbytes() or not self._has_room(storage.nbytes()):
                return None
            found = Copy(storage, self.far, self.ledger)
            storage._pstar_copy = (version, weakref.ref(found))
        return Away(found, tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.device.type != self.device.type:
            return False    # a parameter, a subclass with memory of another kind, a sparse tensor, an input in host memory
        if tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
            return False    # without a version, or more than its bytes
        storage = tensor.untyped_storage()
        return storage.nbytes() >= LEAST_BYTES and storage.data_ptr() not in self._staying

    def _has_room(self, num_bytes: int) -> bool:
        taken = self.far.used_by_kind[KIND] + num_bytes
        return (self.room_bytes is None or taken <= self.room_bytes) and self.far.has_room(num_bytes)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
