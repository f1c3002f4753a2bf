"""Folders that are complete or absent: their files listed with checksums, the folder put in place by a rename.

    {NAME: {"bytes": ..., "sha256": ...}}     the list, which the caller stores in its manifest
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from durable.files import flush


def digest(path: Path) -> dict[str, Any]:
    """The list's entry for a file: its size and its SHA-256."""
    with path.open("rb") as stream:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def first_damage(folder: Path, files: Mapping[str, Any]) -> tuple[str, str] | None:
    """(the first file that differs from the list, how it differs); None if no file does. Raises OSError."""
    for name, entry in files.items():
        if not (folder / name).is_file():
            return name, "is missing"
        if digest(folder / name) != entry:
            return name, "does not match its checksum"
    return None


def put_in_place(staging: Path, target: Path, old: Path) -> None:
    """Renames a finished folder to `target`. An existing target is called `old` until then, and is removed afterwards."""
    if target.exists():
        remove(old)
        os.rename(target, old)
    os.rename(staging, target)
    flush(target.parent)
    remove(old)


def remove(path: Path) -> None:
    """Removes a folder, a file or a link, if it exists. Files of the folder that cannot be removed stay."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
