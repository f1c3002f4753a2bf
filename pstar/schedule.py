"""When each block is needed next, and which one leaves when room is short: pure functions of numbers, no tensors.

Training repeats itself: every step touches the same blocks in the same order. So the first step is recorded as a list of
*moments*, one block key each, and from then on the future is known (PatrickStar, section 8.1). Knowing it, the best
victim is the block whose next use lies farthest ahead (Belady 1966); the trace is a cycle, so after the last moment comes
the first. Before the future is known, or where it is not wanted, the least recently used block leaves.
"""

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from pstar.errors import ConfigError, StateError

Key = Hashable
NEVER = float("inf")
POLICIES = ("next_use", "lru")


class Trace:
    """One step's accesses, as a cycle.

    positions: for each key the sorted moments at which it is touched.
    """

    def __init__(self, accesses: Sequence[Key]):
        self.accesses = tuple(accesses)
        self.positions: dict[Key, list[int]] = {}
        for moment, key in enumerate(self.accesses):
            self.positions.setdefault(key, []).append(moment)

    def __len__(self) -> int:
        return len(self.accesses)

    def next_use(self, key: Key, moment: int) -> float:
        """The first moment after `moment` at which key is touched, counted on into the next step; NEVER if never."""
        positions = self.positions.get(key)
        if not positions:
            return NEVER
        index = bisect_right(positions, moment)
        return positions[index] if index < len(positions) else positions[0] + len(self.accesses)


class Schedule:
    """Records the first step, follows the trace afterwards, and names the victims of eviction.

    A step is begun by begin_step, walked by touch, ended by end_step. A touch that differs from the trace means that the
    step is not the one that was recorded (another sequence length, a skipped layer): the trace is thrown away at once, and
    the next whole step is recorded anew. Accesses outside a step (evaluation) move only the clock of least-recent use.
    """

    def __init__(self, policy: str = "next_use"):
        if policy not in POLICIES:
            raise ConfigError(f"eviction_policy is {policy!r}; choose one of {', '.join(POLICIES)}")
        self.policy = policy
        self.trace: Trace | None = None
        self.num_traced = 0
        self._recording: list[Key] | None = None
        self._moment = -1
        self._in_step = False
        self._paused = False
        self._clock = 0
        self._last_use: dict[Key, int] = {}

    @property
    def in_step(self) -> bool:
        return self._in_step

    @property
    def moment(self) -> int:
        """Number of the access that the trace is at; -1 before the first and while a step is recorded."""
        return self._moment

    def begin_step(self) -> None:
        if self._in_step:
            raise StateError("begin_step inside a step: the step before it was not ended by optimizer.step()")
        self._in_step = True
        self._moment = -1
        self._recording = [] if self.trace is None else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Accesses inside (an evaluation between two steps, or in the middle of one) are not part of the step."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def touch(self, key: Key) -> None:
        """Key is needed now. Touching the same key again and again is one moment."""
        self._clock += 1
        self._last_use[key] = self._clock
        if not self._in_step or self._paused:
            return
        if self._recording is not None:
            if not self._recording or self._recording[-1] != key:
                self._recording.append(key)
        elif self.trace is not None:
            if self._moment >= 0 and self.trace.accesses[self._moment] == key:
                return
            self._moment += 1
            if self._moment >= len(self.trace) or self.trace.accesses[self._moment] != key:
                self.forget()

    def upcoming(self, kind: str) -> tuple[Key, tuple[Key, ...]] | None:
        """(the next key (kind, ...) of this step after the current moment, the keys touched before it).

        None where that is not known: outside a step, without a trace, and where none follows in this step.
        """
        if not self._in_step or self._paused or self.trace is None:
            return None
        first = self._moment + 1
        for moment in range(first, len(self.trace)):
            if self.trace.accesses[moment][0] == kind:
                return self.trace.accesses[moment], self.trace.accesses[first:moment]
        return None

    def end_step(self) -> None:
        """The step is over: what was recorded becomes the trace; a trace not walked to its end is forgotten."""
        if self._recording is not None and self._in_step:
            self.trace = Trace(self._recording) if self._recording else None
            self.num_traced += 1
        elif self.trace is not None and self._moment + 1 != len(self.trace):
            self.forget()
        self._recording = None
        self._in_step = False
        self._moment = -1

    def forget(self) -> None:
        """Throws the trace away; the next whole step is recorded."""
        self.trace = None
        self._recording = None

    def victim(self, candidates: Iterable[Key]) -> Key | None:
        """Which of the candidates leaves; None where there are none. Ties go to the first in the order given."""
        candidates = list(candidates)
        if not candidates:
            return None
        if self.policy == "next_use" and self.trace is not None:
            return max(candidates, key=lambda key: self.trace.next_use(key, self._moment))
        return min(candidates, key=lambda key: self._last_use.get(key, 0))


def count_loads(accesses: Sequence[Key], room: int, policy: str = "next_use", num_steps: int = 3) -> int:
    """Loads in the last of num_steps repetitions of accesses, with room for `room` blocks of equal size.

    This is the engine's own Schedule run on numbers alone: what a page or a test says about loads comes from here.
    For n chunks touched forward and then backward it is 2 * (n - room) with either policy.
    """
    schedule, resident, loads = Schedule(policy), [], 0
    for _ in range(num_steps):
        schedule.begin_step()
        loads = 0
        for key in accesses:
            schedule.touch(key)
            if key not in resident:
                if len(resident) >= room:
                    resident.remove(schedule.victim(resident))
                resident.append(key)
                loads += 1
        schedule.end_step()
    return loads
