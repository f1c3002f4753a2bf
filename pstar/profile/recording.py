"""The recorder of one rank's copies, bytes and stages, to which the engine's layers report, and its file.

Events are kept in memory while training runs, and written by `save`; `pstar trace` turns the files into a trace for Perfetto
and into charts. Memory is bounded twice. Only the first steps are kept: the first step is traced, the second is the first
that follows the trace, and later steps look like it. And at most max_events are kept. After that the profile is *closed*: a
report costs one comparison, and is not kept.
"""

import json
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from durable.files import replacing
from pstar.errors import ArgumentError, ProfileError

FORMAT, VERSION = "pstar profile", 1
NUM_STEPS = 8
MAX_EVENTS = 200_000
"""About 50 MB of memory and 11 MB of file, measured with half of the events being spans."""

TIERS = ("near", "far", "disk")
LANES = ("compute", "far to near", "near to far", "far to disk", "disk to far", "gather", "reduce", "wait")
"""The lanes that the engine reports; others are allowed and are shown after these."""

Key = tuple[str, int]
"""(kind, number), for example ("param", 3)."""


class Span(NamedTuple):
    """Work with a begin and an end: a copy, an update, a wait."""

    lane: str
    name: str
    begin: float
    end: float
    args: dict


class Used(NamedTuple):
    """num_bytes of the tier are in use from `at` on."""

    at: float
    tier: str
    num_bytes: int


class NonModel(NamedTuple):
    """num_bytes of near are not chunks from `at` on: activations, buffers, kernels' scratch memory."""

    at: float
    num_bytes: int


class BlockEvent(NamedTuple):
    """A block gets a copy in a tier (num_bytes is a number), or loses it (None)."""

    at: float
    kind: str
    number: int
    tier: str
    num_bytes: int | None


class Stage(NamedTuple):
    """The stage that begins at `at`; it lasts until the next one."""

    at: float
    name: str


class Step(NamedTuple):
    """A training step begins at `at`."""

    at: float
    number: int


@dataclass(frozen=True)
class Recording:
    """The content of a profile. All times are seconds since the profile's start; every list is in the order of time.

    rank, about: as given to Profile.
    started: the start on the system's clock, in seconds since 1970, to align ranks.
    begin, end: the time that the recording covers.
    closed: the reason why the profile ended before it was saved, or None.
    """

    rank: int
    about: dict
    started: float
    begin: float
    end: float
    closed: str | None
    spans: tuple[Span, ...]
    used: tuple[Used, ...]
    non_model: tuple[NonModel, ...]
    blocks: tuple[BlockEvent, ...]
    stages: tuple[Stage, ...]
    steps: tuple[Step, ...]

    def budget(self, tier: str) -> int | None:
        """The tier's budget in bytes, None if there is none or it is not known."""
        return self.about.get("budgets", {}).get(tier)


@dataclass
class _Events:
    """The kept reports, a list for each class; the names are those of Recording."""

    spans: list[Span] = field(default_factory=list)
    used: list[Used] = field(default_factory=list)
    non_model: list[NonModel] = field(default_factory=list)
    blocks: list[BlockEvent] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class Profile:
    """The recorder of one rank. May be called from any thread.

    Args:
        rank: this process's rank.
        about: facts about the run for charts and trace. Charts read "budgets" ({tier: bytes or None}), "device",
            "num_ranks", "model_data_bytes", "policy", "budget_includes_non_model" (true if the near budget is for both);
            other keys are shown in the trace. Values become plain JSON.
        num_steps: steps that are kept, counted from the first; the next step closes the profile.
        max_events: reports that are kept; the next report closes the profile.

    Reports are not checked against each other (a profile may begin in the middle of a run). A copy that leaves without
    having entered was there from the beginning.
    """

    def __init__(self, rank: int = 0, about: dict | None = None, num_steps: int = NUM_STEPS, max_events: int = MAX_EVENTS):
        self.rank, self.about = rank, _plain(about or {})
        self.num_steps, self.max_events = num_steps, max_events
        self.closed: str | None = None
        """The reason why no more reports are kept, or None while it records."""
        self._events = _Events()
        self._num_events = 0
        self._last_used: dict[str, int] = {}    # by tier: an equal report is not kept again
        self._end = 0.0                         # when the profile was closed
        self._lock = threading.RLock()     # reentrant: a finaliser may report in the middle of another report
        self._started, self._origin = time.time(), time.perf_counter()

    def now(self) -> float:
        """Seconds since the profile's start."""
        return self.at(time.perf_counter())

    def at(self, perf_counter_s: float) -> float:
        """Seconds from the profile's start to a time of time.perf_counter."""
        return perf_counter_s - self._origin

    def span(self, lane: str, name: str, begin: float, end: float, **args: Any) -> None:
        """Reports work from begin to end, times of `now`. lane: one of LANES; args are shown with the span.

        Raises ArgumentError if it ends before it begins.
        """
        if self.closed is not None:
            return
        if not 0 <= begin <= end:
            raise ArgumentError(f"span: {name} in lane {lane} lasts from {begin} to {end}; give times of now(), begin first")
        self._keep(self._events.spans, Span(lane, name, begin, end, _plain(args)))

    def used(self, tier: str, num_bytes: int) -> None:
        """Reports that num_bytes of the tier are in use now."""
        with self._lock:
            if self.closed is None and self._last_used.get(tier) != num_bytes:
                self._last_used[tier] = int(num_bytes)
                self._keep(self._events.used, Used(self.now(), tier, int(num_bytes)))

    def non_model(self, num_bytes: int) -> None:
        """Reports that num_bytes of near are not chunks now."""
        with self._lock:
            self._keep(self._events.non_model, NonModel(self.now(), int(num_bytes)))

    def enter(self, key: Key, tier: str, num_bytes: int) -> None:
        """Reports that block (kind, number) has a copy of num_bytes in the tier now."""
        with self._lock:
            self._keep(self._events.blocks, BlockEvent(self.now(), key[0], int(key[1]), tier, int(num_bytes)))

    def leave(self, key: Key, tier: str) -> None:
        """Reports that block (kind, number) has lost its copy in the tier."""
        with self._lock:
            self._keep(self._events.blocks, BlockEvent(self.now(), key[0], int(key[1]), tier, None))

    def stage(self, name: str) -> None:
        """Reports the stage that begins now: "forward", "backward", "adam", "idle", ... A repeated stage has no effect."""
        with self._lock:
            if not self._events.stages or self._events.stages[-1].name != name:
                self._keep(self._events.stages, Stage(self.now(), name))

    def step(self, number: int) -> None:
        """Reports that a training step begins now. After num_steps steps it closes the profile instead."""
        with self._lock:
            if self.closed is None and len(self._events.steps) >= self.num_steps:
                self._close(f"the first {self.num_steps} steps were kept")
            self._keep(self._events.steps, Step(self.now(), int(number)))

    def recording(self) -> Recording:
        """The recording until now."""
        with self._lock:
            end = self.now() if self.closed is None else self._end
            lists = {name: tuple(events) for name, events in vars(self._events).items()}
            lists["spans"] = tuple(sorted(self._events.spans, key=lambda span: (span.begin, -span.end)))
            last = max([end, *(span.end for span in self._events.spans)])
            return Recording(self.rank, self.about, self._started, begin=0.0, end=last, closed=self.closed, **lists)

    def save(self, path: str | Path) -> None:
        """Writes the profile as one JSON file, first under a temporary name, so no incomplete file is ever visible.

        Recording goes on. Raises ProfileError if the file cannot be written.
        """
        recording = self.recording()
        content = {"format": FORMAT, "version": VERSION}
        for name, value in vars(recording).items():
            content[name] = [_rounded(row) for row in value] if name in _ROWS else _rounded([value])[0]
        write_atomically(Path(path), json.dumps(content, separators=(",", ":"), allow_nan=False).encode())

    def _keep(self, events: list, event: tuple) -> None:
        with self._lock:
            if self.closed is None and self._num_events >= self.max_events:
                self._close(f"{self.max_events} events were kept")
            if self.closed is None:
                events.append(event)
                self._num_events += 1

    def _close(self, why: str) -> None:
        self.closed, self._end = why, self.now()


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a temporary file next to `path` and renames it. Raises ProfileError, which names the file, if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, per_process=True) as staging:
            staging.write_bytes(content)
    except OSError as error:
        raise ProfileError(f"{path}: cannot be written ({error.strerror or error})") from None


# ------------------------------------------------------------------ reading

_TIME, _BYTES = "a time", "a number of bytes"
_ROWS = {
    "spans": (Span, (str, str, _TIME, _TIME, dict)),
    "used": (Used, (_TIME, str, _BYTES)),
    "non_model": (NonModel, (_TIME, _BYTES)),
    "blocks": (BlockEvent, (_TIME, str, int, str, "a number of bytes or null")),
    "stages": (Stage, (_TIME, str)),
    "steps": (Step, (_TIME, int)),
}
"""The lists of the file: the class of a row, and the types of its fields."""


def load_profile(path: str | Path) -> Recording:
    """Reads a file that Profile.save wrote.

    Raises ProfileError, which names the file, if it cannot be read, is no JSON, no profile, of another version, or damaged.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError):
        raise ProfileError(f"{path}: is no JSON file; give a file that a run wrote as its profile") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ProfileError(f"{path}: is JSON, but no profile; give a file that a run wrote as its profile")
    if content.get("version") != VERSION:
        raise ProfileError(f"{path}: is a profile of version {content.get('version')!r}, this program reads {VERSION}; "
                           f"profile the run again")
    damage = _damage(content)
    if damage:
        raise ProfileError(f"{path}: is damaged: {damage}; profile the run again")
    lists = {name: tuple(make(*row) for row in content[name]) for name, (make, _) in _ROWS.items()}
    return Recording(**lists, **{name: content[name] for name in ("rank", "about", "started", "begin", "end", "closed")})


def _damage(content: dict) -> str | None:
    """The first error in a profile's content, or None."""
    heads = {"rank": _BYTES, "about": dict, "started": _TIME, "begin": _TIME, "end": _TIME}
    for name, kind in heads.items():
        if not _is(content.get(name), kind):
            return f"{name} is {_short(content.get(name))}"
    if "closed" not in content or not (content["closed"] is None or isinstance(content["closed"], str)):
        return f"closed is {_short(content.get('closed'))}"
    budgets = content["about"].get("budgets", {})
    if not isinstance(budgets, dict) or not all(value is None or _is(value, _BYTES) for value in budgets.values()):
        return f"budgets are {_short(budgets)}, not a number of bytes or null for each tier"
    for name, (row_type, kinds) in _ROWS.items():
        rows = content.get(name)
        if not isinstance(rows, list):
            return f"{name} is {_short(rows)}, not a list"
        before = content["begin"]
        for index, row in enumerate(rows):
            if not (isinstance(row, list) and len(row) == len(kinds) and all(map(_is, row, kinds))):
                return f"{name}[{index}] is {_short(row)}, not [{', '.join(row_type._fields)}]"
            entry = row_type(*row)
            first, last = (entry.begin, entry.end) if isinstance(entry, Span) else (entry.at, entry.at)
            if not before <= first <= last <= content["end"]:
                return f"{name}[{index}] is {_short(row)}, out of the order of time"
            before = first
    return None


def _is(value: object, kind: Any) -> bool:
    if isinstance(value, bool):
        return False
    if kind == _TIME:
        return isinstance(value, int | float) and 0 <= value < 1e12
    if kind == _BYTES:
        return isinstance(value, int) and value >= 0
    if isinstance(kind, str):
        return value is None or _is(value, _BYTES)
    return isinstance(value, kind)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _rounded(row: Sequence) -> list:
    """A row for the file: times are rounded to nanoseconds, the resolution of the clock."""
    return [round(value, 9) if isinstance(value, float) else value for value in row]


def _plain(value: Any) -> Any:
    """The value as plain JSON types: a profile must not keep tensors alive, and JSON cannot write infinity."""
    if isinstance(value, dict):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
