"""Counts the cost of each folder of tests, prints it at the end of a run, and checks the budgets.

A cost is tests, seconds, programs started and ranks forked. Programs and ranks do not depend on the load of the machine, so
they have budgets: a whole run that needs more fails. Seconds are printed and never asserted.

`python -m tests.tally QUICK.json DEEP.json` prints the table of CONTRIBUTING.md from the reports of two runs. One is the
quick command, the other `-m deep`, each with TESTS_REPORT set to its file.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPORT_VARIABLE = "TESTS_REPORT"  # the path of the file for the totals
WHOLE_VARIABLE = "TESTS_WHOLE"  # set by tests/run.sh to "quick" or "all" when nothing was selected by hand
STRICT_VARIABLE = "TESTS_STRICT"  # set by conftest.py where CI is set: a skip that points to a mistake is red there

# Folder -> most programs started, most ranks forked, for the quick command. Ranks live as long as a worker. From run to run
# a file goes to another of the three workers, and after another file. So the budget of ranks is three times the need of one
# worker. The browser of tests/docs counts as a program; programs inside of a command that are forked count as nothing.
BUDGETS: dict[str, tuple[int, int]] = {
    "benchmarks": (30, 3), "chapters": (120, 120), "cluster": (80, 3), "docs": (90, 123), "durable": (4, 0),
    "exercises": (4, 40), "fresh": (0, 0), "gpt2_chinese": (96, 22), "harness": (21, 70), "layers": (30, 0),
    "pstar": (52, 80), "scripts": (82, 3),
}  # fmt: skip

started: Counter[str] = Counter()
"""Counts since the start of this process: `programs` of any subprocess call, `ranks` of the harness."""


def _on_audit(event: str, _: Any) -> None:
    if event == "subprocess.Popen":
        started["programs"] += 1


def folder_of(nodeid: str) -> str:
    """Returns `chapters` for `tests/chapters/test_x.py::test_y`."""
    return nodeid.split("/")[1]


class Tally:
    """A pytest plugin. Under xdist the workers attach costs to their reports and the controller adds them up."""

    def __init__(self) -> None:
        self.totals: dict[str, Counter[str]] = {}
        self.exceeded: list[str] = []
        self._seen: Counter[str] = Counter()

    def pytest_collection_finish(self) -> None:
        self._seen = started.copy()  # imports may also start programs

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        outcome = yield
        outcome.get_result().cost = dict(started - self._seen)
        self._seen = started.copy()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        total = self.totals.setdefault(folder_of(report.nodeid), Counter())
        total["tests"] += report.when == "call"
        total["seconds"] += report.duration
        total.update(getattr(report, "cost", {}))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        if os.environ.get(WHOLE_VARIABLE) == "quick":
            self.exceeded = over_budget(self.totals, BUDGETS)
        if self.exceeded and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if path := os.environ.get(REPORT_VARIABLE):
            Path(path).write_text(json.dumps(self.totals, indent=1) + "\n")

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Iterator[None]:
        yield  # the reason for a red run is printed after the durations and skips, where a reader of the log looks first
        terminalreporter.section("cost by folder")
        for line in table(self.totals):
            terminalreporter.write_line(line)
        for line in self.exceeded:
            terminalreporter.write_line(f"BUDGET: {line}", red=True)


def over_budget(totals: dict[str, Counter[str]], budgets: dict[str, tuple[int, int]]) -> list[str]:
    """Returns one line for each folder that started more programs or forked more ranks than its budget."""
    lines = []
    for folder, most in budgets.items():
        for kind, limit in zip(("programs", "ranks"), most, strict=True):
            if (used := totals.get(folder, Counter())[kind]) > limit:
                lines.append(f"tests/{folder} needs {used} {kind}, its budget in tests/tally.py is {limit}")
    return lines


def table(totals: dict[str, Counter[str]]) -> list[str]:
    """Returns lines of text with one row per folder."""
    rows = [f"{'folder':14}{'tests':>8}{'seconds':>9}{'programs':>10}{'ranks':>7}"]
    for folder, cost in sorted(totals.items(), key=lambda item: -item[1]["seconds"]):
        rows.append(f"{folder:14}{cost['tests']:8}{cost['seconds']:9.0f}{cost['programs']:10}{cost['ranks']:7}")
    return rows


def markdown(quick: dict[str, dict[str, float]], deep: dict[str, dict[str, float]]) -> str:
    """Returns the table of CONTRIBUTING.md: costs of the quick command by folder, and the extra costs of `--all`."""
    rows = ["| folder | quick: tests | seconds | programs | ranks | deep: tests | seconds | programs | ranks |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    total = {"quick": Counter(), "deep": Counter()}
    for folder in sorted({*quick, *deep}):
        cells = []
        for name, report in (("quick", quick), ("deep", deep)):
            cost = Counter(report.get(folder, {}))
            total[name].update(cost)
            cells += [f"{cost[key]:,.0f}" for key in ("tests", "seconds", "programs", "ranks")]
        rows.append(f"| `tests/{folder}` | {' | '.join(cells)} |")
    cells = [f"{total[name][key]:,.0f}" for name in total for key in ("tests", "seconds", "programs", "ranks")]
    return "\n".join([*rows, f"| all | {' | '.join(cells)} |"])


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin; tests/conftest.py calls it."""
    sys.addaudithook(_on_audit)
    config.pluginmanager.register(Tally(), "tally")


if __name__ == "__main__":
    print(markdown(*(json.loads(Path(path).read_text()) for path in sys.argv[1:3])))
