"""16 bits: norms whose running statistics stay fp32, and the error where a model mixes dtypes.

Parameters and inputs are cast to 16 bits. Buffers keep their dtype: 16 bits are too few for a rotary frequency, and for a
running mean, which a step often changes by less than bf16 can show.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from pstar.errors import PstarError

_WIDER, _SIXTEEN = r"(?<!b)float(?!16)|double", "bfloat16|half|float16"
_NAMES = {torch.bfloat16: ("bfloat16", _WIDER), torch.float16: ("half|float16", _WIDER),
          torch.float32: (r"(?<!b)float(?!16)", _SIXTEEN)}
"""How torch's errors name a dtype of parameters and the dtypes that a model mixes it with, in lower case."""
_WITHOUT_NAMES = ("mixed dtype", "expected self.dtype to be equal to src.dtype")
"""Parts of errors that do not name both dtypes: of norms on a CPU, and of scatter."""


def keep_statistics_wide(module: torch.nn.Module) -> None:
    """Lets norms with running statistics compute with weights in the statistics' dtype, from an input of 16 bits.

    torch's kernels take an input of 16 bits beside weights and statistics of 32, but no weights of 16 beside statistics of
    32. (Apex keeps batch norm's weights in fp32, too: keep_batchnorm_fp32 of its level O2.)
    """
    for child in module.modules():
        if isinstance(child, torch.nn.modules.batchnorm._NormBase) and child.affine and child.track_running_stats:
            child.forward = _with_wide_weights(child, child.forward)


def _with_wide_weights(norm: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def wide(*args: Any, **kwargs: Any) -> Any:
        if norm.running_mean is None:
            return forward(*args, **kwargs)
        dtype, attributes = norm.running_mean.dtype, vars(norm)
        cast = {name: param.to(dtype) for name, param in norm.named_parameters(recurse=False) if param.dtype != dtype}
        attributes.update(cast)    # found before the module's parameters of these names
        try:
            return forward(*args, **kwargs)
        finally:
            for name in cast:
                del attributes[name]

    return wide


def explain_mixed_dtypes(module: torch.nn.Module, dtype: torch.dtype, error: BaseException) -> str | None:
    """The line that says where a model mixed two dtypes and what to do; None if the error is another one.

    Args:
        module: the model, whose parameters and inputs have this dtype.
        error: what its forward raised; torch's RNNs raise ValueError.
    """
    if dtype not in _NAMES or not isinstance(error, RuntimeError | ValueError) or isinstance(error, PstarError):
        return None
    said = str(error).lower()
    if not any(part in said for part in _WITHOUT_NAMES) and not all(re.search(name, said) for name in _NAMES[dtype]):
        return None
    name, short = _innermost(module, error.__traceback__), str(dtype).removeprefix("torch.")
    return (f"{name} mixes dtypes ({str(error).splitlines()[0]}): parameters and inputs are {short}"
            f"{' (no bf16 or fp16 in the configuration)' if dtype == torch.float32 else ''}, but buffers and "
            "tensors that the model makes keep their dtype; cast them where they are used, x + self.table.to(x.dtype)")


def _innermost(module: torch.nn.Module, trace: TracebackType | None) -> str:
    """The name of the innermost module of the model whose method is in a traceback."""
    names, found = {id(child): name for name, child in module.named_modules()}, ""
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), "") or found
        trace = trace.tb_next
    return f"module {found!r}" if found else "the model"
