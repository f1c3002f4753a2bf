"""The numbers that a run reports about its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpt2_chinese.run.metrics import Metrics, rows_before
from tests.limits import HANGS_S

SAYS_ITS_PEAK = "import torch; from gpt2_chinese.run.metrics import peak_bytes; print(peak_bytes(torch.device('cpu')))"
STARTS_IT = f"""
import subprocess, sys
memory = b"x" * 2**30
subprocess.run([sys.executable, "-c", {SAYS_ITS_PEAK!r}], check=True)
"""


def test_the_peak_of_a_process_is_not_that_of_its_parent() -> None:
    """ru_maxrss is that of the parent: a child started by vfork, as Python does, begins with it."""
    alone, started = (
        int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=HANGS_S).stdout)
        for code in (SAYS_ITS_PEAK, STARTS_IT)
    )
    assert 2**26 < alone < 2**30 and abs(started - alone) < 0.1 * alone


def test_damaged_lines_are_left_out_of_a_resumed_run(tmp_path: Path) -> None:
    """A kill cuts the last line short; after a loss of power a block of the file may hold anything."""
    good = [b'{"step": 1, "loss": 8.0}', b'{"step": 2, "loss": 7.5}', b'{"step": 3, "loss": 7.0}']
    file = tmp_path / "metrics.jsonl"
    damaged = [b"\xff\xfe\x00", b"17", b'{"step": "1"}', b'{"loss": 8.0}', b"[]"]
    file.write_bytes(b"\n".join([good[0], *damaged, *good[1:], b'{"st']))
    assert [row["step"] for row in rows_before(file, 3)] == [1, 2]
    assert rows_before(tmp_path / "none.jsonl", 3) == []


def test_tensorboard_shows_the_name_of_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    """As of a corpus from a Chinese Windows; TensorBoard takes UTF-8 only."""
    metrics = Metrics(tmp_path, rates=None)
    assert metrics.take()
    settings = {"train_data": os.fsdecode("资料".encode("gbk"))}
    metrics.begin(1, settings)
    metrics.compare(settings, {"loss": 8.0})
    metrics.close()
    for file in (tmp_path / "tensorboard").iterdir():
        assert rb"\udcd7\udcca\udcc1\udccf" in file.read_bytes()
