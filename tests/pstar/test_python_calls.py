"""A step of the toy calls no more of pstar's functions than its limit.

A hook that calls one function more calls it for each parameter and each step. The counts do not depend on the machine: the
copy queue, whose speed would change them, is off. tests/pstar/device/inside_counts.py (deep) counts with it, on a device.
"""

from __future__ import annotations

import pytest

from pstar.chunks.step import Chunks
from tests.pstar.python_calls import calls_of_a_step

KEYS = {"default_chunk_size": 5_000, "prefetch": 0}
LIMITS = {"min": 5_581, "100%": 1_869}
"""By near budget: chunks move in the whole step, or all of them stay near. To lower a limit, lower its number. These are of
Python 3.11; newer ones call less, because a comprehension is no function there."""


@pytest.mark.parametrize("near", LIMITS)
def test_a_step_calls_no_more_than_its_limit(near):
    assert calls_of_a_step(near_budget=near, **KEYS) <= LIMITS[near]


def test_one_call_more_in_a_hook_is_counted(monkeypatch):
    acquire, before = Chunks.acquire, calls_of_a_step(near_budget="min", **KEYS)

    def slower(self: Chunks, names: tuple[str, ...]) -> None:
        acquire(self, names)
        self.schedule.recording    # noqa: B018  a property, so this is a call

    monkeypatch.setattr(Chunks, "acquire", slower)
    assert calls_of_a_step(near_budget="min", **KEYS) > before + 10
