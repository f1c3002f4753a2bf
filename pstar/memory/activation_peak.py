"""Bytes that are not model data: activations, gradients on their way to a chunk, temporary tensors. Measured, not estimated.

At each moment of a step, chunks may take near's bytes less the non-model bytes (PatrickStar, section 8.1). PatrickStar's
monitor sampled these from a thread; here they are counted in the one step that is traced.

LiveBytes counts if the CPU computes: it intercepts every operation, and weak references report when a tensor's memory is
freed. AllocatorPeak reads the counters of an accelerator's allocator. Both have `take_peak()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import TracebackType

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all memory that operations inside it allocate, exactly, until the memory's last tensor is freed.

        with LiveBytes(is_chunk) as live:
            loss = model(batch)
            forward_bytes = live.take_peak()
            loss.backward()

    A storage counts once, whole, whatever views there are of it. Results are not changed. Not counted: memory allocated
    before it was entered; tensors made without an operation (from_numpy, frombuffer); scratch memory that a kernel allocates
    and frees itself; memory of other devices; sparse tensors.

    Compiled modules stay compiled. Their memory is allocated without operations: `count` adds what they return or save for
    backward; memory that they allocate and free themselves is not counted.

    Args:
        is_chunk: whether an address is that of a chunk buffer, which is not counted. Called once for each new storage, when
            the operation after the one that made it begins: the tier has recorded its buffer by then.

    Attributes:
        now, peak: bytes alive, and the most since the last take_peak; up to date when they are read.
    """

    def __init__(self, is_chunk: Callable[[int], bool] = lambda address: False):
        super().__init__()
        self._is_chunk = is_chunk
        self._now = self._peak = 0
        # By the address of the storage object; the entry is removed when the weak reference reports that it was freed.
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._unsure: list[int] = []    # made by the last operation
        self._peak_before = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tells torch.compile to ignore this mode; else it would never compile functions that it meets inside."""
        return True

    @property
    def now(self) -> int:
        self._settle()
        return self._now

    @property
    def peak(self) -> int:
        self._settle()
        return self._peak

    def take_peak(self) -> int:
        """The peak since the last call, in bytes; from now on it is counted from what is alive now."""
        peak, self._peak = self.peak, self._now
        return peak

    def count(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Counts the memory of tensors that were made without an operation, from now until it is freed."""
        self._settle()
        for storage in map(_storage, tensors):
            if storage is not None and storage._cdata not in self._alive and not self._is_chunk(storage.data_ptr()):
                self._add_new(storage)
        self._peak = max(self._peak, self._now)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._settle()
        result = func(*args, **(kwargs or {}))
        inputs = {storage._cdata: storage for storage in map(_storage, tree_leaves((args, kwargs))) if storage is not None}
        if func is torch.ops.aten.lift_fresh.default:
            inputs = {}    # torch.tensor(...): its memory is new, though it is this operation's input
        for key, storage in inputs.items():
            if key in self._alive and storage.nbytes() != self._alive[key][1]:    # resize_, or an output given as out=
                self._add(self._alive[key][0], key, storage.nbytes() - self._alive[key][1], storage.nbytes())
        self._peak_before = self._peak
        for storage in map(_storage, tree_leaves(result)):
            if storage is not None and storage._cdata not in inputs and storage._cdata not in self._alive:
                self._unsure.append(self._add_new(storage))
        self._peak = max(self._peak, self._now)
        return result

    def _add_new(self, storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        self._add(weakref.ref(storage, lambda _: self._ended(key)), key, storage.nbytes(), storage.nbytes())
        return key

    def _add(self, ref: weakref.ref[torch.UntypedStorage], key: int, more: int, num_bytes: int) -> None:
        self._alive[key] = (ref, num_bytes)
        self._now += more

    def _ended(self, key: int) -> None:
        self._now -= self._alive.pop(key)[1]

    def _settle(self) -> None:
        """Subtracts chunk buffers among the results of the last operation again, from the peak as well."""
        unsure, self._unsure = self._unsure, []
        for key in unsure:
            ref, num_bytes = self._alive.get(key, (lambda: None, 0))
            storage = ref()
            if storage is not None and num_bytes and self._is_chunk(storage.data_ptr()):
                self._ended(key)
                self._peak = max(self._peak_before, self._peak - num_bytes)


class AllocatorPeak:
    """The same for an accelerator: the peak of its allocator less the bytes of chunks, and less what was there before.

        with AllocatorPeak(device, lambda: near.reserved_bytes) as peak: ...

    Like LiveBytes it does not count memory that was allocated before it was entered: parameters outside chunks, inputs,
    another engine. Exact if no chunk was copied to near or evicted since the last take_peak: call it before chunks move. The
    result is too large by chunks evicted meanwhile, and may be too small by chunks that were copied to near.

    Args:
        device: the accelerator.
        chunk_bytes: bytes that near has allocated on the device now, idle buffers included (Tier.reserved_bytes).
    """

    def __init__(self, device: torch.device, chunk_bytes: Callable[[], int]):
        self.device, self._chunk_bytes = device, chunk_bytes
        self._before_bytes = 0    # of others, when it was entered

    def __enter__(self) -> AllocatorPeak:
        torch.accelerator.reset_peak_memory_stats(self.device)
        self._before_bytes = 0
        self._before_bytes = self.now
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    @property
    def now(self) -> int:
        return self._without_others(torch.accelerator.memory_allocated(self.device))

    @property
    def peak(self) -> int:
        return self._without_others(torch.accelerator.max_memory_allocated(self.device))

    def take_peak(self) -> int:
        """The peak since the last call, in bytes; from now on it is counted from what is allocated now."""
        peak = self.peak
        torch.accelerator.reset_peak_memory_stats(self.device)
        return peak

    def _without_others(self, num_bytes: int) -> int:
        return max(0, num_bytes - self._chunk_bytes() - self._before_bytes)


def _storage(value: object) -> torch.UntypedStorage | None:
    """A tensor's memory; None if it is no ordinary memory of the CPU, or a tangent of forward-mode AD that has none."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        return None
    if value._is_zerotensor():
        return None
    return value.untyped_storage()
