"""ZeRO-Offload (Ren et al. 2021): optimizer states and update in host memory; gradients move there during backward.

    device:  forward, backward      | gradients of a block, as soon as they are reduced ->       -> new parameters
    host:    masters, moments       |                                  Adam on this rank's shard |

A step copies the gradients out and the parameters back: 2 + 2 bytes a parameter in 16 bit. Section 3.2 of the paper shows
that no other split saves more memory with as few bytes. With --offload optimizer,params (stage 3), host memory also has the
shards of the parameters, which are copied to the device before each gather.

Without a GPU, device and host are the same memory. The copies are still made and counted.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Host:
    """The host memory of a device.

    Attributes:
        out_bytes, back_bytes: moved from the device and back to it since `end_step`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned = device.type == "cuda"  # the bus reaches its full speed only with pinned memory
        self.out_bytes = self.back_bytes = 0
        self.last = {"to_host_bytes": 0, "to_device_bytes": 0}

    def copy_of(self, tensor: Tensor) -> Tensor:
        """A copy in host memory, not counted: for set-up, which happens once."""
        return self._empty(tensor, tensor.dtype).copy_(tensor.detach())

    def out(self, tensor: Tensor) -> Tensor:
        """Begins to copy a tensor to host memory, and counts its bytes; the copy may be read after `arrive`."""
        self.out_bytes += tensor.nbytes
        return self._empty(tensor, tensor.dtype).copy_(tensor.detach(), non_blocking=True)

    def back(self, tensor: Tensor, into: Tensor) -> None:
        """Begins to copy a host tensor into a device tensor; rounds it to the device tensor's type before the transfer.

        The host must not change the tensor before `arrive`; the device's later work sees the copy.
        """
        self.back_bytes += into.nbytes
        rounded = tensor if tensor.dtype == into.dtype else self._empty(tensor, into.dtype).copy_(tensor)
        into.copy_(rounded, non_blocking=True)

    def arrive(self) -> None:
        """Waits for all copies: once a step, before the update, and not once a block."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(like, dtype=dtype, device="cpu", pin_memory=self.pinned)

    def end_step(self) -> dict[str, int]:
        """Returns the bytes moved in this step, and starts new counts."""
        self.last = {"to_host_bytes": self.out_bytes, "to_device_bytes": self.back_bytes}
        self.out_bytes = self.back_bytes = 0
        return self.last
