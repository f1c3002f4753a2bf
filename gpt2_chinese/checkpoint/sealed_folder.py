"""Folders that are complete or absent: sealed by a manifest, flushed to the disk, put in place by a rename.

    manifest.json   {"files": {NAME: {"bytes": ..., "sha256": ...}}, "sha256": of that table}

After a kill at any moment the old folder or the new one is complete. A folder that is replaced is called NAME.old until the
new one is in place; the search for checkpoints looks there too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from durable import folders
from durable.files import flush, write_json
from gpt2_chinese.checkpoint import verdicts
from gpt2_chinese.errors import RunError

MANIFEST = "manifest.json"
SLACK_BYTES = 1 << 20  # configuration, state, manifest, and a disk's own book-keeping


def seal(folder: Path) -> None:
    """Writes the manifest of a folder and flushes all of it to the disk."""
    below = sorted(path for path in folder.rglob("*") if path != folder / MANIFEST)
    entries = {path.relative_to(folder).as_posix(): folders.digest(path) for path in below if path.is_file()}
    write_json(folder / MANIFEST, {"files": entries, "sha256": _digest_of(entries)})
    for path in [*below, folder / MANIFEST, folder]:
        flush(path)


def listed(folder: Path) -> list[str]:
    """The names of the files in the manifest; call `damage` first."""
    return list(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"])


def damage(path: Path) -> str | None:
    """How a checkpoint or a final/ folder is damaged; None if every file matches the manifest.

    Files that the manifest does not list are not checked, and nothing reads them.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        entries = manifest["files"]
        if manifest["sha256"] != _digest_of(entries):
            return f"{MANIFEST} does not match its own checksum"
        for name in entries:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                return f"{MANIFEST} names {name}, outside of the folder"
        if wrong := folders.first_damage(path, entries):
            return " ".join(wrong)
        about = "state.json" if "state.json" in entries else "run.json"
        # of an export for older programs, of an adapter, of an export in several files
        others = ("pytorch_model.bin", "adapter_model.safetensors", "model.safetensors.index.json")
        of_weights = [name for name in entries if name.startswith("parts/") or name in others]
        weights = of_weights[0] if of_weights else "model.safetensors"
        for name in ("config.json", about, weights):
            if name not in entries:
                return f"{MANIFEST} does not list {name}"
        content = json.loads((path / about).read_text(encoding="utf-8"))
        if about == "state.json" and not isinstance(content.get("step"), int):
            return f"{about} names no step"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or unreadable"
    return None


_found_whole: dict[Path, list[tuple[str, int, int]]] = {}  # each with its files' sizes and times at that check


def new_damage(path: Path) -> str | None:
    """`damage`, without reading a folder again that was whole and whose files still have the same sizes and times.

    Another process of this job may have read it (verdicts.py).
    """
    look = _look(path)
    if not look:
        return damage(path)
    told = (None,) if _found_whole.get(path) == look else verdicts.of_others(path, look)
    reason = told[0] if told else damage(path)
    verdicts.note(path, look, reason)
    if reason is None:
        _found_whole[path] = look
    return reason


def _look(path: Path) -> list[tuple[str, int, int]]:
    """Empty for a folder that is missing, or that another process changes at this moment."""
    with contextlib.suppress(OSError):
        return sorted((str(f), s.st_size, s.st_mtime_ns) for f in path.rglob("*") if f.is_file() for s in [f.stat()])
    return []


def digest(file: Path, folder: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file in `folder`: from the manifest if the folder is whole, else by reading the file."""
    name = file.relative_to(folder).as_posix()
    if (folder / MANIFEST).is_file() and new_damage(folder) is None and name in listed(folder):
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"][name]
    return folders.digest(file)


def put_in_place(staging: Path, target: Path) -> None:
    """Renames a sealed folder to `target`. The folder that it replaces stays whole until then, if only as TARGET.old."""
    old = target.with_name(f"{target.name}.old")
    if target.exists() and old.exists() and damage(target) is not None and damage(old) is None:
        shutil.rmtree(target)  # a kill came between two renames, and a damaged folder came later
    folders.put_in_place(staging, target, old)  # while both are whole, the older one may be half removed
    _found_whole[target] = _look(target)


def check_space(folder: Path, num_bytes: int) -> None:
    """Raises RunError, with both numbers, if the disk of `folder` has less room than `num_bytes` and SLACK_BYTES."""
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if num_bytes + SLACK_BYTES > free:
        raise RunError(
            f"no room to write {folder}: {_megabytes(num_bytes + SLACK_BYTES)} needed, {_megabytes(free)} free; make room "
            "on that disk, or lower --keep-last"
        )


def _megabytes(number: int) -> str:
    return f"{number / 1e6:,.1f} MB"


def _digest_of(entries: Any) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
