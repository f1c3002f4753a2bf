"""The line about a rank that failed. Nothing here imports torch."""

from __future__ import annotations

import signal
from pathlib import Path


def describe(rank: int, status: int, memory_ran_out: bool = False) -> str:
    """One line about a failed rank, for both launchers.

    Args:
        rank: its number.
        status: its exit status; a signal is negative, as in subprocess.
        memory_ran_out: the system has killed processes during the job, to get their memory (see `num_killed_for_memory`).
    """
    how = f" ({signal.Signals(-status).name})" if status < 0 else ""
    if memory_ran_out and status == -signal.SIGKILL:
        how += ": memory ran out, and the system killed it"
    return f"rank {rank} failed with status {status}{how}; its output is above"


def num_killed_for_memory(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Processes that the system has killed for their memory since its start (man proc_vmstat); 0 if it does not say."""
    try:
        lines = [line.split() for line in vmstat.read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(words[1]) for words in lines if words[0] == "oom_kill")
