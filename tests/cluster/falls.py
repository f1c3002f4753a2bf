"""Runs a chapter's train.py, one of whose ranks falls at chosen steps: `falls.py PLAN TRAIN.py FLAGS`.

PLAN is a JSON object:
    folder    where files say that a step was reached
    hold      {number of ranks: steps}: at these steps of a run with so many ranks, the last rank writes the file held_STEP,
              and waits until it is killed or asked to stop; once for each step
    kill      [rank, step, seconds]: so long after this step was computed, this rank of two sends SIGKILL to all processes
              of its node, itself included
    cut       the same, but the rank cuts the link of its node
    raise     the last rank raises at this step

The held step has been computed, and is neither logged nor saved.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from gpt2_chinese.distributed import stop_signal
from gpt2_chinese.run.run import Run
from tests.cluster.nodes import DEVICE

log = Run.log
plan = json.loads(sys.argv[1])
rank, num_ranks = int(os.environ["RANK"]), os.environ["WORLD_SIZE"]


def kill_the_node() -> None:
    os.kill(-1, signal.SIGKILL)  # all but this process and process 1 of the node
    os.kill(os.getpid(), signal.SIGKILL)


def cut_the_link() -> None:
    subprocess.run(["ip", "link", "set", DEVICE, "down"], check=True)


def falling(run: Run, step: int, **values: object) -> None:
    for name, act in (("kill", kill_the_node), ("cut", cut_the_link)):
        victim, fatal_step, seconds = plan.get(name, (None, None, 0))
        if num_ranks == "2" and (victim, fatal_step) == (rank, step):
            threading.Timer(seconds, act).start()
    if rank == int(num_ranks) - 1:
        held = Path(plan.get("folder", "")) / f"held_{step}"
        if step in plan.get("hold", {}).get(num_ranks, ()) and not held.exists():
            held.touch()
            while not stop_signal.asked():
                time.sleep(0.02)
        if plan.get("raise") == step:
            raise ValueError(f"step {step} breaks on purpose")
    log(run, step, **values)


if __name__ == "__main__":
    Run.log = falling
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
