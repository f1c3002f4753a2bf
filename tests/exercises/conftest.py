"""Two uses of the same graders, test_00.py to test_08.py.

If a student names this folder, the graders judge chapters/NN_name/exercise.py. Each failure has a few lines:

    bash chapters/02_ddp/exercise.sh
    bash tests/run.sh tests/exercises -k 02

If the folder is not named (`bash tests/run.sh`: all tests), or with `--solved`, the graders themselves are tested. Each
test runs twice. [solved] must pass with the chapter's own code in the holes (solutions.py). [shipped] must fail on the
shipped exercise with the message of a hole. test_grader.py adds wrong answers that the graders must reject.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.exercises.exercise import HOLE, Exercise, holes, load, path_of
from tests.exercises.say import short
from tests.harness.pool import preload
from tests.limits import limited
from tests.tally import STRICT_VARIABLE

HERE = Path(__file__).resolve().parent
NOT_FOR_STUDENTS = "test_grader.py"
PATIENCE_S = 120.0  # limit for our code on ranks, on a busy machine, and for a student's code in this process


def in_time(seconds: float) -> AbstractContextManager[None]:
    """Interrupts a block that does not finish. Ranks have their own limit; a loop in this process has none."""
    return limited(seconds, TimeoutError(f"no answer in {seconds:g} s: it hangs"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--solved", action="store_true", help="tests/exercises: judge the graders, not your exercises")


def pytest_configure(config: pytest.Config) -> None:
    if not grading(config):
        preload("tests.exercises.preloaded")  # else each rank would import it, which takes seconds


def grading(config: pytest.Config) -> bool:
    """True if a student's exercises are judged: the command names this folder, or one of its files for students."""
    named = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    for_students = [path for path in named if HERE in (path, path.parent) and path.name != NOT_FOR_STUDENTS]
    return bool(for_students) and not config.getoption("--solved", False)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path.name == NOT_FOR_STUDENTS and grading(config) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    number = re.fullmatch(r"test_(\d\d)", metafunc.module.__name__.rpartition(".")[2])
    if number and "exercise" in metafunc.fixturenames:
        solved, yours = Exercise(number[1], "solved", PATIENCE_S), Exercise(number[1], "yours")
        judged = {"yours": yours} if grading(metafunc.config) else {"solved": solved, "shipped": yours}
        metafunc.parametrize("exercise", judged.values(), ids=judged)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Reports a [shipped] test as passed if it fails with the message of a hole."""
    if grading(pyfuncitem.config):
        with in_time(PATIENCE_S):
            return (yield)
    if getattr(pyfuncitem, "callspec", None) is None or not pyfuncitem.callspec.id.endswith("shipped"):
        return (yield)
    number = pyfuncitem.callspec.params["exercise"].number
    if written := set(vars(load(number, "solved"))) - holes(path_of(number)):
        said = f"{path_of(number).parent.name}/exercise.py is not as shipped: {', '.join(sorted(written))} is written"
        pytest.fail(said, pytrace=False) if os.environ.get(STRICT_VARIABLE) else pytest.skip(said)
    try:
        yield
    except Exception as error:
        if HOLE in str(error):
            return True
        raise
    return pytest.fail("passes as shipped: it judges none of the holes", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Generator[None, Any, Any]:
    report = yield
    if report.failed and grading(item.config):
        report.longrepr = short(call.excinfo.value, path_of(item.callspec.params["exercise"].number)) + "\n"
    return report
