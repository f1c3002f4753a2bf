"""Python imports this at its start in the jobs of test_requeue.py, which put its folder on PYTHONPATH and a plan of falls.py
into FALLS_PLAN. A rank's train.py falls by the plan. The program that the plan names as "between", `python -m NAME`, writes
the file between and waits for the file go_on, once."""

import json
import os
import sys
import time

plan, words = os.environ.get("FALLS_PLAN", ""), sys.orig_argv[1:]
if plan and "RANK" in os.environ and words[0].endswith("/train.py"):
    falls = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "falls.py")
    os.execv(sys.executable, [sys.executable, falls, plan, *words])
if plan and words[:2] == ["-m", json.loads(plan).get("between")]:
    place = os.path.join(json.loads(plan)["folder"], "between")
    if not os.path.exists(place):
        open(place, "w").close()
        while not os.path.exists(os.path.join(os.path.dirname(place), "go_on")):
            time.sleep(0.02)
