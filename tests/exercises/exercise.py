"""Code that graders share: the judged exercise, comparisons that report expected and actual values, and ranks."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
HOLE = "is yours to write"  # part of the message of each hole


class Exercise(NamedTuple):
    """An exercise and the answer to judge. It is sent to the ranks, which load the module again.

    Attributes:
        number: the chapter's, two digits.
        who: "yours" is chapters/NN_name/exercise.py, "solved" the chapter's own code (solutions.py), else a file.
        timeout_s: limit of a case on ranks; waiting for a message has half of it.
    """

    number: str
    who: str
    timeout_s: float = 20.0

    @property
    def module(self) -> Any:
        """The module with the functions to judge."""
        return load(self.number, self.who)


def path_of(number: str) -> Path:
    """The file with the holes."""
    (path,) = ROOT.glob(f"chapters/{number}_*/exercise.py")
    return path


@functools.cache
def load(number: str, who: str) -> Any:
    """The module of an Exercise."""
    if who == "solved":
        from tests.exercises.solutions import SOLUTIONS

        return SimpleNamespace(**SOLUTIONS[number]())
    path = path_of(number) if who == "yours" else Path(who)
    spec = importlib.util.spec_from_file_location(f"exercise_{number}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def holes(path: Path) -> set[str]:
    """Functions and classes of a file that contain a hole."""
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and "NotImplementedError" in ast.unparse(node)}  # fmt: skip


# ---- comparing


class Wrong(AssertionError):
    """A wrong answer. The message is all that a student needs to read."""


def check(good: bool, what: str, expected: object = None, actual: object = None) -> None:
    """Raises Wrong with the subject, the expected and the actual value, unless `good`."""
    __tracebackhide__ = True
    if not good:
        rows = [f"  expected   {expected}", f"  actual     {actual}"] if expected is not None else []
        raise Wrong("\n".join([what, *rows]))


def same(what: str, expected: Any, actual: Any, tolerance: float = 0.0) -> None:
    """Raises Wrong unless `actual` equals `expected`. Tensors and numbers have a `tolerance`, relative to the largest value.

    Reason for the tolerances: another order of summation in fp32 gave differences of 1e-7.
    """
    __tracebackhide__ = True
    if isinstance(expected, Tensor):
        check(isinstance(actual, Tensor), what, f"a tensor of shape {tuple(expected.shape)}", repr(actual))
        check(actual.shape == expected.shape, f"{what}: shape", tuple(expected.shape), tuple(actual.shape))
        actual, expected = actual.detach().to(expected.dtype), expected.detach()
        room = tolerance * max(1e-30, float(expected.abs().max())) if expected.numel() else 0.0
        wrong = ~torch.isclose(actual, expected, rtol=0, atol=room, equal_nan=True)
        if wrong.any() and expected.numel() > 8:
            place = tuple(wrong.nonzero()[0].tolist())
            what += f" ({int(wrong.sum())} of {wrong.numel()} elements differ, the first at {list(place)})"
            expected, actual = expected[place], actual[place]
        check(not wrong.any(), what, _shown(expected), _shown(actual))
    elif isinstance(expected, float):
        number = isinstance(actual, int | float | Tensor)
        good = number and (float(actual) == expected or abs(float(actual) - expected) <= tolerance * abs(expected))
        check(good, what, f"{expected:.8g}", f"{float(actual):.8g}" if number else repr(actual))
    else:
        check(actual == expected, what, expected, actual)


def _shown(tensor: Tensor) -> str:
    return str([float(f"{number:.6g}") for number in tensor.flatten().tolist()]) if tensor.dim() else f"{tensor.item():.6g}"


def on_ranks(ranks: Callable, num_ranks: int, case: Callable, exercise: Exercise, *args: Any) -> list:
    """Results of `case(rank, num_ranks, exercise, *args)` on real processes, by rank."""
    return ranks(num_ranks).run(case, exercise, *args, timeout=exercise.timeout_s)
