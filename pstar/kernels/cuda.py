"""cuda_adam.cu through NVRTC and the driver: compiled for the dtypes and this GPU at first use, later read from the cache.

Only the driver's public C interface is used. Kernels run in the current stream of their tensors' device, and nothing here
waits for the device.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache

import torch

from pstar.kernels.build import BuildError
from pstar.kernels.cpu import AdamChunk, chunk_of
from pstar.kernels.nvrtc import compile_cubin, find_nvrtc
from pstar.kernels.quantize import code_tables
from pstar.kernels.update import GRAD_KINDS, AdamUpdate

# As in cuda_adam.cu.
THREADS, GROUP, MAX_CHUNKS, MAX_NORMS, NORM_BLOCK, NORM_LANES, NORM_THREADS = 256, 8, 28, 120, 8192, 256, 64


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
    """(NVRTC, driver) that compile and load a small kernel for this process's GPUs; else None, with one line in the log.

    Called when the engine starts (front.prepare), so that what is missing shows there and not in the first backward.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        nvrtc, trials = find_nvrtc(architectures())
        index = torch.cuda.current_device()
        with _Context(driver, index) as context:
            context.check(driver.cuModuleUnload(context.load(trials[architecture_of(index)])))
        return nvrtc, driver
    except (OSError, BuildError, RuntimeError, AssertionError) as error:    # the last: torch is built without CUDA
        logging.getLogger("pstar").warning("pstar: no compiled CUDA kernels (%s); torch operations take over",
                                           str(error).partition("\n")[0])
        return None


def architecture_of(index: int) -> str:
    """A GPU's architecture as NVRTC calls it, "sm_90"."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def architectures() -> list[str]:
    """Those of the GPUs that this process sees."""
    return sorted({architecture_of(index) for index in range(torch.cuda.device_count())})


class _Context:
    """Makes the device's primary context, which torch uses too, current inside: a thread may have no context."""

    def __init__(self, driver: ctypes.CDLL, index: int):
        torch.cuda.init()
        self.driver, self.context = driver, ctypes.c_void_p()
        self.check(self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), index))    # torch never releases it

    def __enter__(self) -> _Context:
        self.check(self.driver.cuCtxPushCurrent_v2(self.context))
        return self

    def __exit__(self, *_: object) -> None:
        self.check(self.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())))

    def load(self, code: bytes) -> ctypes.c_void_p:
        """Loads machine code; raises RuntimeError if the driver does not take it."""
        module = ctypes.c_void_p()
        self.check(self.driver.cuModuleLoadData(ctypes.byref(module), code))
        return module

    def check(self, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"CUDA: {(text.value or b'error').decode()} ({status})")


@cache
def _context(index: int) -> _Context:
    return _Context(library()[1], index)


@cache
def _function(index: int, kinds: tuple[int, int, bool], name: str) -> ctypes.c_void_p:
    with _context(index) as context:
        function = ctypes.c_void_p()
        context.check(context.driver.cuModuleGetFunction(ctypes.byref(function), _module(index, kinds), name.encode()))
        return function


@cache
def _module(index: int, kinds: tuple[int, int, bool]) -> ctypes.c_void_p:
    return _context(index).load(compile_cubin(library()[0], architecture_of(index), kinds))


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
