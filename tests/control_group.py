"""Control groups for tests, of version 1 or 2, on machines that let a test make one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from durable.control_group import folders
from tests.limits import wait_until


@contextmanager
def limited_group(controller: str, version_1: dict[str, str], version_2: dict[str, str]) -> Iterator[Path]:
    """The folder of a new group whose files hold these texts; skips the test where none can be made."""
    folder = None
    try:
        *_, outermost = (each for each in folders(controller) if (each / "cgroup.procs").exists())
        folder = outermost / f"gpt2_chinese_{os.getpid()}"
        folder.mkdir()
        for name, text in (version_1 if outermost.name == controller else version_2).items():
            (folder / name).write_text(text)
    except (OSError, ValueError) as error:
        if folder is not None and folder.exists():
            folder.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield folder
    finally:
        wait_until(lambda: _is_removed(folder), f"the last process of {folder} to be gone")


def _is_removed(folder: Path) -> bool:
    with suppress(OSError):
        folder.rmdir()
    return not folder.exists()


def join(group: Path) -> None:
    """Moves this process into the group; its children will be there, too."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
