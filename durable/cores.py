"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

from durable.control_group import folders


def num_cores(root: Path = Path("/")) -> int:
    """Cores of the process's affinity, or of the CPU time that its control groups give it, whichever are fewer.

    `docker run --cpus`, Kubernetes and systemd limit the time alone: such a process sees all cores of the machine.

    Args:
        root: of the file system with proc and sys.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(math.ceil(share) for folder in folders("cpu", root) for share in _share(folder))]))


def _share(folder: Path) -> list[float]:
    """CPU seconds per second that a group may use; nothing without a limit."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return [int(quota) / int(period)] if int(quota) > 0 else []
    except (OSError, ValueError):  # no such group, or no limit: "max"
        return []


def limit_threads() -> None:
    """Lets torch compute with no more threads than cores that this process may use; OMP_NUM_THREADS takes precedence.

    torch counts the cores of the affinity. Its threads wait for each other in a loop, which uses up a limited CPU time: with
    two threads for the time of one core, a step took twice as long as with one.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > num_cores():
        torch.set_num_threads(num_cores())
