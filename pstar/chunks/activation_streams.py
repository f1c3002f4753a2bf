"""Copies of activations between near and far on two streams of a GPU, in both directions behind computation.

Forward issues a copy to far and goes on. The near memory of the last two storages stays until later kernels are ordered
after their copies. Backward brings back the storage that it unpacks, and begins to bring the one that was saved before it,
which backward unpacks next. So a pass waits only for what the link cannot move in the time of two storages.
"""

import time
from collections import deque

import torch

from pstar.memory.device_stream import CopyStream, DeviceCopy, Orderable

NUM_LEAVING = 2
"""Storages that may be on their way to far at a time: near holds their memory."""


class Leaving:
    """A storage on its way to far. It must not be changed meanwhile; plain autograd refuses such a change as well.

    Attributes:
        copy: the copy to far.
        changed: whether the tensor was changed in place before later kernels were ordered after the copy.
    """

    def __init__(self, copy: DeviceCopy, tensor: torch.Tensor):
        self.copy, self.changed = copy, False
        self._tensor: torch.Tensor | None = tensor.detach()    # keeps the memory, and shares the version
        self._version = tensor._version

    def let_go(self) -> None:
        """Drops the memory: its next user is a kernel that the current stream runs after the copy."""
        if self._tensor is not None:
            self.changed = self._tensor._version != self._version
            self.copy.order()
            self._tensor = None


class ActivationStreams:
    """The streams on which activations move, one in each direction.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device):
        self._out, self._in = CopyStream(device, time.perf_counter), CopyStream(device, time.perf_counter)
        self._leaving: deque[Leaving] = deque()

    def leave(self, target: torch.Tensor, source: torch.Tensor, tensor: torch.Tensor, before: list[Orderable]) -> Leaving:
        """Begins a copy to far, behind the copies that still use the target.

        target, source: (bytes,) uint8, in far and in near. tensor: the saved tensor, a view of the source's memory.
        """
        copy = self._out.issue(self._out.given(), before, lambda: target.copy_(source, non_blocking=True))
        self._leaving.append(Leaving(copy, tensor))
        self.let_go(NUM_LEAVING)
        return self._leaving[-1]

    def let_go(self, num_left: int = 0) -> None:
        """Drops the near memory of all but the last num_left storages."""
        while len(self._leaving) > num_left:
            self._leaving.popleft().let_go()

    def bring_back(self, target: torch.Tensor, source: torch.Tensor) -> DeviceCopy:
        """Begins a copy to near, (bytes,) uint8, behind all copies to far."""
        self.let_go()    # orders the current stream after them, and the copy comes after what that stream was given
        return self._in.issue(self._in.given(), (), lambda: target.copy_(source, non_blocking=True))
