"""Files that are complete or absent: written under another name in the same folder, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from durable.printable import utf8


@contextlib.contextmanager
def replacing(path: Path, per_process: bool = False) -> Iterator[Path]:
    """Yields the name of a staging file next to `path`, and renames that file to `path` when the block ends.

    Args:
        path: the final name.
        per_process: the staging file has the process id in its name, so that several processes can write `path` at once.
            Without it the name is NAME.tmp, and the next writer overwrites what a killed one left.

    Raises:
        OSError: from the block or the rename; the staging file is removed.
    """
    staging = path.with_name(f"{path.name}.tmp{os.getpid() if per_process else ''}")
    try:
        yield staging
        os.replace(staging, path)
    except OSError:
        with contextlib.suppress(OSError):
            staging.unlink()
        raise


def write_json(path: Path, content: Any) -> None:
    """Writes readable JSON, complete or not at all."""
    with replacing(path) as staging:
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        staging.write_text(utf8(text), encoding="utf-8")


def write_flushed(path: Path, data: bytes) -> None:
    """Writes a file, complete or not at all: its content is on the disk before the rename."""
    with replacing(path) as staging:
        staging.unlink(missing_ok=True)  # a killed process of another user may have left it, and we may not open it
        with staging.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())


def flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
