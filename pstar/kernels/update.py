"""The arguments of one Adam update of a flat run of elements, checked before a kernel gets a pointer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch

from pstar.errors import ArgumentError

QUANT_BLOCK = 2048
"""Elements that share the scale of their 8-bit moments; PSTAR_QUANT_BLOCK in adam_formula.h."""

# As in adam_formula.h.
PARAM_FP32, PARAM_COPY_BF16, PARAM_COPY_FP16, PARAM_SPLIT, PARAM_BF16, PARAM_BF16_SR = range(6)
GRAD_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
DTYPES = tuple({"param": (torch.float32, torch.bfloat16), "grad": tuple(GRAD_KINDS), "exp_avg": (moment,),
                "exp_avg_sq": (moment,), "low": (torch.int16,), "copy16": (torch.bfloat16, torch.float16)}
               for moment in (torch.float32, torch.uint8))  # fmt: skip
"""Of an update's tensors, without and with 8-bit moments."""


@dataclass(frozen=True)
class AdamOptions:
    """Adam's hyper-parameters; all parameters of a parameter group share one record."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    """Decoupled (adamw) or added to the gradient."""
    adamw: bool = True


@dataclass(eq=False)
class AdamUpdate:
    """One run of N elements and its hyper-parameters. All tensors are contiguous, of one shape, on one device.

    | parameter | master | give |
    |---|---|---|
    | fp32 | itself | param fp32 |
    | fp16 or bf16, written in the same pass | fp32 | param is the master, copy16 the 16-bit parameter |
    | bf16, the master's high half | split | param bf16, low int16 (see split_master) |
    | bf16 | none | param bf16, and seed for stochastic rounding |
    """

    param: torch.Tensor
    """fp32 or bf16; updated."""
    grad: torch.Tensor
    """fp32, fp16 or bf16; only read."""
    exp_avg: torch.Tensor
    """First moment, fp32, or uint8 codes where scales are given; updated."""
    exp_avg_sq: torch.Tensor
    """Second moment, likewise."""
    step: int
    """Number of this update, from 1."""
    options: AdamOptions
    grad_scale: float | torch.Tensor = 1.0
    """A factor of the gradient: clip factor / loss scale. May be an fp32 tensor of one element on param's device, which the
    kernel reads, so that the host does not wait for it."""
    low: torch.Tensor | None = None
    """Split master: the low half, int16; updated."""
    copy16: torch.Tensor | None = None
    """bf16 or fp16: gets the rounded parameter. May be grad itself (the shared slot)."""
    scales: tuple[torch.Tensor, torch.Tensor] | None = None
    """8-bit moments: fp32 scales of exp_avg and exp_avg_sq, one for each QUANT_BLOCK elements; updated."""
    seed: int | None = None
    """Rounds a bf16 parameter stochastically; give another seed at each step."""
    first_index: int = 0
    """Number of the first element for the random numbers, so that cutting a run in two does not change them."""
    skip: torch.Tensor | None = None
    """An fp32 tensor of one element on param's device; if it is not 0 (an overflow), no tensor is written."""

    def kinds(self) -> tuple[int, int, bool]:
        """(ParamKind, GradKind, 8-bit moments), as numbered in the kernels."""
        if self.param.dtype == torch.float32:
            copies = {None: PARAM_FP32, torch.bfloat16: PARAM_COPY_BF16, torch.float16: PARAM_COPY_FP16}
            param = copies[None if self.copy16 is None else self.copy16.dtype]
        elif self.low is not None:
            param = PARAM_SPLIT
        else:
            param = PARAM_BF16 if self.seed is None else PARAM_BF16_SR
        return param, GRAD_KINDS[self.grad.dtype], self.scales is not None

    def scalars(self) -> tuple[float, ...]:
        """AdamScalars in the header's order, without grad_scale: computed in float64, rounded to fp32 for the kernel."""
        options, ends = self.options, []
        for beta in options.betas:
            weight = 1 - beta
            ends += [weight - 1, 1.0] if weight >= 0.5 else [weight, 0.0]
        return (-options.lr * options.weight_decay if options.adamw else 0.0,
                0.0 if options.adamw else options.weight_decay,
                *ends,
                (1 - options.betas[1] ** self.step) ** -0.5,
                options.eps,
                -(options.lr / (1 - options.betas[0] ** self.step)))

    def check(self) -> None:
        """Raises ArgumentError, which names the argument, for values that a kernel cannot take."""
        shape, tensors = self.param.shape if isinstance(self.param, torch.Tensor) else (), {}
        for name, dtypes in DTYPES[self.scales is not None].items():    # for each update of each step: few calls
            tensor = getattr(self, name)
            if tensor is None and name in ("low", "copy16"):
                continue
            if not isinstance(tensor, torch.Tensor):
                raise ArgumentError(f"{name}: a tensor expected, found {type(tensor).__name__}")
            if tensor.dtype not in dtypes:
                _refuse(name, f"dtype {_names(dtypes)}", tensor.dtype)
            if tensor.shape != shape:
                _refuse(name, f"param's shape {tuple(shape)}", tuple(tensor.shape))
            if not tensor.is_contiguous():
                _refuse(name, "a contiguous tensor", f"strides {tensor.stride()}")
            tensors[name] = tensor
        if self.scales is not None:
            blocks = -(-self.param.numel() // QUANT_BLOCK)
            for name, tensor in zip(("scales[0]", "scales[1]"), self.scales, strict=True):
                if tensor.dtype != torch.float32:
                    _refuse(name, "dtype float32", tensor.dtype)
                if tensor.shape != (blocks,) or not tensor.is_contiguous():
                    _refuse(name, f"contiguous, shape ({blocks},)", tuple(tensor.shape))
                tensors[name] = tensor
        device = self.param.device
        for name, tensor in tensors.items():
            if tensor.device != device:
                _refuse(name, f"param's device {device}", tensor.device)
        full = self.param.dtype == torch.float32
        if self.low is not None and full:
            _refuse("low", "a bf16 param with it", "an fp32 param")
        if self.copy16 is not None and not full:
            _refuse("copy16", "an fp32 param with it", f"a {self.param.dtype} param")
        if self.seed is not None and (full or self.low is not None):
            _refuse("seed", "a bf16 param without low with it", "another")
        for name in ("grad_scale", "skip"):
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                if value.dtype != torch.float32 or value.numel() != 1:
                    _refuse(name, "one fp32 element", value.dtype)
                if value.device != device:
                    _refuse(name, f"param's device {device}", value.device)
        if not isinstance(self.step, int) or self.step < 1:
            _refuse("step", "an integer from 1 on", self.step)
        if not (0 <= self.options.betas[0] < 1 and 0 <= self.options.betas[1] < 1):
            _refuse("betas", "two numbers in [0, 1)", self.options.betas)
        if not self.options.eps >= 0:
            _refuse("eps", "a number from 0 on", self.options.eps)
        self._check_overlap(tensors)

    def _check_overlap(self, tensors: dict[str, torch.Tensor]) -> None:
        places = []
        for name, tensor in tensors.items():
            if tensor.nbytes:
                begin = tensor.data_ptr()
                places.append((begin, begin + tensor.nbytes, name))
        places.sort()
        for (begin, end, first), (other_begin, other_end, second) in zip(places, places[1:], strict=False):
            if other_begin < end:
                shared_slot = {first, second} == {"grad", "copy16"} and (begin, end) == (other_begin, other_end)
                if not (shared_slot and self.grad.dtype == self.copy16.dtype):
                    raise ArgumentError(f"{second}: its memory overlaps that of {first}")


def _refuse(name: str, wanted: str, found: object) -> NoReturn:
    raise ArgumentError(f"{name}: {wanted} expected, found {found}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
