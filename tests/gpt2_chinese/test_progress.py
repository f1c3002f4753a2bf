"""Progress in a log file: some lines, not a thousand."""

from __future__ import annotations

import io
import sys

import pytest

from gpt2_chinese import progress
from gpt2_chinese.progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test moves; stderr is no terminal."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    return now


def lines(
    clock: list[float], capsys: pytest.CaptureFixture[str], total: int, seconds: float, done: int = 0
) -> list[str]:
    shown = Progress(done, total)
    for step in range(done + 1, total + 1):
        clock[0] += seconds
        shown.step(step, 1.0, 100, seconds)
    shown.close()
    return capsys.readouterr().out.splitlines()


def test_fast_steps_give_a_line_each_twentieth(clock, capsys) -> None:
    said = lines(clock, capsys, 1000, 0.001)
    assert len(said) == 21
    assert said[0].startswith("step 1/1000: loss 1.0000, 100,000 tokens/s") and said[-1].startswith("step 1000/1000")


def test_slow_steps_give_a_line_each_ten_seconds_at_first_and_fewer_later(clock, capsys) -> None:
    said = lines(clock, capsys, 1000, 2.0)
    assert said[1].startswith("step 6/1000")
    assert 40 < len(said) < 100


def test_a_resumed_run_counts_from_where_it_is(clock, capsys) -> None:
    said = lines(clock, capsys, 100, 0.001, done=90)
    assert said[0].startswith("step 91/100") and said[-1].startswith("step 100/100") and len(said) == 3
