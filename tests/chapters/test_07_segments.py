"""Chapter 07 sets how GPU memory grows before launch() starts CUDA, in each process, and only for a GPU."""

from __future__ import annotations

import os

from gpt2_chinese.run.resolve import resolve
from pstar.memory.segments import GROWING, OLDER, SETTING
from tests.chapters.program import ROOT
from tests.chapters.technique import technique


def test_for_a_gpu_segments_grow_before_any_process_starts(monkeypatch, tmp_path) -> None:
    for name in (SETTING, *OLDER):
        monkeypatch.delenv(name, raising=False)
    given = ["--output-dir", str(tmp_path), "--nproc", "1", "--device", "cpu"]
    program = str(ROOT / "chapters/07_patrickstar/train.py")
    settings = resolve(technique("07_patrickstar", "engine_settings").Settings.from_command_line(program, "", given))
    assert SETTING not in os.environ
    settings.device = "cuda"
    settings.check_resolved()
    assert os.environ[SETTING] == GROWING
