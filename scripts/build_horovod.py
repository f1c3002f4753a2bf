"""Builds Horovod 0.28.1 from its source distribution against the torch of the running interpreter, and installs it.

There are no published binaries of Horovod: each machine compiles it, against one torch and one Python. Its last release, of
2023, sets C++14, but torch's headers need C++17 since 2.1 and C++20 since 2.14: this script changes that in the unpacked
source. The wheel is kept in the user's cache folder, so it is compiled once. Errors end with one line and status 2.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import tomllib
from pathlib import Path

from locked import locked
from moving_line import run_with_progress, say

from durable.cores import num_cores

REPO = Path(__file__).resolve().parents[1]
VERSION = "0.28.1"
SDIST = f"horovod-{VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
# (file of the unpacked source, text, its replacement)
PATCHES = (
    ("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD $ENV{HOROVOD_CXX_STANDARD})"),
    ("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD $ENV{HOROVOD_CXX_STANDARD})"),
    # otherwise a torch for CUDA makes it look for CUDA's compiler, although the build is for CPUs
    ("cmake/Modules/FindPytorch.cmake", "(torch.version.cuda is not None)", "('$ENV{HOROVOD_GPU_OPERATIONS}' == 'NCCL')"),
    # Python 3.12 has no distutils
    ("horovod/torch/CMakeLists.txt", "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
     "import sysconfig; print(sysconfig.get_paths()['include'])"),
    # It builds the global process set's device without the interface that the launcher chose. Gloo then takes the address of
    # the host name: another network on some clusters, and SIGSEGV where the name has no address.
    ("horovod/common/gloo/gloo_context.cc", "assert(global_context.IsEnabled());",
     "assert(global_context.IsEnabled());\n  gloo_iface_ = global_context.gloo_iface_;"),
    # no debug information: a third of the time, and a wheel of 1 MB instead of 18
    ("setup.py", "'RelWithDebInfo'", "'Release'"),
)  # fmt: skip
# part of a wheel's version, so that no wheel with other patches is taken for this one
PATCHED = "p" + hashlib.sha256(repr(PATCHES).encode()).hexdigest()[:6]
# bytes of memory that one compiler takes with torch's headers
BYTES_PER_COMPILER = 2 * 2**30


class BuildError(Exception):
    """An error whose message is one line: what is wrong and what to do."""


def main() -> None:
    """Installs Horovod in the environment of the running interpreter, or exits with status 2."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that the compilers are ended too
    try:
        local = local_version()
        found = installed_version("horovod")
        if found and not requirements(missing=True) and ("+torch" not in found or found.endswith(f"+{local}")):
            say(f"horovod: {found} is installed")
            return
        begin = time.monotonic()
        with only_one_at_a_time():
            install_requirements()
            wheel = find_wheel(local)
            if wheel is None:
                check_tools()
                wheel = build(local)
        run_pip("install", "--no-deps", "--force-reinstall", str(wheel))
        say(f"horovod: {VERSION}+{local} installed in {time.monotonic() - begin:.0f} s (wheel kept in {wheel.parent})")
    except BuildError as error:
        say(f"error: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        say("error: the build of Horovod was interrupted; the next start begins it anew")
        sys.exit(130)


# -- versions and tools -------------------------------------------------------------------------------------------------


def torch_folder() -> Path:
    """The folder of the installed torch. Its files are read, because importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError(f"{sys.executable} has no torch: start a chapter's train.sh, which sets the environment up")
    return Path(spec.origin).parent


def torch_version() -> tuple[str, bool]:
    """(version, has CUDA) of the installed torch."""
    text = (torch_folder() / "version.py").read_text()
    version = re.search(r"^__version__ = ['\"](.+?)['\"]", text, re.MULTILINE).group(1)
    return version, bool(re.search(r"^cuda\b.*= ['\"]\d", text, re.MULTILINE))


def cxx_standard() -> str:
    """The C++ standard that torch's own build of extensions chooses, "17" or "20": its headers may need it."""
    text = (torch_folder() / "utils" / "cpp_extension.py").read_text()
    return max(re.findall(r"-std=c\+\+(\d\d)\b", text), default="17")


def local_version() -> str:
    """The local part of the wheel's version: torch, the operations, the patches. Such as torch2.13.0.cpu.gloo.p3fa2c1."""
    version, cuda = torch_version()
    operations = ["gloo"]
    if shutil.which("mpicxx"):
        operations.append("mpi")
    if cuda and cuda_home() is not None and nccl_home() is not None:
        operations.append("nccl")
    return re.sub(r"[^A-Za-z0-9.]+", ".", ".".join([f"torch{version}", *operations, PATCHED]))


def cuda_home() -> Path | None:
    """The folder of CUDA's compiler and headers: CUDA_HOME, CUDA_PATH, the one above nvcc, or /usr/local/cuda.

    An nvcc on the PATH may be a script that calls another one, so the folder above it need not be CUDA's.
    """
    given = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    above_nvcc = [Path(nvcc).resolve().parents[1]] if nvcc else []
    header = "include/cuda_runtime.h"  # conda has it below targets/
    for home in [Path(given)] if given else [*above_nvcc, Path("/usr/local/cuda")]:
        if (home / "bin" / "nvcc").exists() and ((home / header).exists() or any(home.glob(f"targets/*/{header}"))):
            return home
    return None


def nccl_home() -> Path | None:
    """The folder with NCCL's include/ and lib/: HOROVOD_NCCL_HOME, the package that torch depends on, or the system's."""
    given = os.environ.get("HOROVOD_NCCL_HOME")
    packaged = [Path(place, "nvidia", "nccl") for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}]
    for home in [*([Path(given)] if given else []), *packaged, Path("/usr"), Path("/usr/local")]:
        if (home / "include" / "nccl.h").exists():
            return home
    return None


def installed_version(name: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements(missing: bool = False) -> list[str]:
    """The extra `horovod` of pyproject.toml, which building and running need. missing: only those not installed."""
    extra = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]["horovod"]
    return [r for r in extra if not missing or installed_version(re.match(r"[\w.-]+", r).group()) is None]


def cache_folder() -> Path:
    """The folder of the wheels and the source distribution."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpt2_chinese" / "horovod"


def find_wheel(local: str) -> Path | None:
    """The wheel built earlier for this torch, Python and platform."""
    folder = wheel_folder(local)
    return next(iter(sorted(folder.glob(f"horovod-{VERSION}+*.whl"))), None) if folder.is_dir() else None


def wheel_folder(local: str) -> Path:
    """A folder of the cache for one torch, Python and platform."""
    platform = re.sub(r"\W", "_", sysconfig.get_platform())
    return cache_folder() / f"{local}-{sys.implementation.cache_tag}-{platform}"


def check_tools() -> None:
    """Raises BuildError if a tool is missing that pip cannot install."""
    compiler = os.environ.get("CXX") or next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), None)
    lacks = []
    if not compiler or not shutil.which(compiler.split()[0]):
        lacks.append("a C++ compiler (g++)")
    if not shutil.which("make"):
        lacks.append("make")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        lacks.append(f"Python's headers (python{sys.version_info.major}.{sys.version_info.minor}-dev)")
    if lacks:
        raise BuildError(
            f"Horovod must be compiled, and this machine lacks {', '.join(lacks)}: on Debian and Ubuntu apt install "
            "build-essential python3-dev, with conda conda install gxx make; chapter 02_ddp needs no compiler"
        )


# -- pip ----------------------------------------------------------------------------------------------------------------


def run_pip(*arguments: str, cwd: Path = REPO) -> str:
    """Runs pip of the running interpreter quietly; returns its output, raises BuildError when it fails."""
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input"]
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode != 0:
        raise BuildError(why_it_failed(f"pip {arguments[0]}", done.stdout))
    return done.stdout


def install_requirements() -> None:
    """Installs the missing packages of the extra `horovod`, in the pinned versions."""
    if lacking := requirements(missing=True):
        say(f"horovod: installing {', '.join(lacking)}")
        run_pip("install", "-c", "constraints.txt", *lacking)


def why_it_failed(what: str, output: str) -> str:
    """One line from the output of pip or of the compiler."""
    if re.search(r"NewConnectionError|NameResolution|Network is unreachable|ProxyError|ReadTimeout|timed out", output):
        return f"{what} cannot reach the package index: check the network, or put {SDIST} into {cache_folder()}"
    if re.search(r"No space left on device|Errno 28|Disk quota exceeded", output):
        return f"{what}: the disk is full, make room for about 200 MiB in {cache_folder()} and {tempfile.gettempdir()}"
    if re.search(r"Killed signal|cc1plus.*[Kk]illed", output):
        return f"{what}: the compiler was killed, most likely for memory; start again with MAKEFLAGS=-j1"
    wrong = [line.strip() for line in output.splitlines() if re.search(r"error[: ]|CMake Error", line, re.IGNORECASE)]
    return f"{what} failed: {' '.join((wrong or output.splitlines() or ['no output'])[0].split())[:300]}"


# -- building -----------------------------------------------------------------------------------------------------------


def only_one_at_a_time() -> contextlib.AbstractContextManager[None]:
    """A lock: the second of two starts waits, and then finds the wheel."""
    return locked(
        cache_folder() / "lock",
        "horovod: another start is building it; waiting",
        lambda error: BuildError(f"cannot write in {cache_folder()} ({error.strerror}): set XDG_CACHE_HOME"),
    )


def build(local: str) -> Path:
    """Compiles the wheel and puts it into the cache; returns its path there."""
    target = wheel_folder(local)
    with tempfile.TemporaryDirectory(prefix="horovod_") as scratch:
        source = unpack(fetch(), Path(scratch))
        patch(source)
        log = cache_folder() / "build.log"
        made = Path(scratch, "wheel")
        jobs = os.environ.get("MAKEFLAGS") or f"-j{num_compilers()}"
        say(f"horovod: compiling {VERSION} against {local} with make {jobs}: three to ten minutes, once (log: {log})")
        command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-build-isolation", "--no-deps", "-w", str(made), "."]
        status = run_with_progress(
            command, log, "horovod", doing_now, cwd=source, env=build_environment(local, jobs, Path(scratch))
        )
        if status != 0:
            text = log.read_text(errors="replace")
            raise BuildError(f"{why_it_failed('the build of Horovod', text)} (log: {log})")
        wheel = next(made.glob("*.whl"))
        target.mkdir(parents=True, exist_ok=True)
        temporary = target / f"{wheel.name}.tmp{os.getpid()}"  # no incomplete wheel gets the final name
        shutil.copyfile(wheel, temporary)
        os.replace(temporary, target / wheel.name)
    return target / wheel.name


def fetch() -> Path:
    """The source distribution, from the cache or from the package index; checks its checksum."""
    kept = cache_folder() / SDIST
    if not kept.exists():
        say(f"horovod: fetching {SDIST} from the package index")
        with tempfile.TemporaryDirectory(dir=cache_folder()) as temporary:
            run_pip("download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod", "-d", temporary,
                    f"horovod=={VERSION}")  # fmt: skip
            os.replace(Path(temporary, SDIST), kept)
    if hashlib.sha256(kept.read_bytes()).hexdigest() != SDIST_SHA256:
        kept.unlink()
        raise BuildError(f"{SDIST} is not the file that was released (its checksum differs): removed, start again")
    return kept


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpacks the source distribution below `folder` and returns its top folder."""
    # Python 3.11.2 (Debian) has no filters; the checksum has shown that this is the released archive
    safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **safe)
    return folder / f"horovod-{VERSION}"


def patch(source: Path) -> None:
    """Makes the changes of PATCHES. Raises BuildError if a text is not found: else the error would come much later."""
    for name, old, new in PATCHES:
        text = (source / name).read_text()
        if old not in text:
            raise BuildError(f"{name} of {SDIST} does not hold {old!r}: this script fits {VERSION} only")
        (source / name).write_text(text.replace(old, new))


def num_compilers() -> int:
    """The number of parallel compilers that cores and memory allow."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(num_cores(), memory // BYTES_PER_COMPILER))


def build_environment(local: str, jobs: str, scratch: Path) -> dict[str, str]:
    """The environment variables that Horovod's setup.py reads."""
    operations = local.split(".")
    chosen = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if "mpi" in operations else "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_LOCAL_VERSION": local,
        "HOROVOD_CXX_STANDARD": cxx_standard(),
        "HOROVOD_CMAKE": str(Path(sys.executable).with_name("cmake")),
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses the old projects that Horovod contains
        "MAKEFLAGS": jobs,
    }
    if "nccl" in operations:
        chosen |= {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_HOME": str(linkable_nccl(scratch))}
        # torch, an old CMake module of Horovod and CMake itself each look for CUDA by a variable of their own
        cuda = cuda_home()
        chosen |= {"CUDA_HOME": str(cuda), "CUDAToolkit_ROOT": str(cuda), "CUDACXX": str(cuda / "bin" / "nvcc")}
    else:
        chosen["HOROVOD_GPU_OPERATIONS"] = ""
    return {**os.environ, **chosen}


def linkable_nccl(scratch: Path) -> Path:
    """NCCL's folder with libnccl.so, the name that linkers need: the package that torch depends on has libnccl.so.2."""
    home = nccl_home()
    if not (home / "lib" / "libnccl.so.2").exists() or (home / "lib" / "libnccl.so").exists():
        return home
    linked = scratch / "nccl"
    (linked / "lib").mkdir(parents=True)
    (linked / "include").symlink_to(home / "include")
    (linked / "lib" / "libnccl.so").symlink_to(home / "lib" / "libnccl.so.2")
    return linked


def doing_now(text: str) -> str:
    """The build's progress from its log: cmake's percents."""
    percents = re.findall(r"\[ *(\d+)%\] *(\w+.*)", text)
    percent, doing = percents[-1] if percents else ("0", "configuring")
    return f"{percent:>3} %  {doing}"


if __name__ == "__main__":
    main()
