"""Counts the calls of pstar's own functions: what the engine costs in Python, without a clock."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from torch import nn

import pstar
from tests import toy

PSTAR = str(Path(pstar.__file__).parent)


class PythonCalls:
    """Counts them in this thread while a `with` statement runs.

    The garbage collector is off meanwhile: the calls that end another test's engine would count.

    Attributes:
        num: the calls until now.
    """

    def __init__(self) -> None:
        self.num = 0

    def __enter__(self) -> PythonCalls:
        gc.disable()
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _count(self, frame: FrameType, event: str, _: object) -> None:
        self.num += event == "call" and frame.f_code.co_filename.startswith(PSTAR)


def calls_of_a_step(model_func: Callable[[], nn.Module] = toy.Toy, **keys: object) -> int:
    """The calls in one step of an engine that has traced its step."""
    model, optimizer = toy.build(model_func, **keys)
    toy.train(model, optimizer, 2)
    with PythonCalls() as calls:
        toy.train(model, optimizer, 1, first=2)
    return calls.num
