"""cuda_adam.cu through NVRTC and the driver: compiled for the dtypes and this GPU at first use, later read from the cache.

NVRTC comes with torch's CUDA build, so no toolkit is needed. Only the public C interfaces of NVRTC and of the driver are
used. Kernels run in the current stream of their tensors' device, and nothing here waits for the device.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
from functools import cache
from pathlib import Path

import torch

from durable.files import replacing
from pstar.kernels.build import HERE, BuildError, cache_folder
from pstar.kernels.cpu import AdamChunk, chunk_of
from pstar.kernels.quantize import code_tables
from pstar.kernels.update import GRAD_KINDS, AdamUpdate

# As in cuda_adam.cu.
THREADS, GROUP, MAX_CHUNKS, MAX_NORMS, NORM_BLOCK, NORM_LANES, NORM_THREADS = 256, 8, 28, 120, 8192, 256, 64
SOURCES = ("cuda_adam.cu", "adam_formula.h")
OPTIONS = ("--std=c++17", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false")


class AdamBatch(ctypes.Structure):
    """As in cuda_adam.cu."""

    _fields_ = [("chunks", AdamChunk * MAX_CHUNKS), ("codes", ctypes.c_void_p * 4),
                ("first_block", ctypes.c_int * (MAX_CHUNKS + 1)), ("num_chunks", ctypes.c_int)]


class NormBatch(ctypes.Structure):
    """As in cuda_adam.cu."""

    _fields_ = [("grads", ctypes.c_void_p * MAX_NORMS), ("numel", ctypes.c_int64 * MAX_NORMS),
                ("first_block", ctypes.c_int64 * (MAX_NORMS + 1)), ("num_chunks", ctypes.c_int),
                ("first_result", ctypes.c_int)]


@cache
def library() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    """(NVRTC, driver); if one of them is missing, None, with one line in the log."""
    try:
        return find_nvrtc(), ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        logging.getLogger("pstar").warning("pstar: no compiled CUDA kernels (%s); torch operations take over", error)
        return None


def find_nvrtc() -> ctypes.CDLL:
    """NVRTC of torch's CUDA version: by name, if torch has loaded it, or in the packages that torch depends on."""
    name = f"libnvrtc.so.{(torch.version.cuda or '13').split('.')[0]}"
    places: list[str | Path] = [name]
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        places += sorted(Path(folder).glob(f"*/lib/{name}"))
    for place in places:
        try:
            return ctypes.CDLL(str(place))
        except OSError:
            continue
    raise OSError(f"{name} was not found")


def compile_cubin(nvrtc: ctypes.CDLL, architecture: str, kinds: tuple[int, int, bool]) -> bytes:
    """Machine code for one architecture ("sm_90") and one combination of kinds. Raises BuildError with NVRTC's log."""
    numbers = zip(("PARAM", "GRAD", "QUANT"), kinds, strict=True)
    options = [*OPTIONS, f"--gpu-architecture={architecture}", *(f"-DPSTAR_{name}={int(kind)}" for name, kind in numbers)]
    sources = [(HERE / name).read_bytes() for name in SOURCES]
    version = (ctypes.c_int(), ctypes.c_int())
    nvrtc.nvrtcVersion(*map(ctypes.byref, version))
    recipe = hashlib.sha256(repr((options, sources, [each.value for each in version])).encode()).hexdigest()[:20]
    try:
        cached = cache_folder() / f"adam-{architecture}-{recipe}.cubin"
    except BuildError:
        cached = None    # nowhere to write: compile in every process
    if cached and cached.exists():
        return cached.read_bytes()

    program = ctypes.c_void_p()
    headers, names = (ctypes.c_char_p * 1)(sources[1]), (ctypes.c_char_p * 1)(SOURCES[1].encode())
    _nvrtc(nvrtc.nvrtcCreateProgram(ctypes.byref(program), sources[0], SOURCES[0].encode(), 1, headers, names))
    try:
        flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status, size = nvrtc.nvrtcCompileProgram(program, len(options), flags), ctypes.c_size_t()
        if status:
            _nvrtc(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
            log = ctypes.create_string_buffer(size.value)
            _nvrtc(nvrtc.nvrtcGetProgramLog(program, log))
            raise BuildError(f"NVRTC {version[0].value}.{version[1].value} failed for {architecture}: {log.value.decode()}")
        _nvrtc(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _nvrtc(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if cached:
        with replacing(cached, per_process=True) as staging:
            staging.write_bytes(code.raw)
    return code.raw


def _nvrtc(status: int) -> None:
    if status:
        raise BuildError(f"NVRTC answers with error {status}")


class _Context:
    """Makes the device's primary context, which torch uses too, current inside: a thread may have no context."""

    def __init__(self, index: int):
        self.driver, self.context = library()[1], ctypes.c_void_p()
        self.check(self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), index))    # torch never releases it

    def __enter__(self) -> _Context:
        self.check(self.driver.cuCtxPushCurrent_v2(self.context))
        return self

    def __exit__(self, *_: object) -> None:
        self.check(self.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())))

    def check(self, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"CUDA: {(text.value or b'error').decode()} ({status})")


@cache
def _context(index: int) -> _Context:
    torch.cuda.init()
    return _Context(index)


@cache
def _function(index: int, kinds: tuple[int, int, bool], name: str) -> ctypes.c_void_p:
    with _context(index) as context:
        function = ctypes.c_void_p()
        context.check(context.driver.cuModuleGetFunction(ctypes.byref(function), _module(index, kinds), name.encode()))
        return function


@cache
def _module(index: int, kinds: tuple[int, int, bool]) -> ctypes.c_void_p:
    major, minor = torch.cuda.get_device_capability(index)
    code = compile_cubin(library()[0], f"sm_{major}{minor}", kinds)
    module = ctypes.c_void_p()
    _context(index).check(_context(index).driver.cuModuleLoadData(ctypes.byref(module), code))
    return module


def _launch(device: torch.device, kinds: tuple[int, int, bool], name: str, grid: int, threads: int,
            *arguments: object) -> None:
    index = torch.cuda.current_device() if device.index is None else device.index
    function = _function(index, kinds, name)
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    with _context(index) as context:
        context.check(context.driver.cuLaunchKernel(function, grid, 1, 1, threads, 1, 1, 0, stream, pointers, None))


def batches_of(updates: list[AdamUpdate], tables: tuple[int, ...] | None) -> list[AdamBatch]:
    """Updates of the same kinds, as arguments of launches; tables: addresses of the code tables of 8-bit moments."""
    batches = []
    per_block = THREADS * GROUP
    for begin in range(0, len(updates), MAX_CHUNKS):
        batch, blocks = AdamBatch(), 0
        part = updates[begin : begin + MAX_CHUNKS]
        for number, update in enumerate(part):
            batch.chunks[number] = chunk_of(update)
            batch.first_block[number] = blocks
            numel = update.param.numel()
            # Without 8-bit moments, groups begin at the first aligned element: up to one group more than numel / GROUP.
            blocks += -(-numel // per_block) if tables else -(-(numel + GROUP) // per_block)
        batch.first_block[len(part)], batch.num_chunks = blocks, len(part)
        for number, address in enumerate(tables or ()):
            batch.codes[number] = address
        batches.append(batch)
    return batches


def update_on_cuda(updates: list[AdamUpdate]) -> None:
    """Adam updates of the same kinds and device, already checked: one launch for each MAX_CHUNKS of them."""
    kinds, device = updates[0].kinds(), updates[0].param.device
    tables = tuple(table.data_ptr() for table in code_tables(device)) if kinds[2] else None
    for batch in batches_of(updates, tables):
        _launch(device, kinds, "pstar_adam", batch.first_block[batch.num_chunks], THREADS, batch)


def norm_batches_of(grads: list[torch.Tensor]) -> list[NormBatch]:
    """Gradients of one dtype, as arguments of launches."""
    batches = []
    for begin in range(0, len(grads), MAX_NORMS):
        batch, blocks = NormBatch(first_result=begin), 0
        part = grads[begin : begin + MAX_NORMS]
        for number, grad in enumerate(part):
            batch.grads[number], batch.numel[number], batch.first_block[number] = grad.data_ptr(), grad.numel(), blocks
            blocks += -(-grad.numel() // NORM_BLOCK)
        batch.first_block[len(part)], batch.num_chunks = blocks, len(part)
        batches.append(batch)
    return batches


def squared_norms_on_cuda(grads: list[torch.Tensor]) -> torch.Tensor:
    """Sums of squares, (len(grads),) float64 on their device: two launches for each MAX_NORMS gradients of one dtype."""
    results = torch.zeros(len(grads), dtype=torch.float64, device=grads[0].device)
    for dtype, kind in GRAD_KINDS.items():
        numbers = [number for number, grad in enumerate(grads) if grad.dtype == dtype]
        if not numbers:
            continue
        own = results if len(numbers) == len(grads) else torch.zeros_like(results)[: len(numbers)]
        for batch in norm_batches_of([grads[number] for number in numbers]):
            blocks = batch.first_block[batch.num_chunks]
            sums = torch.empty(max(1, blocks), dtype=torch.float64, device=results.device)
            partial, result = ctypes.c_void_p(sums.data_ptr()), ctypes.c_void_p(own.data_ptr())
            if blocks:
                _launch(results.device, (0, kind, False), "pstar_norm_blocks", blocks, NORM_THREADS, batch, partial)
            _launch(results.device, (0, kind, False), "pstar_norm_sum", batch.num_chunks, NORM_LANES, batch, partial, result)
        if own is not results:
            for place, number in enumerate(numbers):    # an index tensor would be copied, and the host would wait
                results[number].copy_(own[place])
    return results


def norm_blocks_on_cuda(grad: torch.Tensor) -> torch.Tensor:
    """The sums of squares of grad's blocks, (num_blocks,) float64, on its device."""
    sums = torch.empty(-(-grad.numel() // NORM_BLOCK), dtype=torch.float64, device=grad.device)
    if grad.numel():
        (batch,), partial = norm_batches_of([grad]), ctypes.c_void_p(sums.data_ptr())
        kinds = (0, GRAD_KINDS[grad.dtype], False)
        _launch(grad.device, kinds, "pstar_norm_blocks", sums.numel(), NORM_THREADS, batch, partial)
    return sums
