"""An environment like that of a machine with a GPU: torch, pytest and what this checkout's programs import, nothing of ours.

    python = environment(folder)                   # its interpreter
    run_as_programs(python, [["benchmarks/gpu/adam.py"], ...])
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import venv
from pathlib import Path

from tests.limits import HANGS_S

REPO = Path(__file__).parents[2]
PACKAGES = ("torch", "numpy", "pytest", "hypothesis", "orjson", "tokenizers", "safetensors", "tensorboard", "setuptools",
            "tqdm")

# Loads torch once, then becomes each program in a fork: starting from nothing takes seconds a program.
PROGRAMS = """
import json, os, runpy, sys, tempfile
import torch
for command in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.argv, sys.path[0] = command, os.path.dirname(os.path.abspath(command[0]))
                runpy.run_path(command[0], run_name="__main__")
                status = 0
            except SystemExit as end:
                status = end.code or 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        err.seek(0)
        print(json.dumps([status, out.read(), err.read()]), flush=True)
"""


def needed(names: tuple[str, ...]) -> set[str]:
    """The installed packages of these names, and those that they need."""
    found, waiting = set(), list(names)
    while waiting:
        name = waiting.pop()
        try:
            requirements = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue    # for another system or Python
        if name not in found:
            found.add(name)
            waiting += [re.match(r"[\w.-]+", each).group() for each in requirements if "extra ==" not in each]
    return found


def environment(folder: Path) -> Path:
    """Makes a virtual environment of PACKAGES, as links to the packages of this one; returns its interpreter."""
    venv.create(folder, symlinks=True)
    site, = folder.glob("lib/python*/site-packages")
    for name in needed(PACKAGES):
        package = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(package.locate_file(top)).resolve())
    return folder / "bin" / "python"


def variables() -> dict[str, str]:
    """The environment's variables without those that lead Python to this checkout or to a GPU."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {"CUDA_VISIBLE_DEVICES": ""}


def run_as_programs(python: Path, commands: list[list[str]], folder: Path) -> list[tuple[int, str, str]]:
    """(status, stdout, stderr) of each Python program with its arguments, run from `folder`."""
    done = subprocess.run([python, "-c", PROGRAMS, json.dumps(commands)], env=variables(), cwd=folder, capture_output=True,
                          text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]
