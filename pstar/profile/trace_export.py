"""Profiles as one trace in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open.

    process "rank 0"           a lane for stages and one for each kind of span; counters of each tier's bytes and budget
    process "rank 0: blocks"   a lane for each block, with a slice for each interval in which the same tiers had it

Slices of one lane must be disjoint or nested, or a viewer drops them. Overlapping copies (reported from several threads) are
therefore spread over lanes "far to near", "far to near 2", ... Times in the file are microseconds with three decimals, that
is nanoseconds. Ranks are aligned by the system's clocks at their starts.
"""

from collections.abc import Iterator, Sequence

from pstar.errors import ProfileError
from pstar.profile.recording import LANES, Recording, Span
from pstar.profile.timeline import lives, non_model_levels, stages, tier_order, used_levels

STAGES_LANE = "stages"


def make_trace(recordings: Sequence[Recording]) -> dict:
    """The trace of one or several ranks, to be written as JSON: {"traceEvents": [...], ...}.

    Raises ProfileError if two recordings are of the same rank.
    """
    ranks = [recording.rank for recording in recordings]
    for rank in ranks:
        if ranks.count(rank) > 1:
            raise ProfileError(f"two profiles are of rank {rank}; give one profile for each rank of one run")
    origin = min((recording.started + recording.begin for recording in recordings), default=0.0)
    events: list[dict] = []
    for recording in sorted(recordings, key=lambda recording: recording.rank):
        events += _RankEvents(recording, recording.started - origin).all()
    about = {f"rank {recording.rank}": recording.about | ({"closed": recording.closed} if recording.closed else {})
             for recording in recordings}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


class _RankEvents:
    """The events of one rank. shift: seconds that are added to its times."""

    def __init__(self, recording: Recording, shift: float):
        self.recording, self.shift_ns = recording, round(shift * 1e9)
        self.pid = 2 * recording.rank + 1

    def all(self) -> list[dict]:
        device = self.recording.about.get("device")
        name = f"rank {self.recording.rank}"
        return [*self._process(self.pid, f"{name} ({device})" if device else name, 0), *self._stages(), *self._spans(),
                *self._counters(), *self._process(self.pid + 1, f"{name}: blocks", 1), *self._blocks()]

    def _process(self, pid: int, name: str, place: int) -> Iterator[dict]:
        yield self._metadata(pid, 0, "process_name", name=name)
        yield self._metadata(pid, 0, "process_sort_index", sort_index=2 * self.recording.rank + place)

    def _lane(self, pid: int, tid: int, name: str) -> Iterator[dict]:
        yield self._metadata(pid, tid, "thread_name", name=name)
        yield self._metadata(pid, tid, "thread_sort_index", sort_index=tid)

    def _metadata(self, pid: int, tid: int, kind: str, **args: object) -> dict:
        return {"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": kind, "args": args}

    def _ns(self, seconds: float) -> int:
        return max(0, round(seconds * 1e9) + self.shift_ns)

    def _slice(self, pid: int, tid: int, name: str, category: str, begin: float, end: float, args: dict) -> dict:
        first, last = self._ns(begin), self._ns(end)
        return {"ph": "X", "ts": first / 1000, "dur": (last - first) / 1000, "pid": pid, "tid": tid, "name": name,
                "cat": category, "args": args}

    def _stages(self) -> Iterator[dict]:
        yield from self._lane(self.pid, 1, STAGES_LANE)
        for stage in stages(self.recording):
            yield self._slice(self.pid, 1, stage.name, "stage", stage.begin, stage.end, {})
        for step in self.recording.steps:
            yield {"ph": "i", "s": "p", "ts": self._ns(step.at) / 1000, "pid": self.pid, "tid": 1,
                   "name": f"step {step.number}", "cat": "step"}

    def _spans(self) -> Iterator[dict]:
        tid = 1
        others = sorted({span.lane for span in self.recording.spans} - set(LANES))
        for lane in (*LANES, *others):
            spans = [span for span in self.recording.spans if span.lane == lane]
            for number, part in enumerate(side_by_side(spans), start=1):
                tid += 1
                yield from self._lane(self.pid, tid, lane if number == 1 else f"{lane} {number}")
                for span in part:
                    yield self._slice(self.pid, tid, span.name, lane, span.begin, span.end, span.args)

    def _counters(self) -> Iterator[dict]:
        tiers = sorted({sample.tier for sample in self.recording.used}, key=tier_order)
        for tier in tiers:
            yield from self._counter(tier, used_levels(self.recording, tier))
            budget = self.recording.budget(tier)
            if budget is not None:
                yield from self._counter(f"{tier} budget", [(self.recording.begin, budget)])
        yield from self._counter("near non-model", non_model_levels(self.recording))

    def _counter(self, name: str, levels: list[tuple[float, int]]) -> Iterator[dict]:
        """The levels; the last one is repeated at the end of the recording, until which it holds."""
        for at, num_bytes in [*levels, *((self.recording.end, num_bytes) for _, num_bytes in levels[-1:])]:
            yield {"ph": "C", "ts": self._ns(at) / 1000, "pid": self.pid, "tid": 0, "name": name, "cat": "bytes",
                   "args": {"bytes": num_bytes}}

    def _blocks(self) -> Iterator[dict]:
        for tid, ((kind, number), found) in enumerate(lives(self.recording).items(), start=1):
            yield from self._lane(self.pid + 1, tid, f"{kind} {number}")
            for life in found:
                yield self._slice(self.pid + 1, tid, " + ".join(life.tiers), "block", life.begin, life.end,
                                  {"bytes": life.num_bytes})


def side_by_side(spans: Sequence[Span]) -> list[list[Span]]:
    """Spreads spans over lists by first fit, so that any two spans of a list are disjoint or nested.

    Times are compared in nanoseconds, the resolution of the trace.
    """
    parts: list[tuple[list[Span], list[int]]] = []      # (spans, ends of the open spans, innermost last)
    for span in sorted(spans, key=lambda span: (round(span.begin * 1e9), -round(span.end * 1e9))):
        begin, end = round(span.begin * 1e9), round(span.end * 1e9)
        for _, ends in parts:
            while ends and ends[-1] <= begin:
                ends.pop()
        fitting = [place for place in parts if not place[1] or end <= place[1][-1]]
        if not fitting:
            fitting = [([], [])]
            parts += fitting
        fitting[0][0].append(span)
        fitting[0][1].append(end)
    return [part for part, _ in parts]
