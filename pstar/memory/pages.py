"""Anonymous pages of host memory, and how many bytes of it are left.

No huge pages are asked for: with 2 GiB in buffers of 26 MiB on a machine in use, their first write took 2.2 s in place of
0.9 s, because the system first moves other pages out of the way.
"""

import mmap
from pathlib import Path

import torch

from durable.control_group import folders, numbers

PAGE_BYTES = mmap.PAGESIZE


def whole_pages(num_bytes: int) -> int:
    """The bytes of the pages that hold num_bytes."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class Pages(mmap.mmap):
    """New anonymous pages of this process, zeros; unmapped when the last object that refers to them goes.

    Raises OSError if the system has no memory for them.
    """

    def __new__(cls, num_bytes: int, *_: object) -> "Pages":
        return super().__new__(cls, -1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __init__(self, num_bytes: int) -> None:
        """The arguments are those of __new__."""


def buffer_of(num_bytes: int) -> torch.Tensor:
    """num_bytes in separate pages, uint8, zeros. Raises OSError without memory for them."""
    return torch.frombuffer(Pages(num_bytes), dtype=torch.uint8)


def is_out_of_host_memory(error: BaseException) -> bool:
    """Whether an error says that the system refused host memory; torch has no class for that."""
    return "can't allocate memory" in str(error) or (isinstance(error, MemoryError) and not str(error))


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of host memory that this process may still take, swap included: what the system has available, or what the
    limits of its control groups leave, whichever is less. None if the system does not say.

    root: of the file system with proc and sys (Linux: man proc_meminfo, admin-guide/cgroup-v1/memory and cgroup-v2).
    """
    meminfo = numbers(root / "proc/meminfo")
    if "MemAvailable:" not in meminfo:
        return None
    free = [1024 * (meminfo["MemAvailable:"] + meminfo.get("SwapFree:", 0))]
    for folder in folders("memory", root):
        for limit, used, cache in (("memory.max", "memory.current", "inactive_file"),
                                   ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")):
            try:
                left = int((folder / limit).read_text()) - int((folder / used).read_text())
            except (OSError, ValueError):    # not this version of control groups, or no limit: "max"
                continue
            free.append(max(0, left + numbers(folder / "memory.stat").get(cache, 0)))
    return min(free)
