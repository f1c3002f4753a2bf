"""Runs a chapter's train.py, whose rank 1 raises in step 3: `breaks.py TRAIN.py FLAGS`. For test_failures.py."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from gpt2_chinese.run.run import Run

log = Run.log


def breaking(run: Run, step: int, **values: object) -> None:
    if os.environ["RANK"] == "1" and step == 3:
        raise ValueError("step 3 breaks on purpose")
    log(run, step, **values)


if __name__ == "__main__":
    Run.log = breaking
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
