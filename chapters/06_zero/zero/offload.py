"""ZeRO-Offload (Ren et al. 2021): the optimizer's states and its update in host memory, gradients moved out as they come.

    device:  forward, backward      | gradients of a block, as soon as they are reduced ->       -> new parameters
    host:    masters, moments       |                                  Adam on this rank's shard |

A step moves the gradients out and the parameters back, 2 + 2 bytes a parameter in 16 bit: any less would be the whole
model's state too, any more would not pay, says the paper's section 3.2. With --offload optimizer,params the shards of the
parameters (stage 3) lie there as well and come in before each gather.

On a machine without a GPU device and host are the same memory. The copies are made nevertheless, and counted.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Host:
    """Host memory beside a device.

    Attributes:
        out_bytes, back_bytes: moved from the device and to it since `end_step`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned = device.type == "cuda"  # what is pinned moves at the full speed of the bus
        self.out_bytes = self.back_bytes = 0
        self.last = {"to_host_bytes": 0, "to_device_bytes": 0}

    def copy_of(self, tensor: Tensor) -> Tensor:
        """A copy in host memory; not counted: for what is set up once."""
        return torch.empty_like(tensor, device="cpu", pin_memory=self.pinned).copy_(tensor.detach())

    def out(self, tensor: Tensor) -> Tensor:
        """Moves a tensor out: a copy in host memory."""
        self.out_bytes += tensor.nbytes
        return self.copy_of(tensor)

    def back(self, tensor: Tensor, into: Tensor) -> None:
        """Copies from host memory into a tensor of the device, rounded to its type before it travels."""
        self.back_bytes += into.nbytes
        into.copy_(tensor.to(into.dtype))

    def end_step(self) -> dict[str, int]:
        """Closes the books of a step and returns what was moved in it."""
        self.last = {"to_host_bytes": self.out_bytes, "to_device_bytes": self.back_bytes}
        self.out_bytes = self.back_bytes = 0
        return self.last
