"""Runs a chapter's train.py, whose last rank falls at chosen steps: `falls.py PLAN TRAIN.py FLAGS`.

PLAN is a JSON object:
    folder    where a file says that a step was reached
    hold      {number of ranks: step}: at this step of a run with so many ranks, the last rank writes the file named like
              that number, and waits until it is killed or asked to stop
    kill      [step, seconds]: so long after this step was computed, the last rank of two sends SIGKILL to all processes of
              its node, itself included
    raise     the last rank raises at this step

The held step has been computed, and is neither logged nor saved.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

from gpt2_chinese.distributed import stop_signal
from gpt2_chinese.run.run import Run

log = Run.log
plan = json.loads(sys.argv[1])
rank, num_ranks = int(os.environ["RANK"]), os.environ["WORLD_SIZE"]


def kill_the_node() -> None:
    os.kill(-1, signal.SIGKILL)  # all but this process and process 1 of the node
    os.kill(os.getpid(), signal.SIGKILL)


def falling(run: Run, step: int, **values: object) -> None:
    if rank == int(num_ranks) - 1:
        if plan.get("hold", {}).get(num_ranks) == step:
            (Path(plan["folder"]) / num_ranks).touch()
            while not stop_signal.asked():
                time.sleep(0.02)
        if num_ranks == "2" and plan.get("kill", [0])[0] == step:
            threading.Timer(plan["kill"][1], kill_the_node).start()
        if plan.get("raise") == step:
            raise ValueError(f"step {step} breaks on purpose")
    log(run, step, **values)


if __name__ == "__main__":
    Run.log = falling
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
