"""The line about a rank that failed. Nothing here imports torch."""

from __future__ import annotations

import signal
from pathlib import Path

from durable.control_group import folders, numbers


def describe(rank: int, status: int, memory_ran_out: bool = False) -> str:
    """One line about a failed rank, for both launchers.

    Args:
        rank: its number.
        status: its exit status; a signal is negative, as in subprocess.
        memory_ran_out: the system has killed processes during the job because memory ran out (see `num_killed_for_memory`).
    """
    how = ""
    if status < 0:
        names = {each.value: each.name for each in signal.Signals}
        how = f" ({names.get(-status, f'signal {-status}')})"
    if memory_ran_out and status == -signal.SIGKILL:
        how += ": memory ran out, and the system killed it"
    return f"rank {rank} failed with status {status}{how}; its output is above"


def num_killed_for_memory(root: Path = Path("/")) -> int:
    """Processes of this control group (without one: of the machine) that the system has killed because memory ran out.

    Args:
        root: of the file system with proc and sys (Linux: man proc_vmstat, admin-guide/cgroup-v1/memory and cgroup-v2).
    """
    for folder in folders("memory", root):
        for name in ("memory.events", "memory.oom_control"):
            if (count := numbers(folder / name).get("oom_kill")) is not None:
                return count
    return numbers(root / "proc/vmstat").get("oom_kill", 0)
