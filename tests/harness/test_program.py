"""A forked program ends and prints as one that is started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.handed_over import handing_over
from tests.harness.program import run_forked
from tests.limits import HANGS_S, wait_until

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


INNER = """
import os, sys
assert "torch" in sys.modules, "it was forked"
print(sys.argv, os.environ["WORD"], os.getcwd(), sys.stdin.read(), flush=True)
print("an error", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""
OUTER = """
import subprocess, sys
print("outer", flush=True)
sys.exit(subprocess.run([sys.executable, "-u", "inner.py", "5"], input="given", text=True).returncode)
"""


def test_programs_inside_a_command_are_handed_over_with_their_files_and_end_with_their_status(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text(INNER)
    (tmp_path / "outer.py").write_text(OUTER)
    code = "import sys; print('torch' in sys.modules)"
    line = f"'{sys.executable}' -m outer 2> said || echo status $?; '{sys.executable}' -c \"{code}\""
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=handing_over({**os.environ, "WORD": "word"}), text=True,
                          stdout=subprocess.PIPE, timeout=HANGS_S)  # fmt: skip
    inner = f"['inner.py', '5'] word {tmp_path} given"
    assert done.stdout.splitlines() == ["outer", inner, "status 5", "False"], (tmp_path / "said").read_text()
    assert (tmp_path / "said").read_text() == "an error\n"


WAITS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
pathlib.Path("made").write_text(str(os.getpid()))
pathlib.Path("made").rename("pid")
while True:
    time.sleep(0.02)
"""


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 7), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_signal_to_python_reaches_the_program_that_it_handed_over(tmp_path: Path, number: int, status: int) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    python = subprocess.Popen([sys.executable, "waits.py"], cwd=tmp_path, env=handing_over(dict(os.environ)))
    wait_until((tmp_path / "pid").exists, "the program", lambda: python.poll() is None)
    pid = int((tmp_path / "pid").read_text())
    assert pid != python.pid
    python.send_signal(number)
    assert python.wait(HANGS_S) == status
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the program")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_that_a_signal_ends_ends_its_python_by_the_same(tmp_path: Path, number: int) -> None:
    (tmp_path / "dies.py").write_text(f"import os\nprint('runs', flush=True)\nos.kill(os.getpid(), {int(number)})\n")
    done = subprocess.run([sys.executable, "dies.py"], cwd=tmp_path, env=handing_over(dict(os.environ)), text=True,
                          capture_output=True)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (-number, "runs\n", ""), "once, and by the signal"
