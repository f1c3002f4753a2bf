"""Compiles cpu_adam.cpp with the C++ compiler that is there, once, into the user's cache.

    python -m pstar.kernels.build        # at installation; prints one line, also where there is no compiler

Without a compiler pstar.kernels runs on torch operations, with the same bits and more passes over memory. Needs nothing
but Python, so that the set-up can run this file before torch is there.
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
SOURCES = ("cpu_adam.cpp", "adam_formula.h")
# Nothing that changes a rounding: no -ffast-math, and no fused multiply-add but where the formula says fmaf.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
THREADS = (("-fopenmp",), ("-fopenmp-simd",))    # the second: one thread, for compilers without an OpenMP library
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 300


class BuildError(Exception):
    """One line: why there is no compiled kernel."""


def build() -> Path:
    """Returns the compiled library's path; compiles if this source, compiler and flags were not compiled before.

    Raises BuildError where there is no compiler, it fails, or nothing can be written. Safe in several processes at once:
    one compiles to a name of its own and renames, the others wait.
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
    """$CXX, or the first of COMPILERS that is there."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    return next((path for path in map(shutil.which, names) if path), None)


def cache_folder() -> Path:
    """$PSTAR_CACHE, or pstar in the user's cache, or, where that cannot be written, a private temporary folder."""
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
        # A library is code: take none from a folder that somebody else may write.
        status = place.stat()
        if os.access(place, os.W_OK) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            return place
    named = " and ".join(map(str, places))
    raise BuildError(f"{named} cannot be written, or not by you alone; name another folder: PSTAR_CACHE=...")


def recipe(compiler: str) -> str:
    """What the library is made from, as a hash."""
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
    """Holds a lock that the kernel releases however its holder ends. Where there are no locks, several compile: no harm."""
    with open(path, "w") as lock:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_to(target: Path, compiler: str) -> None:
    """Compiles beside the target and renames. Raises BuildError with the compiler's first error."""
    errors = ""
    for threads in THREADS:
        handle, beside = tempfile.mkstemp(prefix=target.stem, suffix=".tmp", dir=target.parent)
        os.close(handle)
        command = [compiler, *FLAGS, *threads, "-o", beside, str(HERE / SOURCES[0])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S)
            if done.returncode == 0:
                os.replace(beside, target)
                return
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            errors = errors or (lines or [f"status {done.returncode}"])[0]
        except subprocess.TimeoutExpired:
            errors = f"not done after {TIMEOUT_S} s"
        finally:
            Path(beside).unlink(missing_ok=True)
    raise BuildError(f"{compiler} failed: {errors.strip()}")


def main() -> None:
    """Prints one line and never fails: the torch implementation is there."""
    begin = time.monotonic()
    try:
        path = build()
    except BuildError as error:
        print(f"pstar: no compiled CPU kernels ({error}); torch operations take over", file=sys.stderr)
    else:
        print(f"pstar: CPU kernels are ready ({time.monotonic() - begin:.0f} s, {path})", file=sys.stderr)


if __name__ == "__main__":
    main()
