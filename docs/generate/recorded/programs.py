"""Runs docs/programs with the commands in their first lines, for the pages and the pictures of the collectives.

    outputs()                         name -> output of a program, kept until a program, a package or torch changes
    python docs/generate/recorded/programs.py FOLDER NAME...   with the repository in PYTHONPATH
                                      runs programs one after the other in this process and writes each output into
                                      FOLDER/NAME.RANK. Under torchrun every rank does so: a dozen programs cost one start.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import runpy
import shlex
import subprocess
import sys
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path

from docs.generate.recorded.measured import GENERATED, REPO, environment, write_whole

PROGRAMS = REPO / "docs" / "programs"
STORE = GENERATED / "programs.json"
OWN_PROCESS = ("launcher", "start_cost", "peak")  # they start processes, or measure their own process


def names() -> list[str]:
    """The names of all programs."""
    return sorted(path.stem for path in PROGRAMS.glob("*.py"))


def command_of(name: str) -> str:
    """The command with which a reader starts a program: the only line of its docstring."""
    command = ast.get_docstring(ast.parse((PROGRAMS / f"{name}.py").read_text(encoding="utf-8")))
    if not command or "\n" in command or f"docs/programs/{name}.py" not in command:
        raise SystemExit(f"error: the first line of docs/programs/{name}.py is not the command that starts it")
    return command


def outputs() -> dict[str, str]:
    """The output of each program; runs all of them if one has changed, or a package that they import."""
    digest = hashlib.sha256(f"{sys.version} {importlib.metadata.version('torch')}".encode())
    packages = [path for name in ("gpt2_chinese", "pstar", "durable") for path in sorted((REPO / name).glob("**/*.py"))]
    for path in [Path(__file__), *sorted(PROGRAMS.glob("*.py")), *packages]:
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    key = digest.hexdigest()
    stored = json.loads(STORE.read_text(encoding="utf-8")) if STORE.exists() else {}
    if stored.get("key") != key:
        print("docs: running the programs of the basics", file=sys.stderr, flush=True)
        stored = {"key": key, "said": run_all()}
        write_whole(STORE, json.dumps(stored, ensure_ascii=False, indent=1))
    return stored["said"]


def run_all() -> dict[str, str]:
    """Runs every program: all torchrun programs in one start of torchrun, most others in one process."""
    together: dict[str, list[str]] = {}
    said = {}
    for name in names():
        start, _, _ = command_of(name).partition(f" docs/programs/{name}.py")
        if name in OWN_PROCESS:
            said[name] = _in_order(_start(_without_set_up(command_of(name))))
        else:
            together.setdefault(start, []).append(name)
    for start, group in together.items():
        with tempfile.TemporaryDirectory() as folder:
            _start([*_without_set_up(start), str(Path(__file__)), folder, *group])
            for name in group:
                said[name] = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(folder).glob(f"{name}.*")))
    return said


def _without_set_up(command: str) -> list[str]:
    """The words of a reader's command, run by this Python: the environment is known here. torchrun.sh uses $PYTHON."""
    script, *rest = shlex.split(command)[1:]
    return ["bash", script, *rest] if script == "scripts/torchrun.sh" else [sys.executable, *rest]


def _in_order(said: str) -> str:
    """Sorts the lines of several ranks by rank; they arrive in any order."""
    return "".join(sorted(said.splitlines(keepends=True))) if said.startswith("rank ") else said


def _start(command: list[str]) -> str:
    """Returns what a command prints; raises SystemExit with its output if it fails."""
    # unbuffered, Python writes a line and its newline separately, and another rank's output could come between them
    env = environment(PYTHONUNBUFFERED="", OMP_NUM_THREADS="1", PYTHON=sys.executable)
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, encoding="utf-8", timeout=600)
    if done.returncode:
        raise SystemExit(f"error: {shlex.join(command)} ended with status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main(folder: str, *group: str) -> None:
    """Runs programs in this process. Each program has its own file as rendezvous: torchrun's store serves only one."""
    import torch.distributed as dist

    join, rank = dist.init_process_group, int(os.environ.get("RANK", 0))
    os.chdir(folder)  # what a program writes goes when the folder goes
    for name in group:
        place = {"init_method": f"file://{folder}/meet.{name}", "rank": rank, "timeout": timedelta(seconds=300)}
        dist.init_process_group = partial(join, world_size=int(os.environ.get("WORLD_SIZE", 1)), **place)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            runpy.run_path(str(PROGRAMS / f"{name}.py"), run_name="__main__")
        Path(folder, f"{name}.{rank}").write_text(said.getvalue(), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
