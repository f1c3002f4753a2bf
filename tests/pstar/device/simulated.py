"""A simulated CUDA device: builds it, and loads it into a process whose torch was built for CPUs only.

    library = build()                # needs a C++ compiler and torch's headers; once per torch and source
    device = load(library)           # in a process that has not imported torch yet
    torch.zeros(3, device="cuda")    # from now on the process has one CUDA device

A process that has loaded it computes on it for good, so tests use it in processes of their own (`plugin.py`). What it
simulates, and how late, is explained at the head of each C++ file.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCES = ("device.cpp", "operators.h", "memory.h", "streams.h")
FLAGS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-w")
BUILD_S = 600
"""Ends a compiler that hangs."""

LATE_DEFAULT, LATE_OTHERS = 1, 2
COUNTS = ("kernels", "copies_in", "copies_out", "copies_inside", "waits", "pinned_bytes", "near_bytes")
"""The fields of `Counts` in streams.h."""

PROPERTIES = types.SimpleNamespace(name="simulated", total_memory=2**30)


class DeviceContext(contextlib.nullcontext):
    """torch.cuda.device; a class, because torch asks for it by isinstance."""


class Unavailable(Exception):
    """The device cannot be built here; the message says why."""


def torch_folder() -> Path:
    """The folder of the package torch, which is not imported."""
    return Path(importlib.util.find_spec("torch").origin).parent


def build() -> Path:
    """Returns the path of the library, in the user's cache of pstar's kernels. Raises Unavailable."""
    from pstar.kernels import build as kernels_build  # not above: it imports torch

    compiler, torch_path = kernels_build.find_compiler(), torch_folder()
    version = importlib.metadata.version("torch")
    if compiler is None:
        raise Unavailable("no C++ compiler found")
    if sys.platform != "linux" or not (torch_path / "include").is_dir():
        raise Unavailable("needs Linux and torch's headers")
    if list((torch_path / "lib").glob("libtorch_cuda*")):
        raise Unavailable("this torch knows real CUDA devices")
    recipe = hashlib.sha256(repr((compiler, version, str(torch_path), FLAGS)).encode())
    for name in SOURCES:
        recipe.update((HERE / name).read_bytes())
    try:
        target = kernels_build.cache_folder() / f"simulated-device-{version}-{recipe.hexdigest()[:16]}.so"
        if not target.exists():
            with kernels_build.only_one_at_a_time(target.with_suffix(".lock")):
                if not target.exists():
                    _compile(compiler, torch_path, target)
    except (OSError, kernels_build.BuildError) as error:
        raise Unavailable(str(error)) from error
    return target


def _compile(compiler: str, torch_path: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "device.so"
        includes = [f"-I{torch_path}/include", f"-I{torch_path}/include/torch/csrc/api/include"]
        links = [f"-L{torch_path}/lib", "-ltorch_cpu", "-ltorch", "-lc10", f"-Wl,-rpath,{torch_path}/lib"]
        run = subprocess.run([compiler, *FLAGS, *includes, str(HERE / SOURCES[0]), "-o", str(made), *links],
                             capture_output=True, text=True, timeout=BUILD_S)
        if run.returncode:    # not Unavailable: another torch has changed its interfaces, and the tests must say so
            raise RuntimeError(f"the simulated device does not compile with torch of {torch_path}:\n{run.stderr[:4000]}")
        made.replace(target)


class Device:
    """The simulated device of this process.

    Args:
        library: the loaded library.
    """

    def __init__(self, library: ctypes.CDLL):
        self._library = library

    def late(self, default: bool, others: bool) -> None:
        """Which streams run as late as they may; the others run each task when it is given."""
        self._library.simulated_late(LATE_DEFAULT * default + LATE_OTHERS * others)

    def counts(self) -> dict[str, int]:
        """The numbers since the start of the process, by COUNTS; the bytes are those of now."""
        values = (ctypes.c_long * len(COUNTS))()
        self._library.simulated_counts(values)
        return dict(zip(COUNTS, values, strict=True))

    def waits_of(self, native_id: int) -> int:
        """How often the thread has waited for the device (threading.Thread.native_id)."""
        return self._library.simulated_waits_of(ctypes.c_long(native_id))

    def total_bytes(self, num_bytes: int) -> None:
        """From now on more than this is out of memory."""
        self._library.simulated_total_bytes(ctypes.c_long(num_bytes))

    def host_register(self, address: int, num_bytes: int, flags: int) -> int:
        return self._library.simulated_host_register(ctypes.c_void_p(address), ctypes.c_long(num_bytes))

    def host_unregister(self, address: int) -> int:
        return self._library.simulated_host_unregister(ctypes.c_void_p(address))


def load(library: Path) -> Device:
    """Gives this process the device. Raises AssertionError if torch is imported: it looks for devices only then."""
    assert "torch" not in sys.modules, "load the simulated device before torch"
    ctypes.CDLL(str(torch_folder() / "lib" / "libtorch_global_deps.so"), ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    loaded.simulated_waits_of.restype = ctypes.c_long
    device = Device(loaded)
    import torch

    for name, value in _of_torch_cuda(torch, device).items():
        setattr(torch.cuda, name, value)
    torch.accelerator.empty_host_cache = lambda: None    # torch calls it in libtorch_cuda
    torch.empty(0, pin_memory=True)    # torch initialises the device, as torch.cuda.init does; else nothing counts as pinned
    return device


def _of_torch_cuda(torch: types.ModuleType, device: Device) -> dict[str, Any]:
    """What torch.cuda lacks in a torch built for CPUs; torch.accelerator asks the library by itself."""
    here, accelerator = torch.device("cuda", 0), torch.accelerator
    runtime = types.SimpleNamespace(cudaHostRegister=device.host_register, cudaHostUnregister=device.host_unregister,
                                    cudaGetErrorString=lambda status: "simulated error")

    @contextlib.contextmanager
    def on_stream(stream: Any) -> Any:
        with stream if stream is not None else contextlib.nullcontext():
            yield

    return {
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1,
        "init": lambda: None, "_lazy_init": lambda: None, "cudart": lambda: runtime,
        "current_device": lambda: 0, "set_device": lambda device: None, "device": DeviceContext,
        "synchronize": lambda device=None: accelerator.synchronize(0), "empty_cache": lambda: None,
        "Stream": lambda device=None, **options: torch.Stream(here),
        "Event": lambda enable_timing=False, blocking=False, interprocess=False: torch.Event(
            here, enable_timing=enable_timing, blocking=blocking),
        "current_stream": lambda device=None: accelerator.current_stream(0), "stream": on_stream,
        "mem_get_info": lambda device=None: accelerator.get_memory_info(0),
        "memory_reserved": lambda device=None: accelerator.memory_allocated(0),    # freed memory is not kept
        "memory_allocated": lambda device=None: accelerator.memory_allocated(0),
        "max_memory_allocated": lambda device=None: accelerator.max_memory_allocated(0),
        "max_memory_reserved": lambda device=None: accelerator.max_memory_allocated(0),
        "reset_peak_memory_stats": lambda device=None: accelerator.reset_peak_memory_stats(0),
        "get_device_properties": lambda device=None: PROPERTIES, "get_device_capability": lambda device=None: (9, 0),
        # The device draws random numbers from the host's generator, in the order of the program.
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed_all": lambda seed: None, "is_bf16_supported": lambda *_: True,
    }
