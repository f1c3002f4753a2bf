"""Exercise 08: LoRA's forward and merge, and a quantiser that gives each block a scale. About 30 lines.

    bash chapters/08_param_efficient/exercise.sh           # all of it
    bash chapters/08_param_efficient/exercise.sh -k lora   # one half: lora, blocks

The grader compares LoRA's output with a small case worked out by hand, trains it for some steps, and merges it. It compares
codes and scales with a block worked out by hand, and holds every rounding error to half the gap between two code values.

When you have tried: compare with `LoraLayer` in methods/lora.py and `quantize_blocks` in quantize/blockwise.py.
"""

from __future__ import annotations

import torch  # noqa: F401  (yours to use)
from torch import Tensor, nn


class LoraLinear(nn.Module):
    """A frozen linear layer, and two small trained matrices whose output is added (Hu et al. 2021, section 4.1).

        y = x W + bias + s (x A^T) B^T          s = alpha / rank

    Only A and B are parameters that require grad. The layer computes exactly what the frozen one computes until the first
    update, and yet the first backward gives a gradient that is not 0: so one of A and B begins with zeros, not both.

    Args:
        weight: W (in, out), bias: (out,), both float32; never changed.
        rank: r, the width of A (r, in) and B (out, r).
        alpha: the strength of the change: twice alpha is twice the change, at any rank.

    Hint: a tensor that moves with the module but is not trained is a buffer: self.register_buffer("weight", weight).
    """

    def __init__(self, weight: Tensor, bias: Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        raise NotImplementedError("LoraLinear is yours to write: a frozen W and bias, trained A and B")

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out), without ever making a matrix of W's shape."""
        raise NotImplementedError("LoraLinear.forward is yours to write: x W + bias + s (x A^T) B^T")

    def merged_weight(self) -> Tensor:
        """(in, out), detached: the one matrix that computes the same as W, A and B together; W keeps its values."""
        raise NotImplementedError("LoraLinear.merged_weight is yours to write: W + s (B A)^T")


def quantize(values: Tensor, book: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Rounds values to codes, with a scale for each block (Dettmers et al. 2023, section 2).

        values, block 4     0.5  -2.0   1.0   0.2 |  0.03  0.01
        scales                    2.0             |     0.03          the largest magnitude of the block
        value / scale       0.25 -1.0   0.5   0.1 |   1.0  0.33
        codes               the index of the nearest entry of the book, for each of them

    Args:
        values: (N,) float32; the last block may be shorter.
        book: (K,) float32, sorted, from -1 to 1; K at most 256.
        block: number of values that share a scale.

    Returns:
        codes (N,) uint8, scales (ceil(N / block),) float32. A block of zeros has the scale 0, and no code of it may depend
        on a division by 0.

    Hint: pad with zeros to whole blocks, and view them as (blocks, block). (a[:, None] - book).abs().argmin(-1) is the
    nearest entry of each.
    """
    raise NotImplementedError("quantize is yours to write: the largest magnitude of each block, then the nearest code")


def dequantize(codes: Tensor, scales: Tensor, book: Tensor, block: int) -> Tensor:
    """(N,) float32: the values that the codes mean, book[code] times the scale of the code's block."""
    raise NotImplementedError("dequantize is yours to write: book[code] times the scale of its block")
