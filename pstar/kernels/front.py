"""The kernels' public functions: check the arguments, and choose the compiled kernel or torch operations by device."""

from __future__ import annotations

import torch

from pstar.errors import ArgumentError
from pstar.kernels import cpu, cuda
from pstar.kernels.adam import NORM_BLOCK, norm_blocks_with_torch, squared_norm_with_torch, update_with_torch
from pstar.kernels.update import GRAD_KINDS, AdamUpdate


def prepare(device: torch.device) -> None:
    """Looks for the compiled kernels of a GPU now, once; without them, one line in the log says why."""
    if device.type == "cuda":
        cuda.library()


def adam_step(param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, **fields) -> None:
    """One Adam update in place; fields are the others of AdamUpdate. Raises ArgumentError, which names the field."""
    adam_steps([AdamUpdate(param, grad, exp_avg, exp_avg_sq, **fields)])


def adam_steps(updates: list[AdamUpdate], implementation: str | None = None, num_threads: int | None = None) -> None:
    """Adam updates of many runs, in as few passes and launches as their kinds allow. No two runs may share memory.

    Args:
        updates: the runs; those on the CPU are done on return, those on CUDA are queued on the device's current stream.
        implementation: None for the fastest available; "torch"; or a code path of the CPU ("plain", "avx2", "avx512").
        num_threads: threads of a CPU kernel; None: torch.get_num_threads().

    Raises ArgumentError, which names the field.
    """
    by_kind: dict[tuple, list[AdamUpdate]] = {}
    for update in updates:
        update.check()
        if update.param.numel():
            by_kind.setdefault((update.param.device, *update.kinds()), []).append(update)
    # CUDA first: the GPU computes while the CPU updates the rest.
    for (device, *_), group in sorted(by_kind.items(), key=lambda item: item[0][0].type == "cpu"):
        if implementation != "torch" and device.type == "cpu" and cpu.library() is not None:
            cpu.update_on_cpu(group, implementation, num_threads)
        elif implementation != "torch" and device.type == "cuda" and cuda.library() is not None:
            cuda.update_on_cuda(group)
        else:
            for update in group:
                update_with_torch(update)


def squared_norms(grads: list[torch.Tensor], implementation: str | None = None) -> torch.Tensor:
    """The sum of squares of each gradient, float64, (len(grads),), on their device; does not wait for a GPU.

    A sum is not finite exactly if its gradient has an infinity or a NaN: the overflow check needs no other pass. fp32, fp16
    and bf16. The order of additions is fixed: threads, code paths and devices do not change a bit.
    """
    _check_grads(grads)
    if not grads:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    device = grads[0].device
    if implementation != "torch" and device.type == "cpu" and cpu.library() is not None:
        sums = [cpu.squared_norm_on_cpu(grad, implementation) for grad in grads]
        return torch.tensor(sums, dtype=torch.float64, device="cpu")
    if implementation != "torch" and device.type == "cuda" and cuda.library() is not None:
        return cuda.squared_norms_on_cuda(grads)
    return torch.stack([squared_norm_with_torch(grad) for grad in grads])


def store_squared(place: torch.Tensor, grad: torch.Tensor, add: bool = False, num_threads: int | None = None,
                  implementation: str | None = None) -> float | None:
    """Copies a gradient to its place in a chunk, or adds it to the place; sums the place's squares if that is cheap.

    Args:
        place: of grad's shape and device, contiguous, fp32, bf16 or fp16.
        grad: any layout, any floating dtype.
        num_threads: threads of a CPU kernel; None: torch.get_num_threads().

    Returns:
        the sum of squares of place, if one pass of a compiled kernel does both: on the CPU, with grad contiguous, and place
        fp32 or, to copy, of grad's dtype. Else None: torch has stored the gradient, and the squares are not summed.
    """
    kernel_stores = place.dtype == torch.float32 or (place.dtype == grad.dtype and not add)
    if (implementation != "torch" and place.device.type == grad.device.type == "cpu" and grad.dtype in GRAD_KINDS
            and kernel_stores and grad.is_contiguous() and cpu.library() is not None):
        return cpu.squared_norm_on_cpu(grad, implementation, place, add, num_threads)
    if add:
        place.add_(grad)
    else:
        place.copy_(grad)
    return None


def norm_blocks(grad: torch.Tensor, implementation: str | None = None) -> torch.Tensor:
    """The sum of squares of each run of NORM_BLOCK elements of grad, float64, (ceil(N / NORM_BLOCK),), on its device.

    squared_norms adds these, in the order of sum_blocks: a rank's part of a gradient that begins at a multiple of NORM_BLOCK
    gives the same block sums as the whole gradient. Raises ArgumentError as squared_norms does.
    """
    _check_grads([grad])
    if implementation != "torch" and grad.device.type == "cpu" and cpu.library() is not None:
        sums = torch.empty(-(-grad.numel() // NORM_BLOCK), dtype=torch.float64, device="cpu")
        cpu.norm_blocks_on_cpu(grad, sums, implementation)
        return sums
    if implementation != "torch" and grad.device.type == "cuda" and cuda.library() is not None:
        return cuda.norm_blocks_on_cuda(grad)
    return norm_blocks_with_torch(grad)


def _check_grads(grads: list[torch.Tensor]) -> None:
    for number, grad in enumerate(grads):
        if grad.dtype not in GRAD_KINDS or not grad.is_contiguous() or grad.device != grads[0].device:
            raise ArgumentError(f"grads[{number}]: a contiguous fp32, fp16 or bf16 tensor on the device of the first "
                                f"expected, found {grad.dtype} on {grad.device}, strides {grad.stride()}")
