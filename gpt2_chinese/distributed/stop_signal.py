"""Stops a run on SIGTERM, or on SIGUSR1, which Slurm sends before the time limit (sbatch --signal=USR1@60).

    to a rank           -> it notes the signal
    to the launcher     -> it makes the file that STOP_FILE_VARIABLE names, which its ranks look for
    all ranks agree once a step (Run.steps), save, and end with status 0

The second signal ends the run at once; but in a job whose script sets STOPPED_VARIABLE it does nothing, because srun may
send a rank the SIGTERM that Slurm has sent it. Slurm itself kills what does not end. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from durable.files import replacing
from gpt2_chinese import background

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STOP_FILE_VARIABLE = "GPT2_CHINESE_STOP_FILE"  # set by a launcher of ours
STOPPED_VARIABLE = "GPT2_CHINESE_STOPPED"  # set by the script of a job: a file made where a signal has ended the run early
SAVE_S = 20.0  # for a save under way when the job has failed: torchrun kills a rank 30 s after its signal
AGAIN = "a second signal ends it at once"

_noted: list[str] = []  # of the module: a signal goes to the whole process


def listen(is_lost: Callable[[], bool] = lambda: False, signals: tuple[signal.Signals, ...] = SIGNALS) -> None:
    """Notes the first signal to this process, for `asked`; the second has its default effect, the end, or none (see above).

    Args:
        is_lost: True when the job has failed and the launcher ends its ranks; then the first signal ends the process, too.
        signals: to listen to.
    """

    def note(number: int, _: Any) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN if STOPPED_VARIABLE in os.environ else signal.SIG_DFL)
        if is_lost():
            background.end(SAVE_S)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        _noted.append(signal.Signals(number).name)

    for each in signals:
        signal.signal(each, note)


def asked() -> str:
    """The name of the signal that asked this process to stop, "" before one came."""
    if _noted:
        return _noted[0]
    with contextlib.suppress(OSError, KeyError):
        return Path(os.environ[STOP_FILE_VARIABLE]).read_text(encoding="utf-8")
    return ""


def note_stopped(step: int) -> None:
    """Tells the script of the job, which sees status 0, that a signal has ended the run after `step`. Rank 0 calls it."""
    if STOPPED_VARIABLE in os.environ:
        with replacing(Path(os.environ[STOPPED_VARIABLE])) as staging:
            staging.write_text(f"{step}\n", encoding="utf-8")


@contextlib.contextmanager
def passed_on(at_once: Callable[[], Any]) -> Iterator[Callable[[], None]]:
    """For a launcher: passes the first signal on to the ranks, through a file; the second signal calls `at_once`.

    Yields a function that installs the handlers again, for use after a library has installed its own.
    """
    folder = Path(tempfile.mkdtemp(prefix="gpt2_chinese_"))
    file = folder / "stop"
    os.environ[STOP_FILE_VARIABLE] = str(file)

    def act(number: int, _: Any) -> None:
        if file.exists():
            at_once()
            return
        with replacing(file) as staging:
            staging.write_text(signal.Signals(number).name, encoding="utf-8")

    def install() -> None:
        for each in SIGNALS:
            signal.signal(each, act)

    install()
    try:
        yield install
    finally:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        os.environ.pop(STOP_FILE_VARIABLE, None)
        shutil.rmtree(folder, ignore_errors=True)
