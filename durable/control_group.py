"""The control groups of Linux, with which containers, Slurm and systemd limit a process (man cgroups)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """The folders of this process's control group and of those around it, of version 2 and 1: each may have a limit.

    In a container /proc may name a group that the container does not see; its own is then the outermost one.

    Args:
        controller: "cpu" or "memory".
        root: of the file system with proc and sys.
    """
    groups = {"": PurePosixPath(), controller: PurePosixPath()}  # version 2 has one folder for all controllers
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # no Linux
        lines = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        for name in groups.keys() & controllers.split(","):
            if ".." not in path.split("/"):  # as for a process that came into the container from outside
                groups[name] = PurePosixPath(path.lstrip("/"))
    for name, group in groups.items():
        for each in (group, *group.parents):
            yield root / "sys/fs/cgroup" / name / each


def numbers(path: Path) -> dict[str, int]:
    """A file of lines that begin with a name and a number, as memory.stat and /proc/meminfo; empty without the file."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
