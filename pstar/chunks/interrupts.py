"""Ctrl-C ends a step between two operations of the engine, never inside one, so that training can go on, as in a notebook.

Python raises KeyboardInterrupt between any two lines of the main thread. A step that it cut inside the engine would leave a
block pinned or a gradient half moved, and later steps would be wrong. So functions that change the engine's state are marked
with `whole`, and the handler of SIGINT looks at the stack. Inside a marked function it only notes the signal, and `check`
raises KeyboardInterrupt before the next marked function begins, or after the step. Elsewhere, also in the code of a model's
modules, it raises at once, as Python does.

Marking a function costs nothing when it runs. A handler that the program has set itself stays.
"""

import signal
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable)

MODEL = torch.nn.Module._call_impl.__code__    # around a module's forward

_whole: set[CodeType] = {weakref.finalize.__call__.__code__}    # from there Python would drop the exception
waiting = False
"""Whether Ctrl-C came while a marked function ran."""


def whole(function: F) -> F:
    """Marks a function: Ctrl-C waits until it has ended. Below other decorators."""
    _whole.add(function.__code__)
    return function


@torch.compiler.disable    # torch.compile(engine) is for the module's code
def wait_for_operations(num_ranks: int) -> None:
    """Installs the handler, unless the program has its own, or this is not its main thread.

    With several ranks Python's handler stays: a rank that Ctrl-C has stopped cannot catch up with the others, and one that
    waits for them, inside a marked function, must end at once.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if num_ranks == 1 and in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _note)


def check(*_: object) -> None:
    """Raises KeyboardInterrupt if Ctrl-C came while a marked function ran. Also a hook, with any arguments."""
    global waiting
    if waiting:
        waiting = False
        raise KeyboardInterrupt


def _note(number: int, frame: FrameType | None) -> None:
    global waiting
    while frame is not None and frame.f_code is not MODEL:
        if frame.f_code in _whole:
            waiting = True
            return
        frame = frame.f_back
    waiting = False    # one that waited ends with this one
    raise KeyboardInterrupt
