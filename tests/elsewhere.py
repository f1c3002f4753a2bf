"""Tensors of a made-up device: an operation on them and on host memory raises, as on a GPU, and transfers are counted.

The bytes are in host memory, so results are those of the CPU. `Tensor.device` names an accelerator that is no GPU of NVIDIA:
the code under test takes its branches for other devices than the CPU, and none that compiles CUDA.
"""

from __future__ import annotations

from typing import Any

import torch

TO_HOST = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__int__}


class Elsewhere(torch.Tensor):
    """A tensor of the made-up device; elsewhere() makes one.

    Attributes:
        to_host: number of transfers to host memory for which the host waits, by all tensors.
        from_host: number of tensors made from Python's numbers, whose transfer the host waits for.
    """

    to_host = from_host = 0
    device = property(lambda self: torch.device("xpu", 0))    # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cpu or (func is torch.Tensor.to and "cpu" in map(str, args[1:])):
            cls.to_host += 1
            dtype = next((arg for arg in args[1:] if isinstance(arg, torch.dtype)), args[0].dtype)
            with torch._C.DisableTorchFunctionSubclass():
                return args[0].as_subclass(torch.Tensor).to(dtype, copy=True)
        if func is torch.Tensor.copy_:    # between devices, and counted if it arrives in host memory
            waits = not kwargs.get("non_blocking", False)
            cls.to_host += waits and not isinstance(args[0], cls)
            with torch._C.DisableTorchFunctionSubclass():
                args[0].as_subclass(torch.Tensor).copy_(args[1].as_subclass(torch.Tensor))
            return args[0]
        if str(kwargs.get("device")) == "cpu":    # empty_like(tensor, device="cpu")
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs).as_subclass(torch.Tensor)
        cls.to_host += func in TO_HOST
        cls.from_host += func is torch.Tensor.new_tensor
        both = [*args, *kwargs.values()]
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [each for one in both for each in (one if isinstance(one, list | tuple) else [one])
                       if isinstance(each, torch.Tensor) and each.dim()]
        if len({isinstance(each, cls) for each in tensors}) == 2:
            raise RuntimeError(f"{func.__name__}: expected all tensors to be on the same device, found xpu:0 and cpu")
        return super().__torch_function__(func, types, args, kwargs)


def elsewhere(tensor: torch.Tensor) -> Elsewhere:
    """A copy of a tensor on the made-up device."""
    return tensor.clone().as_subclass(Elsewhere)
