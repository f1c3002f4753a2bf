"""When each block is needed next, and which block is evicted when room is short: pure functions of numbers, no tensors.

Every step of training touches the same blocks in the same order. So the first step is recorded as a list of *moments*, one
key each, and from then on the future is known (PatrickStar, section 8.1). The best victim is then the block whose next use
is farthest ahead (Belady 1966). The trace is a cycle: after the last moment comes the first. Blocks differ in size, and
some must be copied out and others not: the distance is weighted with the bytes that the eviction moves. Without a trace the
least recently used block is evicted. The policies "lru" and "fifo" never use the trace.

With each moment the trace keeps the peak of activations in near, from which follows the room for blocks at that moment.
"""

import itertools
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pstar.errors import ConfigError, StateError

Key = Hashable
NEVER = float("inf")
POLICIES = ("next_use", "lru", "fifo")
MOST_TRACES = 8
"""Traces kept, one for each shape of the inputs: training on a few lengths in turn records each once."""


@dataclass(frozen=True)
class Candidate:
    """A block that may leave a tier.

    num_bytes: bytes that its eviction frees. store_bytes: bytes that must be copied out for it; 0 for a clean block.
    came: when it came into the tier, on any clock.
    """

    key: Key
    num_bytes: int = 1
    store_bytes: int = 0
    came: int = 0


class Leaving(NamedTuple):
    """What left near when the gradients of a group were complete."""

    grad_bytes: int
    param_bytes: int


class Trace:
    """One step's accesses, as a cycle.

    accesses: the keys in order. peaks: for each moment the most bytes of activations in near until the next moment.
    positions: for each key the sorted moments at which it is touched. stretches: (key, largest peak, first moment) of runs
    of moments; a touch that repeats one of the last two keys begins no new stretch, because backward alternates between a
    group's parameters and its gradients, parameter by parameter. stretch_of: the number of each moment's stretch.
    """

    def __init__(self, accesses: Sequence[Key], peaks: Sequence[int] = ()):
        self.accesses = tuple(accesses)
        self.peaks = tuple(peaks) or (0,) * len(self.accesses)
        self.positions: dict[Key, list[int]] = {}
        for moment, key in enumerate(self.accesses):
            self.positions.setdefault(key, []).append(moment)
        self.stretches: list[tuple[Key, int, int]] = []
        self.stretch_of: list[int] = []
        for moment, (key, peak) in enumerate(zip(self.accesses, self.peaks, strict=True)):
            if key in [stretch[0] for stretch in self.stretches[-2:]]:
                last, most, first = self.stretches[-1]
                self.stretches[-1] = last, max(most, peak), first
            else:
                self.stretches.append((key, peak, moment))
            self.stretch_of.append(len(self.stretches) - 1)
        self._first: dict[Hashable, float] = {}
        self.leaving: dict[int, Leaving] = {}
        """First moment of a stretch -> what left near in it when a step last followed this trace through it."""
        self.path: int | None = None
        """A hash of the modules that were called in a step that followed this trace to its end (pstar.chunks.resident)."""

    def __len__(self) -> int:
        return len(self.accesses)

    def next_use(self, key: Key, moment: int) -> float:
        """The first moment after `moment` at which key is touched, counted on into the next step; NEVER if never."""
        positions = self.positions.get(key)
        if not positions:
            return NEVER
        index = bisect_right(positions, moment)
        return positions[index] if index < len(positions) else positions[0] + len(self.accesses)

    def first_of(self, kind: Hashable) -> float:
        """The first moment at which a key (kind, ...) is touched; NEVER if none is."""
        if kind not in self._first:    # bring_forward changes the order inside a kind, not this moment
            self._first[kind] = next((moment for moment, key in enumerate(self.accesses) if key[0] == kind), NEVER)
        return self._first[kind]

    def bring_forward(self, key: Key, moment: int) -> None:
        """Moves key's next touch to `moment`, and each touch between the two one moment later. No effect if one of these
        keys is touched at other moments too."""
        turn = next((turn for turn in self.positions.get(key, ()) if turn >= moment), moment)
        keys = self.accesses[moment : turn + 1]
        if turn == moment or any(len(self.positions[each]) > 1 for each in keys):
            return
        self.accesses = (*self.accesses[:moment], key, *keys[:-1], *self.accesses[turn + 1 :])
        for at, each in enumerate(self.accesses[moment : turn + 1], moment):
            self.positions[each] = [at]
            _, peak, first = self.stretches[self.stretch_of[at]]
            self.stretches[self.stretch_of[at]] = each, peak, first


class Peaks(Protocol):
    """The part of pstar.chunks.peak_watch.PeakWatch that a Schedule uses."""

    def take_peak(self) -> int:
        """The most bytes of activations in near since the last call."""

    def agree(self, peaks: list[int]) -> list[int]:
        """The maximum over all ranks of each peak: all ranks must make the same decisions."""


class Recording:
    """Records the accesses of a step that has no trace yet, with the peak of each moment; they become its trace.

    Args:
        watch: measures the peaks; None: they are not measured and count as 0.
    """

    def __init__(self, watch: Peaks | None):
        self.keys: list[Key] = []
        self._watch = watch
        self._peaks: list[int] = []

    def touch(self, key: Key) -> None:
        """Adds a moment, unless the last one has the same key."""
        if not self.keys or self.keys[-1] != key:
            self.end_moment()
            self.keys.append(key)

    def end_moment(self) -> None:
        """Gives the last moment the peak since the one before it. A second call can only raise it."""
        peak = self._watch.take_peak() if self._watch is not None else 0
        if len(self._peaks) < len(self.keys):
            self._peaks.append(peak)
        elif self.keys:
            self._peaks[-1] = max(self._peaks[-1], peak)

    def trace(self) -> Trace | None:
        """The trace of the recorded accesses, with peaks on which all ranks agree; None if nothing was touched."""
        self.end_moment()
        if not self.keys:
            return None
        return Trace(self.keys, self._peaks if self._watch is None else self._watch.agree(self._peaks))


class Uses(Protocol):
    """The part of pstar.chunks.unit.Units that a Schedule uses."""

    def of_block(self, key: Key) -> Iterable[Key]:
        """The keys of the trace that mean a use of this block: its own, or keys that mean several blocks."""

    def of_modules(self, key: Key) -> Iterable[Key]:
        """The keys of the trace that mean that a module uses the parameters of this block's group."""


class OwnKeys:
    """Each block is used under its own key."""

    def of_block(self, key: Key) -> tuple[Key, ...]:
        return (key,)

    of_modules = of_block


class Schedule:
    """Records the first step, follows the trace afterwards, and names the victims of eviction.

    begin_step begins a step, touch advances it, end_step ends it. A touch that differs from the trace means that the step is
    not the recorded one (a skipped layer): the trace is thrown away at once, and the next whole step is recorded anew. Steps
    with inputs of different shapes (signatures) have different traces. Accesses outside a step (evaluation) count for the
    least recent use only.

    Args:
        policy: one of POLICIES.
        uses: the keys of the trace that mean a use of a block.
        peaks: measures activations in near while a step is recorded; None: they are not measured.
    """

    def __init__(self, policy: str = "next_use", uses: Uses | None = None, peaks: Peaks | None = None):
        if policy not in POLICIES:
            raise ConfigError(f"eviction_policy is {policy!r}; choose one of {', '.join(POLICIES)}")
        self.policy = policy
        self.trace: Trace | None = None
        self.num_traced = self.num_steps = 0
        self._uses, self._watch = uses or OwnKeys(), peaks
        self._traces: dict[Hashable, Trace] = {}
        self._signature: Hashable = None
        self._recording: Recording | None = None
        self._moment = -1
        self._in_step = False
        self._paused = False
        self._clock = 0
        self._last_use: dict[Key, int] = {}
        self.last: Key | None = None
        """The key that was touched last; touching it again has no effect. None where a step or a pause begins or ends."""

    @property
    def in_step(self) -> bool:
        return self._in_step

    @property
    def recording(self) -> bool:
        """Whether this step is being recorded."""
        return self._in_step and self._recording is not None

    @property
    def moment(self) -> int:
        """Index of the current access in the trace; -1 before the first and while a step is recorded."""
        return self._moment

    @property
    def peak(self) -> int | None:
        """Bytes of activations in near from this moment to the next; None if not known."""
        known = self._in_step and not self._paused and self.trace is not None and self._moment >= 0
        return self.trace.peaks[self._moment] if known else None

    def follow(self, trace: Trace, signature: Hashable = None) -> None:
        """Adds a trace, as if a step with that signature had been recorded."""
        self._traces[signature] = trace

    def begin_step(self, signature: Hashable = None) -> None:
        """Begins a step. signature: the shapes of its inputs, or whatever else distinguishes steps with different traces."""
        if self._in_step:
            raise StateError("begin_step inside a step: the step before it was not ended by optimizer.step()")
        self._in_step, self.last = True, None
        self._moment = -1
        self._signature = signature
        self.trace = self._traces.get(signature)
        self._recording = Recording(self._watch) if self.trace is None else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Accesses inside (an evaluation between two steps, or in the middle of one) are not part of the step."""
        before, self._paused, self.last = self._paused, True, None
        try:
            yield
        finally:
            self._paused, self.last = before, None

    def leave_trace(self) -> None:
        """The rest of this step is not compared with its trace, which stays for later steps."""
        self._paused = True

    def touch(self, key: Key) -> None:
        """Key is needed now. Touching the same key again and again is one moment."""
        self._clock += 1
        self._last_use[key] = self._clock
        self.last = key
        if not self._in_step or self._paused:
            return
        if self._recording is not None:
            self._recording.touch(key)
        elif self.trace is not None:
            if self._moment >= 0 and self.trace.accesses[self._moment] == key:
                return
            self._moment += 1
            if self._moment >= len(self.trace) or self.trace.accesses[self._moment] != key:
                self.forget()

    def expect_next(self, key: Key) -> None:
        """Key will be touched next: moves it to this place in the trace, for later steps too (see Trace.bring_forward)."""
        if self._in_step and not self._paused and self.trace is not None:
            self.trace.bring_forward(key, self._moment + 1)

    def prefetched(self, key: Key) -> None:
        """Counts a prefetched block as used, or LRU evicts it."""
        self._last_use[key] = self._clock

    def end_moment(self) -> None:
        """Asks for the peak since the last moment. May be called more than once for a moment."""
        if self._recording is not None:
            self._recording.end_moment()
        elif self._watch is not None:
            self._watch.take_peak()

    def upcoming(self, kind: str) -> tuple[Key, tuple[Key, ...]] | None:
        """(the next key (kind, ...) of this step after the current moment, the keys touched before it).

        None outside a step, without a trace, and if no such key follows in this step.
        """
        if not self._in_step or self._paused or self.trace is None:
            return None
        first = self._moment + 1
        for moment in range(first, len(self.trace)):
            if self.trace.accesses[moment][0] == kind:
                return self.trace.accesses[moment], self.trace.accesses[first:moment]
        return None

    def first_keys(self, kind: str, num: int) -> list[Key]:
        """The first `num` different keys (kind, ...) of the next step, if this one has followed its trace to the end; else
        empty: they are not known."""
        if not self._in_step or self._paused or self.trace is None or self._moment + 1 != len(self.trace):
            return []
        keys = (key for key in self.trace.positions if key[0] == kind)    # in the order of their first uses
        return list(itertools.islice(keys, num))

    def next_keys(self, num: int) -> list[Key]:
        """The next `num` different keys of this step; empty if they are not known."""
        found: list[Key] = []
        if self._in_step and not self._paused and self.trace is not None:
            accesses = self.trace.accesses
            for moment in range(self._moment + 1, len(accesses)):
                if len(found) == num:
                    break
                if accesses[moment] not in found:
                    found.append(accesses[moment])
        return found

    @property
    def stretch(self) -> int:
        """The number of this moment's stretch of the trace; -1 if not known."""
        if not self._in_step or self._paused or self.trace is None:
            return -1
        return self.trace.stretch_of[max(0, self._moment)]

    def coming(self, most: int, in_next_step: bool = False) -> list[tuple[Key, int, int]]:
        """(key, largest peak, first moment) of at most `most` stretches, from the current one on and around the end of the
        step, or in_next_step only after its end; there moments are counted on beyond the length of the trace. Empty if no
        trace is known."""
        first = self.stretch
        if first < 0:
            return []
        stretches, length = self.trace.stretches, len(self.trace)
        first = len(stretches) if in_next_step else first
        found = stretches[first : first + most]
        around = stretches[: max(0, min(first, most - len(found)))]
        return found + [(key, peak, moment + length) for key, peak, moment in around]

    def note_leaving(self, leaving: Leaving) -> None:
        """This has left near in the current stretch: so it will in the next step."""
        if (stretch := self.stretch) >= 0:
            self.trace.leaving[self.trace.stretches[stretch][2]] = leaving

    def left_before(self, num: int) -> list[tuple[int, int]]:
        """(stretch, bytes) for each gradient that has left near in the last `num` stretches before this one."""
        trace, now = self.trace, self.stretch
        left = ((at, trace.leaving.get(trace.stretches[at][2])) for at in range(max(0, now - num), now))
        return [(at, each.grad_bytes) for at, each in left if each is not None]

    def next_use(self, key: Key) -> float:
        """The moment at which a block is used next, counted on into the next step; NEVER if it is in no trace."""
        if self.trace is None:
            return NEVER
        return min((self.trace.next_use(use, self._moment) for use in self._uses.of_block(key)), default=NEVER)

    def needed(self, key: Key) -> float:
        """When a module next needs the parameters of a block's group, which come back to near behind their gradients and
        their update: a moment, counted on over all steps as if each had this trace. 0 while no trace is known."""
        if self.trace is None:
            return 0.0
        next_use = min((self.trace.next_use(use, self._moment) for use in self._uses.of_modules(key)), default=NEVER)
        return self.num_steps * len(self.trace) + next_use

    def is_in_next_step(self, moment: float) -> bool:
        """Whether a moment that was counted on belongs to the next step."""
        return self.trace is not None and moment >= len(self.trace)

    def first_use(self, key: Key) -> float:
        """The moment of this step at which a key was touched first, or will be; NEVER if not known."""
        if self._recording is not None:
            return self._recording.keys.index(key) if key in self._recording.keys else NEVER
        return self.trace.positions.get(key, (NEVER,))[0] if self.trace is not None else NEVER

    def end_step(self) -> bool:
        """Ends the step. A recorded step becomes the trace; a trace that was not followed to its end is forgotten.

        Returns whether this step was recorded.
        """
        recorded = self._recording is not None
        if recorded and self._in_step:
            self.trace = self._recording.trace()
            if self.trace is not None:
                if len(self._traces) >= MOST_TRACES:
                    del self._traces[next(iter(self._traces))]
                self._traces[self._signature] = self.trace
            self.num_traced += 1
        elif self.trace is not None and not self._paused and self._moment + 1 != len(self.trace):
            self.forget()
        self.num_steps += 1
        self._recording = None
        self._in_step, self._paused, self.last = False, False, None
        self._moment = -1
        return recorded

    def forget(self) -> None:
        """Throws the trace away; the next whole step of these shapes is recorded."""
        self._traces.pop(self._signature, None)
        self.trace = None
        self._recording = None

    def forget_all(self) -> None:
        """Throws all traces away, whatever their signatures."""
        self._traces.clear()
        self.forget()

    def known_peaks(self) -> list[int]:
        """The peaks of activations in bytes, of all moments of all traces."""
        return [peak for trace in self._traces.values() for peak in trace.peaks]

    def victim(self, candidates: Iterable[Candidate]) -> Key | None:
        """The key of the candidate to evict; None if there are none. Ties go to the first in the given order."""
        candidates = list(candidates)
        if not candidates:
            return None
        if self.policy == "fifo":
            return min(candidates, key=lambda candidate: candidate.came).key
        if self.policy == "next_use" and self.trace is not None:
            return max(candidates, key=self._worth).key
        return min(candidates, key=lambda candidate: self._last(candidate.key)).key

    def _worth(self, candidate: Candidate) -> tuple[float, int]:
        """The worth of an eviction: moments times bytes freed, divided by the bytes that are copied out and back.

        Among blocks that are never used again, the one that frees most bytes beyond those copied out leaves first.
        """
        distance = self.next_use(candidate.key) - self._moment
        if distance == NEVER:
            return NEVER, candidate.num_bytes - candidate.store_bytes
        return distance * candidate.num_bytes / (candidate.num_bytes + candidate.store_bytes), 0

    def _last(self, key: Key) -> int:
        return max((self._last_use.get(use, 0) for use in (key, *self._uses.of_block(key))), default=0)


def count_loads(accesses: Sequence[Key], room: int | Sequence[int], policy: str = "next_use", num_steps: int = 3) -> int:
    """Loads in the last of num_steps repetitions of accesses, with room for `room` blocks of equal size.

    room: a constant, or one number for each access. This runs the engine's Schedule on numbers alone: pages and tests take
    their counts of loads from here. For n chunks touched forward and then backward and constant room the result is
    2 * (n - room), with next_use and with lru.
    """
    rooms = [room] * len(accesses) if isinstance(room, int) else room
    schedule, resident, loads, clock = Schedule(policy), {}, 0, 0    # key -> when it came
    for _ in range(num_steps):
        schedule.begin_step()
        loads = 0
        for key, most in zip(accesses, rooms, strict=True):
            schedule.touch(key)
            came = resident.pop(key, None)
            while len(resident) >= most:
                del resident[schedule.victim(Candidate(other, came=since) for other, since in resident.items())]
            clock += 1
            loads += came is None
            resident[key] = clock if came is None else came
        schedule.end_step()
    return loads
