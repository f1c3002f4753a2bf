"""What the server and its workers send each other: one flat float32 tensor in host memory, also where models are on GPUs.

    up     | gradients | 1 or 0 for each: used | loss | step of the weights it was made with |
    down   | weights | buffers | step | loss scale |
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Messages:
    """Packs the gradients and the weights of one model, and unpacks them into another one of the same architecture.

    Args:
        model: on its device.

    Attributes:
        num_gradients, num_weights: elements of all gradients; of all weights and buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._weights = [*model.parameters(), *model.buffers()]
        self.num_gradients = sum(p.numel() for p in self._parameters)
        self.num_weights = sum(t.numel() for t in self._weights)

    @property
    def up_elems(self) -> int:
        """Elements of a message to the server."""
        return self.num_gradients + len(self._parameters) + 2

    @property
    def down_elems(self) -> int:
        """Elements of a message to a worker."""
        return self.num_weights + 2

    def pack_gradients(self, loss: Tensor, version: int) -> Tensor:
        """(up_elems,): every .grad, zeros where there is none, then which were used, the loss, and the weights' version."""
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        used = torch.tensor([p.grad is not None for p in self._parameters])
        tail = torch.tensor([float(loss), float(version)])
        return torch.cat([*(g.detach().reshape(-1).float().cpu() for g in grads), used.float(), tail])

    def unpack_gradients(self, message: Tensor) -> float:
        """Makes every .grad that of the message, and returns its loss. A parameter that no rank used keeps no gradient.

        So the optimizer leaves such a parameter alone, as on one process.
        """
        pieces = message[: self.num_gradients].split([p.numel() for p in self._parameters])
        used = message[self.num_gradients : -2].tolist()
        for parameter, piece, anyone in zip(self._parameters, pieces, used, strict=True):
            parameter.grad = piece.view_as(parameter).to(parameter) if anyone else None
        return float(message[-2])

    def pack_weights(self, version: int, loss_scale: float) -> Tensor:
        """(down_elems,): all weights and buffers, then their version and the loss scale."""
        flat = [t.detach().reshape(-1).float().cpu() for t in self._weights]
        return torch.cat([*flat, torch.tensor([float(version), loss_scale])])

    @torch.no_grad()
    def unpack_weights(self, message: Tensor) -> tuple[int, float]:
        """Copies the message into the model's weights and buffers; returns (their version, the loss scale)."""
        pieces = message[: self.num_weights].split([t.numel() for t in self._weights])
        for tensor, piece in zip(self._weights, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))
        return int(message[-2]), float(message[-1])
