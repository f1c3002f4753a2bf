"""The collectives and messages of this process that wait for other ranks, as its sources know them. Sends nothing.

A source knows calls of one kind: torch's process groups, pstar's shared memory, or messages between two ranks (`message`).
`hang_report` reads them when a job hangs. Knows no torch.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

NUM_NAMES, NUM_CALLS = 512, 64  # kept of this process


@dataclass(frozen=True)
class Call:
    """A collective, or a message, of this rank.

    Attributes:
        operation: as "all_reduce".
        what: which bucket, chunk or tensor; "" if nobody named it.
        group: name of its group, the same on all ranks of the group.
        ranks: those that take part.
        number: its place among the collectives of the group, from 1 on; 0 for a message.
        began: seconds since 1970.
        missing: ranks that have not come, where the source knows them; else None.
        where: the line that made the call.
    """

    operation: str
    what: str
    group: str
    ranks: tuple[int, ...]
    number: int = 0
    began: float = 0.0
    missing: tuple[int, ...] | None = None
    where: str = ""

    def __str__(self) -> str:
        number = f" {self.number}" if self.number else ""
        return f"{self.operation}{number}" + (f" ({self.what})" if self.what else "")


class Source(Protocol):
    """Knows the calls of one kind on this rank."""

    def is_moving(self) -> bool:
        """True if calls were begun since the last look."""
        ...

    def waiting(self) -> list[Call]:
        """The calls under way that wait for other ranks."""
        ...

    def recent(self) -> list[Call]:
        """The last calls, oldest first, with those that are under way."""
        ...


_sources: weakref.WeakSet[Any] = weakref.WeakSet()
_names: deque[tuple[int, str]] = deque(maxlen=NUM_NAMES)  # (nanoseconds since 1970, the name of the next collective)


def registered() -> list[Source]:
    """All registered sources."""
    return list(_sources)


def register(source: Source) -> None:
    """Makes a source known for as long as somebody else holds it."""
    _sources.add(source)


def name_next(what: str) -> None:
    """Names the collective that this thread calls next, for the report."""
    _names.append((time.time_ns(), what))


def name_of(began_ns: int, before_ns: int) -> str:
    """The name given after `before_ns`, when the previous collective began, and before this one began; "" if none."""
    return next((what for at, what in reversed(_names.copy()) if before_ns < at <= began_ns), "")


class Messages:
    """The messages between two ranks that this rank waits for; torch does not record them for gloo."""

    def __init__(self) -> None:
        self._waiting: dict[int, Call] = {}
        self._recent: deque[Call] = deque(maxlen=NUM_CALLS)
        self._next = self._last_look = 0

    @contextlib.contextmanager
    def __call__(self, operation: str, what: str, peer: int) -> Iterator[None]:
        """Around a wait for a message: receive or send, its name, the other rank's number among all ranks."""
        self._next += 1
        key, call = self._next, Call(operation, what, "messages", (peer,), began=time.time(), missing=(peer,))
        self._waiting[key] = call
        self._recent.append(call)
        try:
            yield
        finally:
            del self._waiting[key]

    def is_moving(self) -> bool:
        before, self._last_look = self._last_look, self._next
        return before != self._next

    def waiting(self) -> list[Call]:
        return list(self._waiting.copy().values())

    def recent(self) -> list[Call]:
        return list(self._recent.copy())


message = Messages()
register(message)
