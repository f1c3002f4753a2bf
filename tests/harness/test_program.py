"""A forked program ends and prints as one that is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.program import run_forked
from tests.limits import HANGS_S

PROGRAMS = {
    "arguments and surroundings": "print(__name__, sys.argv, os.environ['WORD'], os.getcwd(), sys.path[0], '中文')",
    "status": "sys.exit(3)",
    "text as status": "sys.exit('no such thing')",
    "no status": "sys.exit()",
    "an error": "def f():\n    raise ValueError('wrong')\nf()",
    "a signal": "os.kill(os.getpid(), 9)",
    "ctrl-c": "import signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    import time\n    time.sleep(600)\n"
              "except KeyboardInterrupt:\n    print('heard')",
    "its own hook": "sys.excepthook = lambda kind, error, _: print('hook', error, file=sys.stderr)\nraise OSError('gone')",
    "at the end": "import atexit\natexit.register(print, 'last')\nprint('first')",
    "a thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()",
    "no terminal": "print(sys.stdout.isatty(), sys.stdin.read() == '', sys.stdout.encoding, sys.stderr.encoding)",
}  # fmt: skip


@pytest.mark.parametrize("case", PROGRAMS)
def test_it_ends_and_prints_as_a_started_program(tmp_path: Path, case: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import os, sys\n{PROGRAMS[case]}\n", encoding="utf-8")
    command = [sys.executable, str(program), "--flag", "a b"]
    environment = {**os.environ, "WORD": "given", "PYTHONIOENCODING": "utf-8"}
    started = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, encoding="utf-8", timeout=HANGS_S)  # fmt: skip
    status, said = run_forked(command, environment)
    assert status == started.returncode
    lines = [text.splitlines() for text in (said, started.stdout)]
    if case == "an error":  # the frames of runpy come on top
        lines = [each[-1:] for each in lines]
    assert lines[0] == lines[1]


def test_a_module_runs_and_nothing_of_one_program_reaches_the_next(tmp_path: Path) -> None:
    (tmp_path / "left.py").write_text("import os, sys\nprint(sys.argv, hasattr(os, 'left'))\nos.left = 1\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for _ in range(2):
        status, said = run_forked([sys.executable, "-m", "left", "x"], environment, tmp_path)
        assert (status, said) == (0, f"[{str(tmp_path / 'left.py')!r}, 'x'] False\n")
