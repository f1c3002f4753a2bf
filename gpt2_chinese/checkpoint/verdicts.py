"""Which folders are whole, found out once for all processes of a job, because a large checkpoint takes minutes to read.

    the process that the user starts        reads the files; an environment variable tells its ranks what it found
    rank 0 under torchrun, srun, mpirun     reads the files; --output-dir/.checked.json tells the other ranks what it found
    the other ranks there                   wait for that file

A verdict holds while the files of the folder have the same sizes and times.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from durable.files import write_json
from gpt2_chinese.distributed.horovod_launcher import WORKERS_VARIABLE
from gpt2_chinese.errors import LAUNCHED_VARIABLE

VARIABLE = "GPT2_CHINESE_CHECKED"  # {PATH: [digest of sizes and times, damage or null]}
FILE = ".checked.json"  # the same
MOST = 32  # newest verdicts that are told: the kernel limits a variable to 128 KiB
WAIT_S = 600.0  # then a rank reads the files itself: rank 0 may see another disk
Look = list[tuple[str, int, int]]

_found: dict[str, tuple[str, str | None]] = {}
_shared: list[Path] = []  # the file, once `share` was called


def share(folder: Path) -> None:
    """Names the folder through which ranks of another launcher tell each other what they found: --output-dir."""
    _shared[:] = [folder / FILE]


def note(path: Path, look: Look, damage: str | None) -> None:
    """Notes what this process found, and tells the processes that wait for it."""
    _found[str(path.absolute())] = _digest(look), damage
    while len(_found) > MOST:
        del _found[next(iter(_found))]
    if os.environ.get("RANK") == "0" and _shared:
        with contextlib.suppress(OSError):  # a rank that waits in vain reads the files itself
            _shared[0].parent.mkdir(parents=True, exist_ok=True)
            write_json(_shared[0], _found)


def hand_over() -> None:
    """Tells the processes that this one will start. A rank keeps what it was told: it starts none."""
    if "RANK" not in os.environ and _found:
        os.environ[VARIABLE] = json.dumps(_found)


def forget() -> None:
    """Removes the file, once all ranks have their answers. Called by one process alone."""
    while _shared:
        _shared.pop().unlink(missing_ok=True)


def of_others(path: Path, look: Look) -> tuple[str | None] | None:
    """(what another process of this job found,), or None if this process has to read the files."""
    wanted = str(path.absolute()), _digest(look)
    with contextlib.suppress(ValueError):
        if told := _entry(json.loads(os.environ.get(VARIABLE, "{}")), *wanted):
            return told
    # A worker that joins an elastic run starts alone. Under our own launcher all was said at the start.
    alone = os.environ.get("RANK", "0") == "0" or LAUNCHED_VARIABLE in os.environ or WORKERS_VARIABLE in os.environ
    end = time.monotonic() + WAIT_S
    while not alone and _shared and time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError):
            if told := _entry(json.loads(_shared[0].read_text(encoding="utf-8")), *wanted):
                return told
        time.sleep(0.02)
    return None


def _entry(found: Any, path: str, digest: str) -> tuple[str | None] | None:
    entry = found.get(path) if isinstance(found, dict) else None
    return (entry[1],) if entry and entry[0] == digest else None


def _digest(look: Look) -> str:
    return hashlib.sha256(json.dumps(look).encode()).hexdigest()
