"""The folder that a conversion writes: complete or absent, never half.

    OUTPUT/train/part-00000.json ...    arrays of strings, an item a line
    OUTPUT/valid/part-00000.json ...
    OUTPUT/report.json

Everything is written into the hidden folder `.OUTPUT.converting` next to it, synced, and renamed as a whole at the end. A
killed conversion leaves that folder; the next conversion to the same OUTPUT empties it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from durable.files import flush
from durable.folders import put_in_place, remove
from gpt2_chinese.errors import UserError
from gpt2_chinese.files import reason

PARTS = ("train", "valid")
OURS = {*PARTS, "report.json"}


class OutputFolder:
    """A folder under construction.

    Attributes:
        final: its path once it is complete.
        staging: its path while it is written.
    """

    def __init__(self, final: Path, overwrite: bool) -> None:
        """Raises UserError when `final` must not be replaced, cannot be written, or is written by another conversion."""
        self.final = Path(os.path.abspath(final))
        self.staging = self.final.with_name(f".{self.final.name}.converting")
        self.old = self.final.with_name(f".{self.final.name}.old")
        self._check(overwrite)
        try:
            self.staging.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise UserError(f"--output {final} cannot be written: {reason(error)}; give another folder") from None
        self._lock = os.open(self.staging, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            same = os.path.samestat(os.fstat(self._lock), os.stat(self.staging))
        except OSError:
            same = False
        if not same:  # locked, or renamed since by the conversion that had the lock
            os.close(self._lock)
            raise UserError(f"--output {self.final} is being written by another conversion: wait for it")
        for leftover in self.staging.iterdir():
            remove(leftover)

    def _check(self, overwrite: bool) -> None:
        if self.old.is_dir() and not self.final.exists():
            os.rename(self.old, self.final)  # killed between the two renames of finish()
        if not os.path.lexists(self.final):
            return
        if not self.final.is_dir() or self.final.is_symlink():
            raise UserError(f"--output {self.final} is no folder: give another name")
        held = {path.name for path in self.final.iterdir()}
        if held and not overwrite:
            raise UserError(f"--output {self.final} is not empty: give another folder, or --overwrite")
        if held - OURS:
            other = sorted(held - OURS)[0]
            raise UserError(f"--output {self.final} holds {other!r}, which no conversion wrote: it is not overwritten")

    def finish(self) -> None:
        """Syncs the folder and renames it to `final`; removes the folder that had this name before."""
        for path in sorted(self.staging.rglob("*"), reverse=True):
            flush(path)
        flush(self.staging)
        put_in_place(self.staging, self.final, self.old)
        os.close(self._lock)

    def discard(self) -> None:
        """Removes what was written."""
        remove(self.staging)
        os.close(self._lock)


class Shards:
    """Array-JSON files of about `shard_bytes` in one folder; the first item creates the folder."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self.folder, self.shard_bytes = folder, shard_bytes
        self.files = self.items = self.characters = 0
        self._stream: BinaryIO | None = None
        self._written = 0

    def add(self, line: bytes, characters: int) -> None:
        """Writes an item: a text as JSON, and the number of its characters."""
        if self._stream is not None and self._written + len(line) > self.shard_bytes:
            self.close()
        if self._stream is None:
            self.folder.mkdir(exist_ok=True)
            self._stream = (self.folder / f"part-{self.files:05d}.json").open("wb", buffering=1 << 18)
            self.files += 1
            self._written = 0
        self._stream.write((b",\n" if self._written else b"[\n") + line)
        self._written += len(line) + 2
        self.items += 1
        self.characters += characters

    def extend(self, lines: list[bytes], characters: int) -> None:
        """Writes items, with the number of their characters in all; in one piece where they fit into the open file."""
        size = sum(map(len, lines)) + 2 * len(lines)
        if not lines:
            return
        if self._stream is None or self._written + size > self.shard_bytes:
            for line in lines:
                self.add(line, 0)
        else:
            self._stream.write(b",\n" + b",\n".join(lines))
            self._written += size
            self.items += len(lines)
        self.characters += characters

    def close(self) -> None:
        """Completes the open file, if there is one."""
        if self._stream is not None:
            self._stream.write(b"\n]\n")
            self._stream.close()
            self._stream = None
