"""NVRTC from its wheel: every kernel compiles for every GPU without spills, and what is missing is one line.

The tests need no GPU. Without the wheel (package nvidia-cuda-nvrtc) those that compile are skipped.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch

import pstar
from pstar.kernels import build, cuda, front, nvrtc
from pstar.kernels.build import BuildError
from tests import toy
from tests.harness.program import run_forked

REPO = Path(__file__).parents[3]
GPUS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
KERNELS = {"pstar_adam", "pstar_norm_blocks", "pstar_norm_sum"}


@pytest.fixture(scope="module")
def compiler():
    try:
        return nvrtc.find_nvrtc()[0]
    except OSError as error:
        pytest.skip(f"{error}; pip install nvidia-cuda-nvrtc")


@pytest.mark.skipif(Path(sys.prefix).resolve() != (REPO / ".venv").resolve() or sys.platform != "linux",
                    reason="an environment of the user's own")
def test_the_environment_of_the_tests_has_it():
    assert nvrtc.find_nvrtc(["sm_90"])[1]["sm_90"].startswith(b"\x7fELF")


@pytest.mark.each
@pytest.mark.parametrize("architecture", GPUS)
@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("grad", range(3))
@pytest.mark.parametrize("param", range(6))
def test_every_kernel_compiles_for_every_gpu_without_spills(param, grad, quantised, architecture, compiler):
    assert_without_spills(compiler, nvrtc.options_of(architecture, (param, grad, quantised)), architecture)


def assert_without_spills(compiler, options: tuple[str, ...], architecture: str, bounds: str = "THREADS") -> None:
    sources = [(build.HERE / name).read_bytes() for name in nvrtc.SOURCES]
    sources[0] = sources[0].replace(b"__launch_bounds__(THREADS)", f"__launch_bounds__({bounds})".encode())
    code, log = nvrtc.compile_source(compiler, sources[0], ((nvrtc.SOURCES[1], sources[1]),),
                                     (*options, "--ptxas-options=-v"))
    assert code.startswith(b"\x7fELF") and set(re.findall(rf"entry function '(\w+)' for '{architecture}'", log)) == KERNELS
    used = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert used == [("0", "0", "0")] * len(KERNELS), log


def test_spills_would_be_seen(compiler):
    """Eight thread blocks a multiprocessor leave 32 registers a thread."""
    with pytest.raises(AssertionError, match="bytes spill"):
        assert_without_spills(compiler, nvrtc.options_of("sm_90", (0, 0, False)), "sm_90", "THREADS, 8")


def test_compiled_once_then_read_from_the_cache(compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("PSTAR_CACHE", str(tmp_path))
    code = nvrtc.compile_cubin(compiler, "sm_90", (0, 0, False))
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(nvrtc, "compile_source", None)
    assert nvrtc.compile_cubin(compiler, "sm_90", (0, 0, False)) == code


def test_an_error_is_one_line(compiler):
    with pytest.raises(BuildError, match=r"^NVRTC \d+\.\d+ failed for sm_1: [^\n]*invalid value[^\n]*$"):
        nvrtc.compile_cubin(compiler, "sm_1", (0, 0, False))
    with pytest.raises(BuildError, match=r"^NVRTC \d+\.\d+ failed for sm_90: [^\n]*error[^\n]*$"):
        nvrtc.compile_source(compiler, b"int f() { return unknown; }\nint g() { return more; }", (),
                             ("--gpu-architecture=sm_90",))


# ---- builtins

PROGRAM = """
import sys
from pstar.kernels import nvrtc
nvrtc.places = lambda: [sys.argv[1]]
preload, nvrtc.preload_builtins = nvrtc.preload_builtins, lambda library: [library]
for finds in ("by luck", "preloaded"):
    try:
        print(finds, len(nvrtc.find_nvrtc(["sm_90"])[1]))
    except nvrtc.BuildError as error:
        print(finds, error)
    nvrtc.preload_builtins = preload
"""


def without_search_path(library: Path, target: Path) -> None:
    """Copies an ELF library; the copy does not tell the loader to look into its own folder."""
    runpaths = (15, 29)    # DT_RPATH and DT_RUNPATH; 21, DT_DEBUG, has no meaning in a library
    data = bytearray(library.read_bytes())
    start, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    headers = [struct.unpack_from("<IIQQQQQQ", data, start + number * size) for number in range(count)]
    offset, length = next((header[2], header[5]) for header in headers if header[0] == 2)
    places = [at for at in range(offset, offset + length, 16) if struct.unpack_from("<Q", data, at)[0] in runpaths]
    assert places, f"{library} has no search path"
    for at in places:
        struct.pack_into("<Q", data, at, 21)
    target.write_bytes(data)


@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch for GPUs has loaded the builtins of its own NVRTC")
def test_builtins_are_taken_from_its_own_folder(compiler, tmp_path):
    """A copy that does not search its own folder, as in some packages: only preloading finds the builtins beside it."""
    home, copy, program = nvrtc.folder_of(compiler), tmp_path / nvrtc.library_name(), tmp_path / "program.py"
    without_search_path(home / nvrtc.library_name(), copy)
    for builtins in home.glob("libnvrtc-builtins.so*"):
        shutil.copy(builtins, tmp_path)
    program.write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPO), *sys.path])}
    status, text = run_forked([sys.executable, str(program), str(copy)], environment)
    before, after = text.splitlines()
    assert status == 0 and after == "preloaded 1"
    assert before.startswith("by luck NVRTC ") and "failed to open libnvrtc-builtins.so" in before, "else it proves nothing"


def test_missing_builtins_are_named(compiler, monkeypatch):
    def cannot(*_):
        raise BuildError("NVRTC failed")

    monkeypatch.setattr(nvrtc, "preload_builtins", lambda library: [])
    monkeypatch.setattr(nvrtc, "compile_source", cannot)
    with pytest.raises(BuildError, match="^NVRTC failed; its folder has no libnvrtc-builtins.so$"):
        nvrtc.find_nvrtc(["sm_90"])


# ---- falling back


class Driver:
    """What library() uses of the driver; `refuses` is the answer to a module."""

    def __init__(self, refuses: int = 0):
        self.refuses, self.loaded = refuses, []

    def cuModuleLoadData(self, module, code):
        self.loaded.append(code)
        return self.refuses

    def cuGetErrorString(self, status, text):
        text._obj.value = b"no kernel image is available for execution on the device"

    def __getattr__(self, name):
        return lambda *arguments: 0


@pytest.fixture
def a_gpu(monkeypatch):
    """As if torch saw two GPUs of one kind and their driver."""
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    driver = Driver()
    load = cuda.ctypes.CDLL
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda name, *more: driver if name == "libcuda.so.1" else load(name, *more))
    cuda.library.cache_clear()
    yield driver
    cuda.library.cache_clear()


def prepared_lines(caplog) -> list[str]:
    """The log of two calls of prepare."""
    with caplog.at_level(logging.WARNING, logger="pstar"):
        front.prepare(torch.device("cuda"))
        front.prepare(torch.device("cuda"))
    return [record.getMessage() for record in caplog.records]


def test_one_small_kernel_is_compiled_and_loaded_when_the_library_is_looked_for(compiler, a_gpu, caplog):
    assert prepared_lines(caplog) == [] and cuda.library()[1] is a_gpu
    code, = a_gpu.loaded
    assert code.startswith(b"\x7fELF")


@pytest.mark.parametrize("case, why", [
    ("no NVRTC", "libnvrtc.so.13 was not found"), ("broken", "NVRTC 13.0 failed for sm_90: error: failed to open builtins"),
    ("old driver", "CUDA: no kernel image is available for execution on the device (209)")])
def test_what_does_not_work_is_one_line_at_the_start(case, why, a_gpu, caplog, monkeypatch):
    monkeypatch.setattr(nvrtc, "library_name", lambda: "libnvrtc.so.13")
    if case == "no NVRTC":
        monkeypatch.setattr(nvrtc, "places", lambda: ["libnvrtc-that-is-not-there.so"])
    elif case == "broken":
        def broken(architectures):
            raise BuildError("NVRTC 13.0 failed for sm_90: error: failed to open builtins\nMake sure that ...")
        monkeypatch.setattr(cuda, "find_nvrtc", broken)
    else:
        a_gpu.refuses = 209
        monkeypatch.setattr(cuda, "find_nvrtc", lambda architectures: (object(), {"sm_90": b"code"}))
    assert prepared_lines(caplog) == [f"pstar: no compiled CUDA kernels ({why}); torch operations take over"]


def test_the_engine_looks_for_its_kernels_before_the_first_step(monkeypatch):
    asked = []
    monkeypatch.setattr(pstar.engine, "prepare", asked.append)
    toy.build()
    assert asked == [torch.device("cpu")]
