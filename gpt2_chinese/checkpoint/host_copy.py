"""A copy of a run's state in host memory, which is written while training changes the state itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class HostCopy:
    """Copies of tensors by name, float32, in host memory.

    The memory is kept for the next copy: the first use of new memory takes longer than the copy.
    """

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies the tensors, of any device and dtype; the result is valid until the next call."""
        on_gpu = [tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"]
        held = {}
        for name, tensor in tensors.items():
            found = self._held.get(name)
            if found is None or found.shape != tensor.shape:
                found = torch.empty(tensor.shape, dtype=torch.float32, pin_memory=tensor.device.type == "cuda")
            held[name] = found
        self._held = held
        if held:
            torch._foreach_copy_(list(held.values()), [t.detach() for t in tensors.values()], non_blocking=bool(on_gpu))
        for device in set(on_gpu):
            torch.cuda.synchronize(device)
        return dict(held)
