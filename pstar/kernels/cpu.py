"""cpu_adam.cpp through ctypes: builds it at first use if the installation did not."""

from __future__ import annotations

import ctypes
import logging
from functools import cache

import torch

from pstar.errors import ArgumentError
from pstar.kernels.build import BuildError, build
from pstar.kernels.quantize import code_tables, least_codes
from pstar.kernels.update import GRAD_KINDS, AdamUpdate

PATHS = {"plain": 1, "avx2": 2, "avx512": 3}
"""Code paths by name. On aarch64 plain C is NEON."""


class AdamScalars(ctypes.Structure):
    """As in adam_formula.h."""

    _fields_ = [(name, ctypes.c_float) for name in (
        "neg_decay", "l2", "lerp", "lerp_from_grad", "lerp_sq", "lerp_sq_from_grad", "inv_bias2_sqrt", "eps",
        "neg_step_size", "grad_scale")]


class AdamChunk(ctypes.Structure):
    """As in adam_formula.h."""

    _fields_ = [*[(name, ctypes.c_void_p) for name in (
        "param", "extra", "grad", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")],
        ("numel", ctypes.c_int64), ("first_index", ctypes.c_int64), ("grad_scale", ctypes.c_void_p),
        ("skip", ctypes.c_void_p), ("scalars", AdamScalars),
        ("seed", ctypes.c_uint32), ("unused", ctypes.c_uint32)]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; if there are none, None, with one line in the log."""
    try:
        found = ctypes.CDLL(str(build()))
    except (BuildError, OSError) as error:
        logging.getLogger("pstar").warning("pstar: no compiled CPU kernels (%s); torch operations take over", error)
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    found.pstar_has_path.argtypes = [integer]
    found.pstar_adam.argtypes = [ctypes.POINTER(AdamChunk), integer, integer, integer, pointer, integer, integer]
    for norm in (found.pstar_norm_blocks, found.pstar_squared_norm):
        norm.argtypes = [pointer, pointer, integer, integer, ctypes.c_int64, integer, pointer, integer, integer]
    return found


def paths() -> list[str]:
    """The code paths that this processor supports, the plain one first."""
    lib = library()
    return [] if lib is None else [name for name, number in PATHS.items() if lib.pstar_has_path(number)]


def chunk_of(update: AdamUpdate) -> AdamChunk:
    """The structure that the kernels take. It holds no reference: keep the update as long as the structure is used."""
    extra = update.low if update.low is not None else update.copy16
    scales = update.scales or (None, None)
    tensors = (update.param, extra, update.grad, update.exp_avg, update.exp_avg_sq, *scales)
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    scale, scale_at = update.grad_scale, None
    if isinstance(scale, torch.Tensor):
        scale, scale_at = 1.0, scale.data_ptr()
    skip_at = None if update.skip is None else update.skip.data_ptr()
    return AdamChunk(*pointers, update.param.numel(), update.first_index, scale_at, skip_at,
                     AdamScalars(*update.scalars(), scale), (update.seed or 0) & 0xFFFFFFFF, 0)


def update_on_cpu(updates: list[AdamUpdate], path: str | None = None, num_threads: int | None = None) -> None:
    """Adam updates of the same kinds, already checked, in one call; so many threads (None: torch's) share all elements."""
    param, grad, quantised = updates[0].kinds()
    chunks = (AdamChunk * len(updates))(*map(chunk_of, updates))
    tables = None
    if quantised:
        tables = (ctypes.c_void_p * 6)(*[table.data_ptr() for table in (*code_tables(torch.device("cpu")), *least_codes())])
    threads = num_threads or torch.get_num_threads()
    _answer(library().pstar_adam(chunks, len(updates), param, grad, tables, threads, _number(path)), path)


def squared_norm_on_cpu(grad: torch.Tensor, path: str | None = None, place: torch.Tensor | None = None,
                        add: bool = False, num_threads: int | None = None) -> float:
    """The sum of squares in float64, the same for any number of threads (None: torch's) and any path.

    place: the gradient is also copied or added to it; the squares are then those of place.
    """
    result = ctypes.c_double()
    _norm(library().pstar_squared_norm, grad, ctypes.byref(result), path, place, add, num_threads)
    return result.value


def norm_blocks_on_cpu(grad: torch.Tensor, sums: torch.Tensor, path: str | None = None) -> None:
    """Writes the sums of squares of grad's blocks into sums, float64."""
    _norm(library().pstar_norm_blocks, grad, sums.data_ptr(), path)


def _norm(function, grad: torch.Tensor, result: object, path: str | None, place: torch.Tensor | None = None,
          add: bool = False, num_threads: int | None = None) -> None:
    where, wide = (None, False) if place is None else (place.data_ptr(), place.dtype == torch.float32)
    _answer(function(grad.data_ptr(), where, add, wide, grad.numel(), GRAD_KINDS[grad.dtype], result,
                     num_threads or torch.get_num_threads(), _number(path)), path)


def _number(path: str | None) -> int:
    if path is not None and path not in PATHS:
        raise ArgumentError(f"path: one of {', '.join(PATHS)} expected, found {path!r}")
    return 0 if path is None else PATHS[path]


def _answer(status: int, path: str | None) -> None:
    if status == 1:
        raise ArgumentError(f"path: this processor has no {path}")
    if status == 3:
        raise MemoryError("pstar: no memory for the partial sums of a norm")
    assert status == 0, status
