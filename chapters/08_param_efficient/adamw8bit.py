"""AdamW whose two moments are kept in 8 bits (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization").

A moment is stored as one code of 8 bits a number, and one float32 scale a block of 2,048 numbers (section 2.1): an outlier
costs digits only in its own block. A step decodes the moments, updates them and the parameter in float32, and encodes the
new moments. So AdamW's 8 bytes a parameter become 2 and 8 / 2,048.

Equal steps would waste the codes: most moments are far below the largest one of their block. The codes are 256 values with
more digits for larger values, over seven decades (dynamic tree quantisation, section 1.3):

    decade     1e-7 .. 1e-6   1e-6 .. 1e-5  ...  0.01 .. 0.1   0.1 .. 1
    exp_avg         1              2        ...      32           64       equal steps, with both signs; also 0 and 1
    exp_avg_sq      2              4        ...      64          128       equal steps; also 1e-7 and 1

Two differences from the paper. The second moment has no code for 0: a small moment next to a large one would become 0, and
its update be divided by eps alone. A scale is the largest number with its sign, so that number has the code of 1: encoding
decoded moments again gives the same codes. Checkpoints therefore hold plain float32 moments, which every chapter resumes.

Tensors below 4,096 numbers keep float32 moments, as in bitsandbytes: they are norms and biases, and few bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 2048  # numbers that share a scale
LEAST = 4096  # numbers of a tensor whose moments are in 8 bits
DECADES = 7
MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # name -> has both signs


@cache
def code_values(signed: bool, device: torch.device | str = "cpu") -> Tensor:
    """The values of the 256 codes, ascending, (256,) float32: of the first moment (signed) or of the second."""
    steps = 1 if signed else 2
    values = []
    for decade in range(DECADES):
        top = 10.0 ** (decade + 1 - DECADES)
        values += [top * (0.1 + 0.9 * (step + 0.5) / steps) for step in range(steps)]  # the middle of each step
        steps *= 2
    least = [-value for value in values] + [0.0] if signed else [10.0**-DECADES]
    return torch.tensor(sorted([*least, *values, 1.0]), device=device)


def encode(moment: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Rounds each number to the nearest code of its block.

    Args:
        moment: float32, any shape of n numbers, taken as one row; the last block may be shorter.

    Returns:
        codes (n,) uint8, and scales (ceil(n / BLOCK),) float32: the number of largest magnitude of each block.
    """
    n = moment.numel()
    rows = F.pad(moment.flatten(), (0, -n % BLOCK)).view(-1, BLOCK)
    scales = rows.gather(1, rows.abs().argmax(1, keepdim=True))
    relative = torch.where(scales == 0, 0.0, rows / scales)
    values = code_values(signed, moment.device)
    codes = torch.bucketize(relative, (values[1:] + values[:-1]) / 2)  # how many middles between codes are below it
    return codes.to(torch.uint8).flatten()[:n], scales.flatten()


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """(n,) float32: what `encode` rounded."""
    return code_values(signed, codes.device)[codes.long()] * scales.repeat_interleave(BLOCK)[: codes.numel()]


class AdamW8bit(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019).

    The state of a large parameter holds exp_avg_codes, exp_avg_scales, and the same of exp_avg_sq. The state of a small one,
    and one that a checkpoint has just given, holds exp_avg and exp_avg_sq in float32.

    Args:
        groups: parameter groups, each with lr, betas, eps and weight_decay, as those of a torch.optim.AdamW.
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        names = ("params", "lr", "betas", "eps", "weight_decay")
        super().__init__([{name: group[name] for name in names} for group in groups], {})

    def decoded(self) -> dict[Tensor, dict[str, Tensor]]:
        """parameter -> step and both moments in float32, as in the state of torch.optim.AdamW."""
        found = {}
        for parameter, state in self.state.items():
            first, second = self.moments(parameter)
            found[parameter] = {"step": state["step"], "exp_avg": first, "exp_avg_sq": second}
        return found

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, **group)

    def _update(self, parameter: Tensor, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
                **_: object) -> None:  # fmt: skip
        grad, number = parameter.grad.float(), float(self.state[parameter].get("step", 0)) + 1
        first, second = self.moments(parameter)
        first.lerp_(grad, 1 - betas[0])
        second.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
        largest = (second / (1 - betas[1] ** number)).sqrt_().add_(eps)
        parameter.mul_(1 - lr * weight_decay)  # with the moments of this step as computed: rounding is for the next one
        parameter.addcdiv_(first.to(parameter), largest.to(parameter), value=-lr / (1 - betas[0] ** number))
        self._keep(parameter, number, first, second)

    def moments(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """Both moments, float32 of the parameter's shape: zeros before its first update."""
        state, found = self.state.get(parameter, {}), []
        for name, signed in MOMENTS.items():
            if f"{name}_codes" in state:
                moment = decode(state[f"{name}_codes"], state[f"{name}_scales"], signed).view(parameter.shape)
            else:
                moment = state.get(name, torch.zeros(()).expand(parameter.shape)).to(parameter.device, torch.float32)
            found.append(moment.contiguous())
        return found[0], found[1]

    def _keep(self, parameter: Tensor, number: float, *moments: Tensor) -> None:
        state = self.state[parameter]
        state["step"] = torch.tensor(number)
        for (name, signed), moment in zip(MOMENTS.items(), moments, strict=True):
            if parameter.numel() < LEAST:
                state[name] = moment
                continue
            state.pop(name, None)  # as a checkpoint gave it
            state[f"{name}_codes"], state[f"{name}_scales"] = encode(moment, signed)


def state_bytes(sizes: Iterable[int], optim: str) -> int:
    """Bytes of both moments, for parameters of these numbers of elements, under --optim."""
    eight = optim == "adamw8bit"
    return sum(2 * (size + 4 * math.ceil(size / BLOCK)) if eight and size >= LEAST else 8 * size for size in sizes)
