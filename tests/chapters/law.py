"""The law of the curve: the run that chapters are held to, how long it is, and what must be the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chapters.inside import train
from tests.chapters.program import Chapter

LONG, SHORT, CLIP, PEAK = 50, 12, 0.3, 0.001


def flags_of(steps: int, seq_len: int = 0) -> tuple[object, ...]:
    """Short runs have short sequences, unless told otherwise: most of the time goes into the logits of each token."""
    seq_len = seq_len or (24 if steps >= LONG else 8)
    return ("--seq-len", seq_len, "--batch-size", 48, "--lr", PEAK, "--warmup-steps", 5, "--max-steps", steps,
            "--eval-every", 1000, "--save-every", 1000, "--clip-grad-norm", CLIP)  # fmt: skip


def assert_same_curve(rows: list[dict], expected: list[dict], rel: float) -> None:
    assert [row["step"] for row in rows] == list(range(1, len(expected) + 1))
    for ours, theirs in zip(rows, expected, strict=True):
        for key, tolerance in (("loss", rel), ("grad_norm", 10 * rel), ("lr", 0), ("tokens", 0)):
            assert ours[key] == pytest.approx(theirs[key], rel=tolerance, abs=0), f"{key} at step {ours['step']}"
    assert rows[-1]["valid_loss"] == pytest.approx(expected[-1]["valid_loss"], rel=rel, abs=0)


def curves(ranks: Any, folder_for: Callable[[str], Path]) -> Callable[..., list[dict]]:
    """curve(steps, grad_accum): the rows of chapter 00, which runs once for each."""
    cache: dict[tuple[int, int], list[dict]] = {}

    def curve(steps: int, grad_accum: int = 1) -> list[dict]:
        if (steps, grad_accum) not in cache:
            chapter = Chapter("00_single", folder_for("curve"))
            train(ranks, 1, chapter, *flags_of(steps), "--grad-accum", grad_accum)
            rows = cache[steps, grad_accum] = chapter.metrics()
            norms = [row["grad_norm"] for row in rows]
            assert sum(norm > CLIP for norm in norms) > steps / 2, f"clipping is not at work: {norms}"
            assert rows[-1]["loss"] < rows[0]["loss"] - 0.01 * steps, "the model does not learn"
        return cache[steps, grad_accum]

    return curve
