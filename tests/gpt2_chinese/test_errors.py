"""An error that all ranks find is printed once, by rank 0; an error that rank 0 does not find is printed, too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.chapters.program import ROOT
from tests.limits import HANGS_S

PROGRAM = """
import signal, sys, time
from gpt2_chinese import errors

signal.signal(signal.SIGTERM, lambda *_: None)    # as a run's, which goes on until the end of its step
sleep, errors.SPEAK_S = time.sleep, float(sys.argv[1])
time.sleep = lambda seconds: (print("waits", flush=True), sleep(seconds))
errors.fail("there is no such\\nfile")
"""


def rank(number: int, speak_s: float) -> subprocess.Popen:
    """A rank of two that fails, and leaves so many seconds to rank 0."""
    env = os.environ | {"RANK": str(number), "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(speak_s)], env=env, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)  # fmt: skip


def test_rank_0_prints_at_once() -> None:
    process = rank(0, HANGS_S)
    assert process.communicate(timeout=HANGS_S) == ("", "error: there is no such file\n") and process.returncode == 2


def test_another_rank_waits_until_the_launcher_ends_it() -> None:
    process = rank(1, HANGS_S)
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=HANGS_S) == ("", "") and process.returncode == -signal.SIGTERM


def test_another_rank_prints_an_error_that_rank_0_did_not_find() -> None:
    process = rank(1, 0.1)
    said = process.communicate(timeout=HANGS_S)
    assert said == ("waits\n", "error: rank 1: there is no such file\n") and process.returncode == 2
