"""How torch's allocator holds near memory on a GPU: segments that grow, and the bytes that it reserves.

Near has no arena of its own. With `near_memory` activations and chunks share one number of bytes, and chunks' part changes
at every moment: an arena of their largest part would take bytes that activations need when chunks have least. An arena
would also decide by addresses: a block could be refused for lack of a hole although its bytes fit, and which block is
evicted would depend on earlier addresses. Budgets, plans and the equal decisions of ranks count bytes alone.

Instead torch places blocks in segments that grow page by page ("expandable segments", PyTorch's notes on CUDA memory
management), where freed chunks and activations become one hole. The report says what the allocator reserves beyond
near_memory. Neither changes a number of the training.
"""

import os

import torch

from pstar.memory.tier import format_bytes

SETTING = "PYTORCH_ALLOC_CONF"
OLDER = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
GROWING = "expandable_segments:True"


def grow_segments() -> bool:
    """Lets this process and its children allocate GPU memory in segments that grow; returns whether that is set here now.

    Call it before CUDA starts, when torch reads the setting. Once CUDA has started, torch is told: what it allocated before
    stays as it is. (A program that had asked CUDA for its memory first ran out of memory with 3 of 24 GB in holes.) A
    setting of the user's own, under any of its names, stays.
    """
    if any(name in os.environ for name in (SETTING, *OLDER)):
        return os.environ.get(SETTING) == GROWING
    os.environ[SETTING] = GROWING
    if torch.cuda.is_initialized():
        try:
            torch._C._accelerator_setAllocatorSettings(GROWING)
        except (AttributeError, RuntimeError):    # another torch, or an allocator that cannot
            return False
    return True


def reserved_bytes(device: torch.device) -> int | None:
    """The most bytes of a GPU that torch's allocator has held, used or not; None without a GPU."""
    return None if device.type == "cpu" else torch.accelerator.max_memory_reserved(device)


class Reserved:
    """The largest reserved_bytes so far. (torch's own peak is reset whenever activations are measured.)

    Args:
        device: near's device.
        near_memory: bytes that chunks and activations may take together; None: there is no such bound.
    """

    def __init__(self, device: torch.device, near_memory: int | None):
        self.device, self.near_memory = device, near_memory
        self.peak_bytes: int | None = None

    def look(self) -> int | None:
        """Measures; returns the largest value so far, None without a GPU."""
        now = reserved_bytes(self.device)
        if now is not None:
            self.peak_bytes = max(now, self.peak_bytes or 0)
        return self.peak_bytes

    def rows(self) -> list[tuple[str, str]]:
        """(name, value) rows for a report; none without a GPU."""
        peak = self.look()
        if peak is None:
            return []
        text = f"{format_bytes(peak)} reserved at most"
        if self.near_memory is not None:
            more = peak - self.near_memory
            text += f", {format_bytes(abs(more))} {'more' if more > 0 else 'less'} than near_memory"
            if more > 0:
                text += " (holes between blocks, and libraries' buffers): if memory is scarce, give that much less"
        return [("allocator", text)]
