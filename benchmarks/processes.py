"""Processes that a benchmark starts and talks to."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any


def started(context: BaseContext, target: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Starts target(*arguments, pipe) in a process that ends with this one; returns it and this end of the pipe.

    Only the process holds the other end: when it ends, reading here raises EOFError.
    """
    here, there = context.Pipe()
    process = context.Process(target=target, args=(*arguments, there), daemon=True)
    process.start()
    there.close()
    return process, here
