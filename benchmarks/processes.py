"""Processes that a benchmark starts and talks to, and programs that it runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def finding_this_checkout() -> dict[str, str]:
    """This process's environment, in which a Python program imports this checkout's packages without installation."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path}


def why_it_failed(status: int, output: str) -> str:
    """One line for a table: a program's status with its error message, or with its last line if it printed none."""
    lines = [line for line in output.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("error:")] or lines[-1:] or ["nothing was said"]
    return f"status {status}: {said[0].removeprefix('error: ')}"


def started(context: BaseContext, target: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Starts target(*arguments, pipe) in a process that ends with this one; returns it and this end of the pipe.

    Only the process holds the other end: when it ends, reading here raises EOFError.
    """
    here, there = context.Pipe()
    process = context.Process(target=target, args=(*arguments, there), daemon=True)
    process.start()
    there.close()
    return process, here
