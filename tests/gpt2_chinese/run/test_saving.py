"""Saves in the background: a copy of the state at that moment, one save at a time, every error reported."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpt2_chinese import background
from gpt2_chinese.checkpoint import step_folder
from gpt2_chinese.checkpoint.find import newest_complete
from gpt2_chinese.checkpoint.load import load
from gpt2_chinese.distributed.ranks import Ranks
from gpt2_chinese.errors import RunError
from gpt2_chinese.run.resolve import resolve
from gpt2_chinese.run.saving import Saving
from gpt2_chinese.settings import ROOT, Settings

PROGRAM = str(ROOT / "chapters" / "00_single" / "train.py")


@pytest.fixture
def may_end() -> Iterator[threading.Event]:
    """What a save in the background waits for; set at the end of a test that has failed, too."""
    event = threading.Event()
    yield event
    event.set()
    background.wait()
    background.take_error()


def saving(tmp_path: Path, said: list[str], *flags: str) -> Saving:
    settings = resolve(Settings.from_command_line(PROGRAM, "", ["--output-dir", str(tmp_path), "--async-save", *flags]))
    return Saving(settings, Ranks(), lambda: None, said.append)


def save(into: Saving, step: int) -> None:
    weights = {"a": torch.full((50,), float(step))}
    into.save(step, weights, {"step.a": torch.tensor(1.0)}, None, lambda: None)
    weights["a"].zero_()  # training goes on


def test_a_save_waits_for_the_one_before_and_says_so(tmp_path: Path, monkeypatch, may_end: threading.Event) -> None:
    writing, order = threading.Event(), []
    whole = step_folder.save

    def slow(directory: Path, step: int, *more: object) -> None:
        order.append(("begins", step))
        writing.set()
        may_end.wait()
        whole(directory, step, *more)
        order.append(("ends", step))

    class Said(list):
        def append(self, line: str) -> None:
            assert background.is_running()
            super().append(line)
            may_end.set()

    monkeypatch.setattr(step_folder, "save", slow)
    into = saving(tmp_path, said := Said())
    save(into, 1)
    writing.wait()
    assert newest_complete(tmp_path / "checkpoints") is None and not said, "the first save has returned before it is written"
    save(into, 2)
    assert said == ["the save of step 2 waits until the one before it is written"]
    into.settle()
    assert order == [("begins", 1), ("ends", 1), ("begins", 2), ("ends", 2)]
    for step in (1, 2):
        weights, _, state = load(tmp_path / "checkpoints" / f"step_{step:06d}")
        assert state["step"] == step and torch.equal(weights["a"], torch.full((50,), float(step)))


def test_a_failed_save_is_reported_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    into = saving(tmp_path, [])
    save(into, 1)
    into.settle()
    monkeypatch.setattr(step_folder, "check_space", lambda *_: (_ for _ in ()).throw(RunError("no room")))
    save(into, 2)
    good = tmp_path / "checkpoints" / "step_000001"
    with pytest.raises(RunError) as error:
        save(into, 3)
    assert str(error.value) == f"the state after step 2 is not saved: no room; the last good checkpoint is {good}"
    assert [folder.name for folder in good.parent.iterdir()] == [good.name]
    into.settle()  # it is reported once


def test_the_end_of_a_process_waits_and_prints_an_error_that_nobody_reported(capsys, may_end: threading.Event) -> None:
    def work() -> None:
        may_end.wait()
        raise RunError("no room")

    background.start(work)
    background.end(0.01)
    assert background.is_running() and not capsys.readouterr().err
    may_end.set()
    background.end()
    assert capsys.readouterr().err == "error: no room\n" and not background.has_failed()


def test_old_checkpoints_are_removed_in_the_background(tmp_path: Path) -> None:
    into = saving(tmp_path, [], "--keep-last", "1", "--keep-every", "2")
    for step in range(1, 6):
        save(into, step)
    into.settle()
    assert {folder.name for folder in (tmp_path / "checkpoints").iterdir()} == {f"step_{n:06d}" for n in (2, 4, 5)}
