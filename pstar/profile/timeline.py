"""Pure functions of a recording: ends of stages and copies, levels over time, a cut to some steps."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from pstar.errors import ProfileError
from pstar.profile.recording import TIERS, BlockEvent, Key, Recording, Stage


class Interval(NamedTuple):
    """A named interval from begin to end, in seconds."""

    name: str
    begin: float
    end: float


class Life(NamedTuple):
    """A block had copies in these tiers (in the order near, far, disk) from begin to end."""

    tiers: tuple[str, ...]
    begin: float
    end: float
    num_bytes: int


FIRST_KINDS = ("param", "gathered", "grad", "grad_full")
"""Kinds of blocks in the order of the charts; the optimizer's kinds come after these."""


def in_order(keys: Iterable[Key]) -> list[Key]:
    """Block keys in the order of the charts: parameters, gradients, then the optimizer's kinds by name."""
    order = {kind: place for place, kind in enumerate(FIRST_KINDS)}
    return sorted(keys, key=lambda key: (order.get(key[0], len(order)), key))


def tier_order(tier: str) -> tuple[int, str]:
    """A sort key: near, far, disk, then other tiers by name."""
    return (TIERS.index(tier) if tier in TIERS else len(TIERS), tier)


def stages(recording: Recording) -> list[Interval]:
    """The stages with their ends."""
    last = Stage(recording.end, "")
    pairs = pairwise([*recording.stages, last])
    return [Interval(stage.name, stage.at, after.at) for stage, after in pairs if stage.at < after.at]


def used_levels(recording: Recording, tier: str) -> list[tuple[float, int]]:
    """[(from this time on, bytes used in the tier)]; empty if nothing was reported."""
    return [(sample.at, sample.num_bytes) for sample in recording.used if sample.tier == tier]


def non_model_levels(recording: Recording) -> list[tuple[float, int]]:
    """[(from this time on, bytes of near that are not chunks)]; empty if nothing was reported."""
    return [(sample.at, sample.num_bytes) for sample in recording.non_model]


def lives(recording: Recording) -> dict[Key, list[Life]]:
    """The tiers of each block's copies, as intervals with the same tiers; no interval while a block has no copy.

    A copy that leaves without having entered was there from the recording's begin.
    """
    copies: dict[Key, dict[str, int]] = {}
    began: dict[Key, float] = {}
    found: dict[Key, list[Life]] = {}
    for event in _with_first_entries(recording):
        key = (event.kind, event.number)
        held = copies.setdefault(key, {})
        _end_life(found.setdefault(key, []), held, began.get(key, event.at), event.at)
        began[key] = event.at
        if event.num_bytes is None:
            held.pop(event.tier, None)
        else:
            held[event.tier] = event.num_bytes
    for key, held in copies.items():
        _end_life(found[key], held, began[key], recording.end)
    return {key: found[key] for key in in_order(found)}


def cut(recording: Recording, first: int, last: int) -> Recording:
    """The recording from the begin of step `first` to the end of step `last`, with unchanged times.

    Spans that begin earlier or end later are clipped. Levels, copies and the stage at the begin are carried over. Raises
    ProfileError, which names the recorded steps, if one of the two is not among them.
    """
    numbers = [step.number for step in recording.steps]
    for number in (first, last):
        if number not in numbers:
            there = f"the steps {numbers[0]} to {numbers[-1]}" if numbers else "no steps"
            raise ProfileError(f"rank {recording.rank} has {there}; step {number} is not among them")
    begin = recording.steps[numbers.index(first)].at
    after = numbers.index(last) + 1
    end = recording.steps[after].at if after < len(numbers) else recording.end

    tiers = {sample.tier for sample in recording.used}
    used = [sample for tier in sorted(tiers, key=tier_order)
            for sample in _levels_from([s for s in recording.used if s.tier == tier], begin, end)]
    return replace(
        recording, begin=begin, end=end,
        spans=tuple(span._replace(begin=max(span.begin, begin), end=min(span.end, end))
                    for span in recording.spans if span.end > begin and span.begin < end),
        used=tuple(sorted(used, key=lambda sample: sample.at)),
        non_model=tuple(_levels_from(recording.non_model, begin, end)),
        blocks=tuple(_blocks_from(recording, begin, end)),
        stages=tuple(_without_repeats(_levels_from(recording.stages, begin, end))),
        steps=tuple(step for step in recording.steps if begin <= step.at < end),
    )


def _with_first_entries(recording: Recording) -> list[BlockEvent]:
    """The recording's block events, preceded by an entry for each copy whose first event is that it leaves."""
    first: dict[tuple, BlockEvent] = {}
    for event in recording.blocks:
        first.setdefault((event.kind, event.number, event.tier), event)
    missing = [event._replace(at=recording.begin, num_bytes=0) for event in first.values() if event.num_bytes is None]
    return [*missing, *recording.blocks]


def _end_life(found: list[Life], held: dict[str, int], begin: float, end: float) -> None:
    """Appends the life of the held copies from begin to end; extends the last life if it has the same tiers."""
    tiers = tuple(sorted(held, key=tier_order))
    if not tiers or begin == end:
        return
    if found and found[-1].tiers == tiers and found[-1].end == begin:
        begin = found.pop().begin
    found.append(Life(tiers, begin, end, max(held.values())))


def _levels_from(samples: Iterable, begin: float, end: float) -> list:
    """The samples of one series between begin and end; the last sample before begin is moved to begin."""
    samples = list(samples)
    before = [sample for sample in samples if sample.at <= begin]
    return [sample._replace(at=begin) for sample in before[-1:]] + [s for s in samples if begin < s.at < end]


def _without_repeats(found: list[Stage]) -> list[Stage]:
    return [stage for index, stage in enumerate(found) if index == 0 or found[index - 1].name != stage.name]


def _blocks_from(recording: Recording, begin: float, end: float) -> list[BlockEvent]:
    held: dict[tuple, BlockEvent] = {}
    later = []
    for event in _with_first_entries(recording):
        place = (event.kind, event.number, event.tier)
        if event.at > begin:
            later.append(event)
        elif event.num_bytes is None:
            held.pop(place, None)
        else:
            held[place] = event._replace(at=begin)
    return [*held.values(), *(event for event in later if event.at < end)]
