"""docs/captured: the chapters still behave as in the runs that the pages show, and their curves agree."""

from __future__ import annotations

import os
import re
import sys

import pytest

from tests.cover import quick_only
from tests.docs.pages import ROOT, beyond_the_repository

LAW = 1e-4  # the largest relative difference of two curves at any step; the captured runs stay far below it


@pytest.fixture(scope="module")
def captures():
    from docs.generate.recorded import captures

    return captures


def apart(first: list[float], second: list[float]) -> float:
    """The largest relative difference over the steps that both have."""
    return max(abs(a - b) / abs(a) for a, b in zip(first, second, strict=False))


def unchanging(said: str) -> list[str]:
    """The lines of a header that do not depend on the length of the run."""
    kept = ("model", "corpus", "vocabulary", "batch", "computing", "precision", "chunks", "model data", "budgets")
    lines = [line.strip() for line in said.partition("\nstep ")[0].splitlines()]
    return [line for line in lines if line.startswith(kept)]


def test_every_chapter_is_captured_with_the_command_of_now(captures) -> None:
    written = {path.parent.name for path in ROOT.glob("chapters/*/train.py")}
    assert set(captures.CHAPTERS) == written == {path.stem for path in captures.FOLDER.glob("0*.json")}
    for chapter in captures.CHAPTERS:
        found = captures.captured(chapter)
        assert found["command"] == captures.command_of(chapter), f"renew: {chapter}"
        assert len(found["losses"]) == captures.STEPS and "\nDone.\n" in found["said"]
        assert ("rank 1 " in found["said"]) == (chapter != captures.BASE), "two processes, except the baseline"


@pytest.mark.parametrize("chapter", quick_only(["00_single", "07_patrickstar"], "00_single"))
def test_a_chapter_still_prints_its_captured_output(captures, chapter: str) -> None:
    """Warm-up has the same steps in a run of any length, so the shortest run begins like the captured one."""
    flags = re.sub(rf"--(max-steps|eval-every) {captures.STEPS}", rf"--\1 {captures.WARMUP + 1}", captures.flags_of(chapter))
    now, then = captures.run(chapter, flags), captures.captured(chapter)
    assert apart(now["losses"][: captures.WARMUP], then["losses"]) < LAW, (
        "renew: python -m docs.generate --capture-chapters"
    )
    header = unchanging(now["said"])
    assert len(header) >= 5 and header == unchanging(then["said"]), "renew: python -m docs.generate --capture-chapters"


def test_the_captured_curves_are_one(captures) -> None:
    base = captures.captured(captures.BASE)["losses"]
    assert base[-1] < base[0] - 1
    for chapter in captures.CHAPTERS:
        assert apart(base, captures.captured(chapter)["losses"]) < LAW, chapter


def test_another_curve_and_another_header_are_found(captures) -> None:
    found = captures.captured(captures.BASE)
    wrong = [*found["losses"][:5], found["losses"][5] * 1.001, *found["losses"][6:]]
    assert apart(found["losses"], wrong) > LAW
    assert unchanging(found["said"]) != unchanging(found["said"].replace("4 layers", "5 layers"))


def test_no_path_of_this_machine_is_in_a_capture(captures) -> None:
    for path in captures.FOLDER.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert not beyond_the_repository(text)
        for place in {str(ROOT), sys.prefix, os.path.expanduser("~/")} - {"/usr", "/"}:
            assert place not in text


def test_a_number_and_a_name_mean_a_chapter(captures) -> None:
    assert captures.name_of("02") == captures.name_of("02_ddp") == "02_ddp"
    with pytest.raises(SystemExit, match="no chapter"):
        captures.name_of("2")


def test_a_missing_capture_names_the_command_that_makes_it(captures, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(captures, "REPO", tmp_path)
    monkeypatch.setattr(captures, "FOLDER", tmp_path / "captured")
    captures.captured.cache_clear()
    try:
        with pytest.raises(SystemExit, match="--capture-chapters 03"):
            captures.captured("03_horovod")
    finally:
        captures.captured.cache_clear()
