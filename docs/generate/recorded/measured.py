"""The programs that a build runs: --help of the chapters, and chapter 07 with a profile if its sources have changed.

    profile()            the path of a profile of chapter 07
    help_of(chapter)     the output of --help
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[3]
# Folders that the pages' commands name or import.
SHARED = ("cache", "chapters", "data", "gpt2_chinese", "pstar", "durable", "scripts", "benchmarks")
GENERATED = REPO / "docs" / "_generated"

PROFILED = "07_patrickstar"
# The activations are half as large as the chunks, and the memory is too small for both together.
PROFILE_FLAGS = ("--nproc 1 --max-steps 4 --warmup-steps 2 --batch-size 4 --seq-len 64 --chunk-size 100000 "
                 "--near-budget 100% --near-memory 24MiB --device cpu")  # fmt: skip
PROFILE_STEPS = "1-2"
PROFILE = GENERATED / "profile.json"
SOURCES = ("gpt2_chinese/**/*.py", "pstar/**/*.py", "durable/**/*.py", "data/**/*.json", "cache/vocab.txt",
           "docs/generate/recorded/measured.py", f"chapters/{PROFILED}/*.py")  # fmt: skip


def circumstances() -> dict[str, Any]:
    """The facts that a reader needs to judge a number from a run: date, cores, versions."""
    return {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "python": platform.python_version(),
            "torch": importlib.metadata.version("torch").partition("+")[0]}  # fmt: skip


def reader_in(folder: Path) -> dict[str, str]:
    """Makes a folder look like the repository, and returns the environment for it.

    Links lead to the repository's sources. runs/ and everything else that a command writes is the folder's own.
    """
    for entry in SHARED:
        (folder / entry).symlink_to(REPO / entry)
    return environment(PYTHON=sys.executable, OMP_NUM_THREADS="1", GPT2_CHINESE_CACHE=str(folder / "tokens"), COLUMNS="100")


def environment(**variables: str) -> dict[str, str]:
    """An environment in which a command finds this Python, its programs and this repository, and prints UTF-8."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    path = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PATH": programs, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", **variables}


def _hash_of_sources() -> str:
    digest = hashlib.sha256("\0".join([sys.version, importlib.metadata.version("torch")]).encode())
    for path in sorted(path for pattern in SOURCES for path in REPO.glob(pattern)):
        digest.update(f"\0{path.relative_to(REPO)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def profile_commands() -> list[str]:
    """The commands of a run with a profile and of its drawing, as a reader would type them."""
    run = f"bash chapters/{PROFILED}/train.sh {PROFILE_FLAGS}"
    return ["mkdir -p runs", f"{run} --profile runs/profile.json --output-dir runs/profiled",
            f"bash scripts/pstar.sh trace runs/profile.json --steps {PROFILE_STEPS} --out runs/trace"]  # fmt: skip


def profile() -> Path:
    """The path of the profile that profile_commands write; runs them again only if a source has changed."""
    key, key_file = _hash_of_sources(), GENERATED / "profile.key"
    if key_file.exists() and key_file.read_text() == key and PROFILE.exists():
        return PROFILE
    print(f"docs: running {PROFILED} with a profile", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        written = f"{folder}/profile.json"
        call([sys.executable, f"chapters/{PROFILED}/train.py", *PROFILE_FLAGS.split(), "--profile", written, "--output-dir",
               f"{folder}/run"], {"GPT2_CHINESE_CACHE": f"{folder}/tokens", "OMP_NUM_THREADS": "1"})  # fmt: skip
        call([sys.executable, "-m", "pstar.cli", "trace", written, "--steps", PROFILE_STEPS, "--out", folder], {})
        shutil.copyfile(written, PROFILE)
    write_whole(key_file, key)
    return PROFILE


def help_of(chapter: str) -> str:
    """The output of a chapter's --help, 100 columns wide."""
    return call([sys.executable, f"chapters/{chapter}/train.py", "--help"], {"COLUMNS": "100"})


def call(command: list[str], variables: dict[str, str]) -> str:
    """Runs a command in the repository; returns its stdout, or raises SystemExit with its output."""
    done = subprocess.run(command, cwd=REPO, env=environment(**variables), capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lets one build in a checkout write at a time; the next one finds the first one's files."""
    GENERATED.mkdir(parents=True, exist_ok=True)
    with (GENERATED / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_whole(path: Path, text: str) -> None:
    """Writes a file completely or not at all. Does not touch an equal file, because mkdocs serve watches times."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    staging.write_text(text, encoding="utf-8")
    os.replace(staging, path)
