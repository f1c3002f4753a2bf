"""LLM.int8() (Dettmers et al. 2022): int8 products with a scale a row and a column, outlier columns in 16 bit.

    Y = X W    X (tokens, in)                      W (in, out)
               a scale for each row (token)        a scale for each column (output)

    Y[t, o]  =  x_scale[t] * w_scale[o] / 127**2  *  sum over i of  X8[t, i] * W8[i, o]        (section 2; exact integers)

Scales of rows and columns leave the sum, so the product itself is integer arithmetic. One scale per token fails when a few
input features are far larger than the rest, as in models above 6 billion parameters: they decide the scale, and all other
features round to zero. So the product is split (section 3.2). Columns of X with a magnitude of at least the threshold, and
the rows of W that they meet, are multiplied in 16 bit; the rest in int8.

    Y = X[:, outliers] W16[outliers]  +  int8 product of the rest
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

THRESHOLD = 6.0  # section 4: at 6.0 the splitting keeps perplexity, and hardly any column of a small model reaches it
_TINY = 1e-38


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """One scale a row: (rows, columns) -> codes int8 of that shape, largest magnitudes (rows,) float32."""
    x = x.float()
    largest = x.abs().amax(1)
    return torch.round(x * (127 / largest.clamp(min=_TINY))[:, None]).to(torch.int8), largest


class Int8Weight(nn.Module):
    """A weight matrix in int8 with a scale for each output, stored (out, in).

    Input features that calibration found to be outliers keep their weights in 16 bit, as in the paper. Features that exceed
    the threshold only later use weights dequantised from their codes, as bitsandbytes does.

    Attributes:
        threshold: magnitude from which a column of the input is an outlier; inf: none is.
        codes: (out, in) int8, 0 in the columns kept in 16 bit.
        scales: (out,) float32, the largest magnitude of each row of codes.
        kept: (K,) int64, the input features kept in 16 bit.
        kept_weights: (out, K) float16.
    """

    def __init__(self, weight: Tensor, threshold: float = THRESHOLD, kept: Tensor | None = None) -> None:
        super().__init__()
        weight = weight.detach().float()
        self.shape, self.threshold = tuple(weight.shape), threshold
        kept = torch.empty(0, dtype=torch.int64) if kept is None else kept
        rest = weight.index_fill(1, kept.to(weight.device), 0.0)
        codes, scales = quantize_rows(rest)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("kept", kept.to(weight.device))
        self.register_buffer("kept_weights", weight[:, self.kept].half())

    def dequantize(self) -> Tensor:
        """(out, in) float32."""
        weight = self.codes.float() * (self.scales / 127)[:, None]
        return weight.index_copy(1, self.kept, self.kept_weights.float())

    def outliers(self, rows: Tensor) -> Tensor:
        """(in,) bool: the columns of rows (tokens, in) to multiply in 16 bit."""
        found = (rows.abs() >= self.threshold).any(0)
        return found.index_fill(0, self.kept, True)

    def matmul(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out) in x's dtype."""
        rows = x.reshape(-1, self.shape[1]).float()
        outliers = self.outliers(rows)
        codes, largest = quantize_rows(rows.masked_fill(outliers, 0.0))
        # sums of int8 products are whole numbers, and float64 holds them exactly; GPUs have integer instructions for them
        sums = codes.double() @ self.codes.double().t()
        y = (sums * (largest[:, None].double() * self.scales.double() / 127**2)).float()
        if outliers.any():
            weight = self.dequantize()[:, outliers].half()
            y += rows[:, outliers] @ weight.float().t()
        return y.view(*x.shape[:-1], self.shape[0]).to(x.dtype)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Takes the state's number of kept columns, which calibration decided."""
        for name in ("kept", "kept_weights"):
            if (stored := state.get(prefix + name)) is not None:
                setattr(self, name, torch.empty_like(stored, device=getattr(self, name).device))
        super()._load_from_state_dict(state, prefix, *rest)


def outlier_features(largest: Tensor, threshold: float = THRESHOLD) -> Tensor:
    """(K,) int64: input features whose largest magnitude (in,) on calibration text reaches the threshold."""
    return (largest >= threshold).nonzero().view(-1)


NO_OUTLIERS = math.inf  # as the threshold: every column in int8
