"""Prints the path of a Python that has torch, this checkout and the requested extras; makes `.venv` if there is none.

`scripts/setup.sh` runs it with the Python that the user's shell finds. The path is printed to stdout, all else to stderr.
Errors end with one line and status 2. It needs only Python: it runs before any package is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from locked import locked
from moving_line import run_with_progress, say

REPO = Path(__file__).resolve().parents[1]
PROJECT = "gpt2-chinese-patrickstar"
PACKAGES = ("gpt2_chinese", "pstar", "durable")
VENV = REPO / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
# Written first: this script removes only a folder with this file.
MINE = VENV / "made-by-setup.txt"
# Written last, and removed before any change: an environment without it is incomplete.
STAMP = VENV / "complete.txt"
LOG = VENV / "setup.log"
FREE_BYTES_NEEDED = 3 * 2**30  # a CPU environment takes 1.5 GB, and pip keeps as much again in its cache
FREE_GIB_WITH_CUDA = 8  # PyPI's torch for Linux brings CUDA: 5 GB, and pip's downloads; not known before pip chooses
MINUTES = "about two minutes, longer on a slow connection"


def main() -> None:
    """Reads the command line, prints the interpreter's path."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])  # None under -OO
    parser.add_argument("--extras", default="", help="extras of pyproject.toml, separated by commas")
    extras = {extra for extra in parser.parse_args().extras.split(",") if extra}
    try:
        print(choose_python(extras))
    except SetupError as error:
        say(f"error: {error}")
        sys.exit(2)
    except PermissionError as error:
        refused = os.path.realpath(error.filename or VENV)
        say(
            f"error: no permission for {refused}, which .venv needs: for several users make .venv with a Python that "
            "all may run, or activate an environment of your own"
        )
        sys.exit(2)
    except KeyboardInterrupt:
        say("error: set-up was interrupted; the next start begins it anew")
        sys.exit(2)


class SetupError(Exception):
    """An error whose message is one line: what is wrong and what to do."""


def choose_python(extras: set[str]) -> str:
    """Returns the interpreter to use: the running one if its environment is complete, else that of `.venv`."""
    in_venv = Path(sys.prefix).resolve() == VENV.resolve() and MINE.exists()
    note = ""
    if not in_venv:
        lacks = what_is_missing(extras)
        if not lacks:
            say(f"setup: using the active environment, {sys.executable}")
            return sys.executable
        if importlib.util.find_spec("torch"):
            wish = f".[{','.join(sorted(extras))}]" if extras else "."
            note = (
                f"setup: the active environment ({sys.prefix}) has torch but lacks {lacks[0]}; "
                f'to use it: cd "{REPO}" && "{sys.executable}" -m pip install -e "{wish}"'
            )
    if not is_complete(extras):
        if note and not STAMP.exists():
            say(note)
        with only_one_at_a_time(extras):
            if not is_complete(extras):  # another start may have made it while this one waited
                make_venv(extras)
    say(f"setup: using {VENV}")
    return str(VENV_PYTHON)


def what_is_missing(extras: set[str]) -> list[str]:
    """The packages that the running interpreter's environment lacks, without importing any (importing torch is slow)."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            return [f"the package {package}"]
        if REPO not in Path(spec.origin).resolve().parents:
            return [f"this checkout ({package} there is {Path(spec.origin).parent})"]
    try:
        requirements = importlib.metadata.requires(PROJECT) or []
    except importlib.metadata.PackageNotFoundError:
        return [f"the project {PROJECT}"]
    missing = []
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement).group()
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)", requirement)
        if extra is None or extra.group(1) in extras:
            try:
                importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                missing.append(name)
    return missing


def is_complete(extras: set[str]) -> bool:
    """True if `.venv` was made from the current constraints, in the current folder, with at least these extras."""
    recipe, done = made_with()
    return VENV_PYTHON.exists() and recipe == recipe_now() and extras <= done


def made_with() -> tuple[str, set[str]]:
    """The recipe and the extras that `.venv` was made with; an incomplete one has an empty recipe and no extras."""
    recipe, _, extras = STAMP.read_text().partition("\n") if STAMP.exists() else ("", "", "")
    return recipe, set(extras.split())


def recipe_now() -> str:
    """A hash of an environment's inputs. It includes the folder: scripts and the editable install contain its path."""
    digest = hashlib.sha256(str(REPO).encode())
    for name in ("constraints.txt", "pyproject.toml"):
        digest.update((REPO / name).read_bytes())
    return digest.hexdigest()


def only_one_at_a_time(extras: set[str]) -> contextlib.AbstractContextManager[None]:
    """A lock: one start makes `.venv`. Its pip holds the lock too, in case the start is killed before pip ends."""
    recipe, done = made_with()
    lacks = sorted(extras - done)
    work = f"add {', '.join(lacks)} to" if recipe and lacks else "make"
    return locked(
        REPO / ".venv.lock",
        "setup: another start is making .venv; waiting for it",
        lambda error: SetupError(f"cannot {work} .venv in {REPO} ({error.strerror}); clone it where you may write"),
        inheritable=True,
    )


def make_venv(extras: set[str]) -> None:
    """Makes `.venv`, updates it, or makes an incomplete one again."""
    before = STAMP.read_text() if STAMP.exists() else None
    if before is None or not VENV_PYTHON.exists():
        before = None
        start_empty_venv()
    else:
        extras = extras | made_with()[1]
    STAMP.unlink(missing_ok=True)
    wish = f".[{','.join(sorted(extras))}]" if extras else "."
    verb = "making" if before is None else "updating"
    say(f"setup: {verb} {VENV} with torch and what constraints.txt names: {MINUTES} (log: {LOG})")
    begin = time.monotonic()
    pip = [VENV_PYTHON, "-m", "pip", "install", "--progress-bar", "off", "-c", "constraints.txt", "-e", wish]
    status = install(pip)
    if status != 0:
        text = LOG.read_text(errors="replace")
        if before is not None and status > 0 and not is_disk_full(text):
            STAMP.write_text(before)  # pip installs only after it has all packages, so the old environment is unchanged
        raise SetupError(why_pip_failed(status, text))
    build_kernels()
    STAMP.write_text("\n".join([recipe_now(), *sorted(extras)]) + "\n")
    say(f"setup: done in {time.monotonic() - begin:.0f} s")


def build_kernels() -> None:
    """Compiles pstar's CPU kernels if there is a compiler; prints the outcome in one line, and never fails."""
    script = REPO / "pstar" / "kernels" / "build.py"  # by path: python -m would import torch first
    if script.exists():
        subprocess.run([VENV_PYTHON, script], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def start_empty_venv() -> None:
    """Makes a new `.venv` with pip only. Raises SetupError for a folder that this script did not make."""
    if VENV.exists() or VENV.is_symlink():
        if not MINE.exists():
            raise SetupError(
                f"{VENV} was not made by this script: activate it and run "
                "pip install -e '.[dev,docs,horovod,parquet,peft]', or remove it"
            )
        say(f"setup: {VENV} is half-made or broken; starting anew")
        shutil.rmtree(VENV)
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SetupError(
            f"{sys.executable} cannot make virtual environments; on Debian and Ubuntu: apt install python{version}-venv"
        )
    if any("\udc80" <= character <= "\udcff" for character in str(REPO)):
        encoding = sys.getfilesystemencoding()
        raise SetupError(f"the name of {REPO} is not {encoding}, and Python makes no environment there: rename the folder")
    free = shutil.disk_usage(REPO).free
    if free < FREE_BYTES_NEEDED:
        raise SetupError(
            f"not enough disk space in {REPO}: {free / 2**30:.1f} GiB free, {FREE_BYTES_NEEDED / 2**30:.0f} needed"
        )
    VENV.mkdir()
    MINE.write_text(f"made by {Path(__file__).relative_to(REPO)}; it may remove this folder and make it anew\n")
    # If this runs inside the .venv that was just removed, its base interpreter makes the new one.
    base = getattr(sys, "_base_executable", None) or sys.executable
    for command in ([base, "-m", "venv", "--without-pip", VENV], [VENV_PYTHON, "-m", "ensurepip", "--default-pip"]):
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode != 0:
            raise SetupError(f"{command[0]} -m {command[2]} failed: {last_line(made.stdout + made.stderr)}")


def install(command: list) -> int:
    """Runs pip with its output in the log, without variables that change where it installs; returns its exit status."""
    unwanted = {"PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV", "PYTHONHOME"}
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    return run_with_progress(command, LOG, "setup", lambda text: last_line(text).strip(), cwd=REPO, env=environment)


def is_disk_full(text: str) -> bool:
    """True if pip's output says that the disk, or the user's share of it, is full."""
    return bool(re.search(r"No space left on device|Errno 28|Disk quota exceeded", text))


def why_pip_failed(status: int, text: str) -> str:
    """One line for the user from pip's exit status and output."""
    where = f"(log: {LOG})"
    if status < 0:
        return f"pip was killed by signal {-status}; the next start begins anew {where}"
    if is_disk_full(text):
        return (
            f"the disk is full: make room for about {FREE_BYTES_NEEDED / 2**30:.0f} GiB, "
            f"or {FREE_GIB_WITH_CUDA} GiB for a torch with CUDA, and start again {where}"
        )
    if re.search(r"NewConnectionError|NameResolution|Network is unreachable|ProxyError|ReadTimeout|timed out", text):
        return f"pip cannot reach the package index: check the network or the proxy, then start again {where}"
    errors = [line for line in text.splitlines() if line.startswith("ERROR:")]
    advice = ""
    if "No matching distribution" in text:
        advice = f"; there may be none for Python {platform.python_version()}: choose another with PYTHON=python3.12"
    return f"pip failed: {(errors or [last_line(text)])[-1].removeprefix('ERROR: ').rstrip('.')}{advice} {where}"


def last_line(text: str) -> str:
    """Returns the last line that is not blank."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")



if __name__ == "__main__":
    main()
