"""Runs a chapter's train.py on a node and counts what the node sends over the veth: `counted.py PLAN TRAIN.py FLAGS`.

PLAN is a JSON object:
    folder    the first rank of each node writes a file named like the node: [step, frame bytes, packets] after each step
    flat      pstar exchanges chunks through the process group of all ranks, as if it knew no nodes
"""

from __future__ import annotations

import json
import os
import platform
import runpy
import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
import pstar.engine  # noqa: E402
from gpt2_chinese.run.run import Run  # noqa: E402
from tests.cluster.nodes import counts_of  # noqa: E402

log = Run.log
plan = json.loads(sys.argv[1])


def counting(run: Run, step: int, **values: object) -> None:
    if os.environ["LOCAL_RANK"] == "0":
        _, sent = counts_of("self")
        with (Path(plan["folder"]) / platform.node()).open("a") as file:
            file.write(json.dumps([step, *sent]) + "\n")
    run.ranks.barrier()    # no rank sends bytes of the next step before the first rank of each node has read its count
    log(run, step, **values)


if __name__ == "__main__":
    Run.log = counting
    if plan["flat"]:
        pstar.engine.Collectives = partial(pstar.engine.Collectives, through_memory=False)
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
