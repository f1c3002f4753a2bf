"""The machinery of tests/run.sh: what is quick and what is deep, what a folder costs, and that a red run is red."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import tally
from tests.cover import array, mark_deep, quick_only
from tests.workers import scope_of, sort

ROOT = Path(__file__).parents[2]
SIZES = (7, 2, 3)


def is_deep(case) -> bool:
    return any(mark.name == "deep" for mark in case.marks)


@pytest.mark.parametrize("strength, most", [(1, 7), (2, 21), (3, 42)])
def test_quick_cases_have_every_combination(strength: int, most: int) -> None:
    product = list(itertools.product(*map(range, SIZES)))
    quick = [product[number] for number in array(product, strength)]
    assert len(quick) <= most
    for axes in itertools.combinations(range(3), strength):
        for values in itertools.product(*(range(SIZES[axis]) for axis in axes)):
            assert any(all(case[a] == v for a, v in zip(axes, values, strict=True)) for case in quick), values


def test_values_are_used_alike() -> None:
    product = list(itertools.product(range(8), range(4)))
    assert Counter(product[number][1] for number in array(product, 1)) == dict.fromkeys(range(4), 2)


def test_only_named_cases_stay_quick() -> None:
    first, second = quick_only({"a": 1, "b": 2}, "b")
    assert is_deep(first) and first.values == ("a",) and second == "b"
    with pytest.raises(ValueError, match="no such case: .'c'"):
        quick_only({"a": 1}, "c")


def marked_case(mark: str, **params: object) -> SimpleNamespace:
    """What mark_deep uses of a collected test."""
    marks = [mark]
    return SimpleNamespace(path="test_x.py", originalname="test_x", nodeid="test_x.py::test_x", marks=marks,
                           callspec=SimpleNamespace(params=params), add_marker=lambda mark: marks.append(mark.name),
                           get_closest_marker=lambda name: name if name in marks else None)  # fmt: skip


def test_a_mark_leaves_cases_out_or_is_an_error() -> None:
    cases = [marked_case("pairs", a=a, b=b, c=c) for a in "xy" for b in "xy" for c in "xy"]
    mark_deep(cases)
    assert any("deep" in case.marks for case in cases)
    for mark, params in (("pairs", {"case": ("x", "y", "z")}), ("pairs", {"a": "x", "b": "y"}), ("each", {"a": "x"})):
        with pytest.raises(pytest.UsageError, match=f"test_x: {mark} needs more than"):
            mark_deep([marked_case(mark, **params)])


def test_a_file_stays_with_one_worker_and_the_pages_with_one() -> None:
    assert scope_of("tests/scripts/test_x.py::test_y[a/b::c]") == "tests/scripts/test_x.py"
    assert scope_of("tests/pstar/chunks/test_x.py::test_y") == "tests/pstar/chunks/test_x.py"
    assert scope_of("tests/docs/test_x.py::test_y") == "docs"


def test_files_come_in_the_given_order_or_in_a_random_one(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"tests/{folder}/test_{n}.py::test" for folder in ("scripts", "docs", "chapters") for n in "abc"]
    files = [SimpleNamespace(nodeid=name) for name in names]
    as_given, shuffled = list(files), list(files)
    monkeypatch.delenv("TESTS_ORDER", raising=False)
    sort(as_given)
    assert as_given == files[3:] + files[:3]
    monkeypatch.setenv("TESTS_ORDER", "1")
    sort(shuffled)
    again = list(files)
    sort(again)
    assert shuffled == again != as_given and sorted(map(id, shuffled)) == sorted(map(id, files))
    assert [item.nodeid for item in shuffled if "docs" in item.nodeid] == [item.nodeid for item in files[3:6]]


def test_a_folder_over_its_budget_is_named() -> None:
    totals = {"chapters": Counter(programs=5, ranks=9)}
    assert tally.over_budget(totals, {"chapters": (5, 9), "scripts": (0, 0)}) == []
    [line] = tally.over_budget(totals, {"chapters": (4, 9)})
    assert line == "tests/chapters needs 5 programs, its budget in tests/tally.py is 4"


TESTS = """
import subprocess, sys
import pytest
from tests.harness import run_ranks

def test_program(): subprocess.run([sys.executable, "-c", ""], check=True)
def case(rank, num_ranks): return rank
def test_ranks(): assert run_ranks(case, 2) == [0, 1]
@pytest.mark.deep
def test_deep(): raise AssertionError("deep")
@pytest.mark.each
@pytest.mark.parametrize("a", [0, 1])
@pytest.mark.parametrize("b", [0, 1])
def test_each(a, b): assert a == b
"""


@pytest.mark.parametrize("budget, status", [((0, 1), 1), pytest.param((1, 2), 0, marks=pytest.mark.deep)])
def test_two_workers_count_and_go_red(tmp_path: Path, budget: tuple[int, int], status: int) -> None:
    folder = tmp_path / "tests" / "sample"
    folder.mkdir(parents=True)
    (folder / "test_sample.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(f"from tests.conftest import *\ntally.BUDGETS = {{'sample': {budget}}}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  deep\n  each\n")
    report = tmp_path / "report.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TESTS_WHOLE": "quick", "TESTS_REPORT": str(report)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "--no-loadscope-reorder",
               "-m", "not deep", "tests/sample"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    cost = json.loads(report.read_text())["sample"]
    assert (cost["tests"], cost["programs"], cost["ranks"]) == (4, 1, 2)
    assert done.stdout.count("BUDGET: tests/sample needs") == (0 if status == 0 else 2), done.stdout
    assert done.stdout.splitlines()[-2].startswith("BUDGET: ") == (status != 0), "the reason is not next to the last line"


HANGING = """
import time
def test_before(): pass
def test_hangs(): time.sleep(1000)
def test_after(): pass
def test_long_difference(): assert list(range(1000)) == list(range(1, 1001))
"""


def test_a_test_that_hangs_ends_with_its_stack_and_the_others_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "sample"
    folder.mkdir(parents=True)
    (folder / "test_sample.py").write_text(HANGING)
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    limit = "faulthandler_timeout = 3\nfaulthandler_exit_on_timeout = true\n"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{limit}markers =\n  deep\n  each\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "2", "--no-loadscope-reorder", "tests/sample"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CI": "true"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "in test_hangs" in done.stderr, done.stderr
    assert "crashed while running 'tests/sample/test_sample.py::test_hangs'" in done.stdout
    assert "Use -v to get more diff" in done.stdout, "on CI pytest would compare long lists for an hour"


def test_the_suite_has_a_limit_for_a_test() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert options["faulthandler_exit_on_timeout"] and 0 < options["faulthandler_timeout"] <= 900
