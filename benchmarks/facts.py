"""The facts on every page of numbers: processor, cores, versions, date and command; not the machine's name."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
from pathlib import Path


def processor() -> str:
    """The name of the processor, or its architecture if the system does not give the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions(**more: str) -> str:
    """The versions of torch, of `more` ({name: version}), and of Python, as text."""
    import torch

    found = {"torch": torch.__version__} | more | {"Python": platform.python_version()}
    return ", ".join(f"{name} {version}" for name, version in found.items())


def when_and_how(script: str, argv: list[str], program: str = "bash") -> list[tuple[str, str]]:
    """(name, fact) of the date, and of the command that renews the page."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return [("date", now), ("command", f"`{shlex.join([program, f'benchmarks/{script}', *argv])}`")]


def bullets(facts: list[tuple[str, str]]) -> list[str]:
    """A Markdown list of (name, fact)."""
    return [f"- {name}: {fact}" for name, fact in facts]


def shortened(line: str, most: int) -> str:
    """The line; if it has more than `most` characters, its first words and dots."""
    return line if len(line) <= most else f"{line[:most].rsplit(' ', 1)[0]} ..."


def busy_seconds() -> float:
    """CPU seconds of all cores together since the machine's start, steal time of a virtual machine's host included.

    0 if the system does not count them.
    """
    try:
        fields = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0
    user, nice, system, _idle, _wait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
