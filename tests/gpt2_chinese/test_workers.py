"""Worker processes: what they get, and which signals reach them."""

from __future__ import annotations

import os
import pickle

from gpt2_chinese.workers import end_workers, start_worker

PROGRAM = """
import os, pickle, sys
first = pickle.load(sys.stdin.buffer)
from gpt2_chinese import workers
pickle.dump((first, os.getpgrp(), os.environ["NAME"], workers.__file__), sys.stdout.buffer)
sys.stdout.flush()
sys.stdin.read()
"""


def test_a_worker_gets_its_pickle_its_environment_and_no_ctrl_c() -> None:
    worker = start_worker(PROGRAM, {"a": 1}, NAME="x")
    first, group, name, file = pickle.load(worker.stdout)
    assert (first, name) == ({"a": 1}, "x") and file == start_worker.__code__.co_filename, "this checkout"
    assert group == worker.pid != os.getpgrp(), "a terminal sends Ctrl-C to its own group"
    end_workers([worker])
    assert worker.returncode == -9
    end_workers([worker])  # twice does no harm
