"""The order of the suite and its division among pytest-xdist workers: one worker runs a whole file, and one all of docs."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from tests.tally import folder_of

TOGETHER = ("docs",)  # its tests share the built site
# The slowest folders come first, so that no worker runs one alone at the end.
FIRST = ("docs", "chapters", "pstar", "cluster", "exercises", "harness")
SEED_VARIABLE = "TESTS_ORDER"  # a seed for a random order of the files


def scope_of(nodeid: str) -> str:
    """Returns the name of the group that runs in one process: the folder for a folder in TOGETHER, else the file."""
    folder = folder_of(nodeid)
    return folder if folder in TOGETHER else nodeid.split("::")[0]


def sort(items: list[pytest.Item]) -> None:
    """Puts the groups in the order of FIRST, or in a random order if SEED_VARIABLE has a seed."""
    seed = os.environ.get(SEED_VARIABLE)
    if seed:
        draw = random.Random(seed)
        place = {scope: draw.random() for scope in sorted({scope_of(item.nodeid) for item in items})}
        items.sort(key=lambda item: place[scope_of(item.nodeid)])
    else:
        place = {folder: number for number, folder in enumerate(FIRST)}
        items.sort(key=lambda item: place.get(folder_of(item.nodeid), len(FIRST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Makes xdist schedule whole groups, in the order in which pytest collected them."""
    from xdist.scheduler import LoadScopeScheduling  # late import: xdist may not be installed

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

        def remove_node(self, node: Any) -> str | None:
            """Counts the test that ended its worker as done. LoadScope would give it to one new worker after the other."""
            workload = self.assigned_work.pop(node)
            left = [(unit, nodeid) for unit in workload.values() for nodeid, done in unit.items() if not done]
            if not left:
                return None
            unit, crashed = left[0]
            unit[crashed] = True
            self.workqueue.update({scope: unit for scope, unit in workload.items() if not all(unit.values())})
            for other in self.assigned_work:
                self._reschedule(other)
            return crashed

    return ByGroup(config, log)
