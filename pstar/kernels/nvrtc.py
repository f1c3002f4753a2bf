"""NVRTC, the CUDA compiler that comes with torch's CUDA build: finds one that works, and compiles cuda_adam.cu with it.

No toolkit is needed. Only NVRTC's public C interface is used. Machine code is kept in the user's cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from durable.files import replacing
from pstar.kernels.build import HERE, BuildError, cache_folder

SOURCES = ("cuda_adam.cu", "adam_formula.h")
OPTIONS = ("--std=c++17", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")
TRIAL = b'extern "C" __global__ void pstar_trial(float *x) { x[threadIdx.x] = sqrtf(x[threadIdx.x]); }'


class _Location(ctypes.Structure):
    """Dl_info of <dlfcn.h>."""

    _fields_ = [("path", ctypes.c_char_p), ("base", ctypes.c_void_p), ("name", ctypes.c_char_p), ("at", ctypes.c_void_p)]


def library_name() -> str:
    """The file name of NVRTC of torch's CUDA version; of CUDA 13 if torch is built without CUDA."""
    return f"libnvrtc.so.{(torch.version.cuda or '13').split('.')[0]}"


def places() -> list[str]:
    """Where NVRTC may be: by name, if torch has loaded it or the system knows it, and in the packages that torch needs."""
    found, spec = [library_name()], importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        found += map(str, sorted(Path(folder).glob(f"*/lib/{library_name()}")))
    return found


def find_nvrtc(architectures: Iterable[str] = ()) -> tuple[ctypes.CDLL, dict[str, bytes]]:
    """The first NVRTC that compiles, now, a small kernel for each architecture ("sm_90"), and these kernels' machine code.

    Raises OSError if there is none. Raises BuildError with the first line of the first one's answer if none compiles.
    """
    first: BuildError | None = None
    for place in places():
        try:
            nvrtc = ctypes.CDLL(place)
        except OSError:
            continue
        builtins = preload_builtins(nvrtc)
        try:
            return nvrtc, {name: compile_source(nvrtc, TRIAL, (), (f"--gpu-architecture={name}",))[0]
                           for name in architectures}
        except BuildError as error:
            first = first or BuildError(f"{error}{'' if builtins else '; its folder has no libnvrtc-builtins.so'}")
    raise first or OSError(f"{library_name()} was not found")


def preload_builtins(nvrtc: ctypes.CDLL) -> list[ctypes.CDLL]:
    """Loads libnvrtc-builtins of NVRTC's own folder, which NVRTC else looks for by name: it may find none, or another's."""
    folder = folder_of(nvrtc)
    found: list[ctypes.CDLL] = []
    for path in sorted(folder.glob("libnvrtc-builtins.so*")) if folder else ():
        with contextlib.suppress(OSError):
            found.append(ctypes.CDLL(str(path)))
    return found


def folder_of(library: ctypes.CDLL) -> Path | None:
    """The folder from which a library was loaded; None where the system does not tell."""
    location, dladdr = _Location(), getattr(ctypes.CDLL(None), "dladdr", None)
    if dladdr is None or not dladdr(ctypes.cast(library.nvrtcVersion, ctypes.c_void_p), ctypes.byref(location)):
        return None
    return Path(location.path.decode()).parent if location.path else None


def version_of(nvrtc: ctypes.CDLL) -> tuple[int, int]:
    """(major, minor)."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def options_of(architecture: str, kinds: tuple[int, int, bool]) -> tuple[str, ...]:
    """NVRTC's options for cuda_adam.cu; kinds as of AdamUpdate.kinds."""
    numbers = zip(("PARAM", "GRAD", "QUANT"), kinds, strict=True)
    return *OPTIONS, f"--gpu-architecture={architecture}", *(f"-DPSTAR_{name}={int(kind)}" for name, kind in numbers)


def compile_cubin(nvrtc: ctypes.CDLL, architecture: str, kinds: tuple[int, int, bool]) -> bytes:
    """Machine code for one architecture and one combination of kinds, from the cache if it was compiled before.

    Raises BuildError with NVRTC's answer.
    """
    options, sources = options_of(architecture, kinds), tuple((HERE / name).read_bytes() for name in SOURCES)
    recipe = hashlib.sha256(repr((list(options), list(sources), list(version_of(nvrtc)))).encode()).hexdigest()[:20]
    cached = None
    with contextlib.suppress(BuildError):    # nowhere to write: compile in every process
        cached = cache_folder() / f"adam-{architecture}-{recipe}.cubin"
    if cached and cached.exists():
        return cached.read_bytes()
    code, _ = compile_source(nvrtc, sources[0], ((SOURCES[1], sources[1]),), options)
    if cached:
        with contextlib.suppress(OSError), replacing(cached, per_process=True) as staging:    # a full disk costs time only
            staging.write_bytes(code)
    return code


def compile_source(nvrtc: ctypes.CDLL, source: bytes, headers: tuple[tuple[str, bytes], ...],
                   options: tuple[str, ...]) -> tuple[bytes, str]:
    """(machine code, NVRTC's log). Raises BuildError with the first line of the log."""
    texts = (ctypes.c_char_p * len(headers))(*(text for _, text in headers))
    names = (ctypes.c_char_p * len(headers))(*(name.encode() for name, _ in headers))
    flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    with _program(nvrtc, source, len(headers), texts, names) as program:
        status = nvrtc.nvrtcCompileProgram(program, len(options), flags)
        log = _read(nvrtc, program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace")
        if status:
            lines = [line.strip() for line in log.splitlines() if line.strip()] or [f"error {status}"]
            line = next((line for line in lines if "error" in line), lines[0])
            version = ".".join(map(str, version_of(nvrtc)))
            target = next((option.partition("=")[2] for option in options if "architecture" in option), "its default")
            raise BuildError(f"NVRTC {version} failed for {target}: {line}")
        return _read(nvrtc, program, "nvrtcGetCUBIN"), log


@contextlib.contextmanager
def _program(nvrtc: ctypes.CDLL, source: bytes, *headers: object) -> Iterator[ctypes.c_void_p]:
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, SOURCES[0].encode(), *headers))
    try:
        yield program
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(nvrtc, f"{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, what)(program, buffer))
    return buffer.raw


def _check(status: int) -> None:
    if status:
        raise BuildError(f"NVRTC answers with error {status}")
