"""Counts the calls of pstar's own functions: what the engine costs in Python, without a clock."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import FrameType

import pstar

PSTAR = str(Path(pstar.__file__).parent)


class PythonCalls:
    """Counts them in this thread while a `with` statement runs. Meanwhile no garbage is collected: an engine may be in it.

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
