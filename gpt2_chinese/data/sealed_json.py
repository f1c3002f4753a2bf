"""Detects damaged files: JSON that contains its own checksum, and checksums of large files by blocks.

Every byte is checked, with SHA-256, at every start. Checking by size and time would be quicker and would miss a flipped
bit. What makes it bearable for gigabytes is that the blocks are read by all cores at once (about 1 GB a second and core),
from the page cache where another process has just read the same file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from durable.cores import num_cores

BLOCK_BYTES = 4 << 20


def sealed(content: dict[str, Any]) -> bytes:
    """JSON with a checksum of itself; `unsealed` takes these bytes back and no others."""
    body = json.dumps(content, sort_keys=True)
    checksum = hashlib.sha256(body.encode()).hexdigest()
    return f'{{"content": {body},\n"sha256": "{checksum}"}}\n'.encode()


def unsealed(data: bytes) -> dict[str, Any] | None:
    """Returns the sealed value, or None if any bit differs."""
    try:
        content = json.loads(data)["content"]
        return content if sealed(content) == data else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def block_digests(pieces: Iterable[bytes]) -> list[str]:
    """SHA-256 of each block of BLOCK_BYTES of what the pieces make up, one after the other."""
    digests: list[str] = []
    digest, room = hashlib.sha256(), BLOCK_BYTES
    for piece in pieces:
        view = memoryview(piece)
        while len(view):
            digest.update(view[:room])
            taken = min(room, len(view))
            view, room = view[taken:], room - taken
            if room == 0:
                digests.append(digest.hexdigest())
                digest, room = hashlib.sha256(), BLOCK_BYTES
    return digests if room == BLOCK_BYTES else [*digests, digest.hexdigest()]


def file_digests(path: Path) -> list[str]:
    """The same of a file; several threads, each with one block in memory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        starts = range(0, os.fstat(handle).st_size, BLOCK_BYTES)

        def digest(start: int) -> str:
            return hashlib.sha256(os.pread(handle, BLOCK_BYTES, start)).hexdigest()

        if len(starts) < 2:
            return [digest(start) for start in starts]
        with ThreadPoolExecutor(min(len(starts), num_cores())) as pool:
            return list(pool.map(digest, starts))
    finally:
        os.close(handle)
