"""Compiles cpu_adam.cpp with the installed C++ compiler, once, into the user's cache.

    python -m pstar.kernels.build        # at installation; prints one line, also if there is no compiler

Without a compiler pstar.kernels uses torch operations, with the same bits and more passes over memory. This file needs only
Python, so that the set-up can run it before torch is installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("cpu_adam.cpp", "cpu_codes.h", "adam_formula.h")
# No flag may change a rounding: no -ffast-math, and fused multiply-add only where the formula says fmaf.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
THREADS = (("-fopenmp",), ("-fopenmp-simd",))    # the second: one thread, for compilers without an OpenMP library
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 300


class BuildError(Exception):
    """There is no compiled kernel; the message says why, in one line."""


def build() -> Path:
    """Returns the compiled library's path; compiles if this source, compiler and flags were not compiled before.

    Raises BuildError if there is no compiler, it fails, or the cache cannot be written. Safe in several processes at once:
    one compiles to a temporary name and renames, the others wait.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler found")
    target = cache_folder() / f"adam-{recipe(compiler)}.so"
    if not target.exists():
        try:
            with only_one_at_a_time(target.with_suffix(".lock")):
                if not target.exists():    # another process may have made it while this one waited
                    compile_to(target, compiler)
        except OSError as error:
            raise BuildError(f"cannot write {target}: {error.strerror}") from error
    return target


def find_compiler() -> str | None:
    """$CXX, or the first of COMPILERS that is installed."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    return next((path for path in map(shutil.which, names) if path), None)


def cache_folder() -> Path:
    """$PSTAR_CACHE, or pstar in the user's cache, or, if that cannot be written, a private temporary folder."""
    if os.environ.get("PSTAR_CACHE"):
        places = [Path(os.environ["PSTAR_CACHE"])]
    else:
        home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
        places = [home / "pstar", Path(tempfile.gettempdir()) / f"pstar-{os.getuid()}"]
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        # A library is code: use no folder that another user may write to.
        status = place.stat()
        if os.access(place, os.W_OK) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            return place
    named = " and ".join(map(str, places))
    raise BuildError(f"{named} cannot be written, or not by you alone; name another folder: PSTAR_CACHE=...")


def recipe(compiler: str) -> str:
    """A hash of the library's sources, compiler and flags."""
    try:
        run = subprocess.run([compiler, "--version"], capture_output=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} does not run: {error}") from error
    digest = hashlib.sha256()
    for part in (compiler.encode(), run.stdout, " ".join(FLAGS).encode(), platform.machine().encode()):
        digest.update(part + b"\0")
    for name in SOURCES:
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:20]


@contextlib.contextmanager
def only_one_at_a_time(path: Path) -> Iterator[None]:
    """Holds a lock that the kernel releases even if its holder is killed. Without locks several processes may compile."""
    with open(path, "w") as lock:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_to(target: Path, compiler: str) -> None:
    """Compiles to a temporary file in the target's folder and renames it. Raises BuildError with the first error."""
    errors = ""
    for threads in THREADS:
        handle, temporary = tempfile.mkstemp(prefix=target.stem, suffix=".tmp", dir=target.parent)
        os.close(handle)
        command = [compiler, *FLAGS, *threads, "-o", temporary, str(HERE / SOURCES[0])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S)
            if done.returncode == 0:
                os.replace(temporary, target)
                return
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            errors = errors or (lines or [f"status {done.returncode}"])[0]
        except subprocess.TimeoutExpired:
            errors = f"not done after {TIMEOUT_S} s"
        finally:
            Path(temporary).unlink(missing_ok=True)
    raise BuildError(f"{compiler} failed: {errors.strip()}")


def main() -> None:
    """Prints one line and never fails: without a compiler the torch implementation is used."""
    begin = time.monotonic()
    try:
        path = build()
    except BuildError as error:
        print(f"pstar: no compiled CPU kernels ({error}); torch operations take over", file=sys.stderr)
    else:
        print(f"pstar: CPU kernels are ready ({time.monotonic() - begin:.0f} s, {path})", file=sys.stderr)


if __name__ == "__main__":
    main()
