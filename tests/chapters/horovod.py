"""For tests under horovodrun: whether Horovod is installed, and which process has which rank."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest


def _version() -> str | None:
    try:
        return importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None


# tests/run.sh builds Horovod. If the build fails, tests/run.sh prints that, and these tests are skipped.
needs_horovod = pytest.mark.skipif(_version() is None, reason="Horovod is not built: bash scripts/build_horovod.sh")


def horovodrun(num_ranks: int, *command: object) -> list[str]:
    """The command line of `horovodrun` for a Python program on this machine."""
    script = Path(sys.executable).with_name("horovodrun")
    return [str(script), "--gloo", "-np", str(num_ranks), "-H", f"localhost:{num_ranks}", sys.executable, *map(str, command)]


def rank_pids(output: Path) -> dict[int, int]:
    """{HOROVOD_RANK: process number} of the ranks whose --output-dir is `output`.

    The rank is the one at the start: an elastic run may give a process another rank, but not another environment.
    """
    pids = {}
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_text().split("\0") if folder.name.isdigit() else []
            if len(words) < 2 or not words[1].endswith("train.py") or str(output) not in words:
                continue
            variables = dict(line.split("=", 1) for line in (folder / "environ").read_text().split("\0") if "=" in line)
        except OSError:  # the process has ended, or belongs to another user
            continue
        # The launcher's process has the same words on its command line, but no rank.
        if "HOROVOD_RANK" in variables and os.path.samefile(folder / "exe", sys.executable):
            pids[int(variables["HOROVOD_RANK"])] = int(folder.name)
    return pids
