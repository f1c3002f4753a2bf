"""4-bit weights in blocks: int4 and NF4, with double quantisation (QLoRA, Dettmers et al. 2023, sections 2 and 3).

    a block of 64 weights             0.31   -0.80    0.02  ...
    scale: the largest magnitude      0.80                          32 bits a block: 0.5 bits a weight
    weight / scale, in [-1, 1]        0.39   -1.00    0.03  ...
    code: the nearest of 16 values    12      0       7     ...     4 bits each, two codes in a byte

One large weight spoils the resolution of its block only, not of the whole matrix. Double quantisation stores the scales
themselves as 8-bit codes, in blocks of 256 around their mean:

    bits a weight    4 + 32/64 = 4.5          4 + 8/64 + 32/(64 * 256) = 4.127
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantize.code_books import BOOKS, dynamic_book, nearest

BLOCK = 64  # weights that share a scale, unless the caller gives another number
SCALES_IN_BLOCK = 256
_TINY = 1e-38  # instead of the scale 0 of a block of zeros: 1 / scale stays finite


def quantize_blocks(values: Tensor, book: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of values in blocks; the last block may be shorter.

    Args:
        values: float32 of any shape, taken row by row.
        book: (K,) float32, sorted, from -1 to 1.
        block: values that share a scale.

    Returns:
        codes (numel,) uint8, scales (ceil(numel / block),) float32.
    """
    flat = values.reshape(-1)
    padded = nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    scales = padded.abs().amax(1)
    codes = nearest(padded * (1 / scales.clamp(min=_TINY))[:, None], book)
    return codes.view(-1)[: len(flat)], scales


def dequantize_blocks(codes: Tensor, scales: Tensor, book: Tensor, block: int) -> Tensor:
    """(numel,) float32: the values that codes of `quantize_blocks` mean, the book's entry times the block's scale."""
    values = book.to(codes.device)[codes.long()]
    return values * scales.repeat_interleave(block)[: len(values)]


def pack(codes: Tensor) -> Tensor:
    """Two 4-bit codes in a byte, the first in the high half: (N,) uint8 -> (ceil(N / 2),) uint8."""
    even = nn.functional.pad(codes, (0, len(codes) % 2))
    return even[::2] << 4 | even[1::2]


def unpack(packed: Tensor, numel: int) -> Tensor:
    """The inverse of `pack`: (ceil(N / 2),) uint8 -> (N,) uint8."""
    return torch.stack([packed >> 4, packed & 15], 1).view(-1)[:numel]


def bits_with_scales(block: int = BLOCK, double: bool = False) -> float:
    """Bits of a 4-bit weight and its share of the scales, in whole blocks: the sums at the top of this file."""
    return 4 + (8 / block + 32 / (block * SCALES_IN_BLOCK) if double else 32 / block)


class BlockWeight(nn.Module):
    """A weight matrix in 4-bit codes. Blocks run along the inputs of an output, so the matrix is stored (out, in).

    Attributes:
        kind: int4 or nf4, which names the code book.
        codes: (ceil(out * in / 2),) uint8, two codes in a byte.
        scales: (B,) float32 scale of each block; absent with double quantisation, which has instead
        scale_codes: (B,) uint8,
        scale_scales: (ceil(B / 256),) float32,
        scale_mean: () float32.
    """

    def __init__(self, codes: Tensor, scales: Tensor, shape: tuple[int, int], kind: str, block: int, double: bool) -> None:
        super().__init__()
        self.shape, self.kind, self.block, self.double = shape, kind, block, double
        self.register_buffer("codes", pack(codes))
        if not double:
            self.register_buffer("scales", scales)
            return
        mean = scales.mean()  # scales are positive: around their mean both signs of the book are used
        scale_codes, scale_scales = quantize_blocks(scales - mean, dynamic_book().to(scales.device), SCALES_IN_BLOCK)
        self.register_buffer("scale_codes", scale_codes)
        self.register_buffer("scale_scales", scale_scales)
        self.register_buffer("scale_mean", mean)

    @classmethod
    def of(cls, weight: Tensor, kind: str, block: int = BLOCK, double: bool = False) -> BlockWeight:
        """Rounds a weight (out, in) to the nearest codes."""
        codes, scales = quantize_blocks(weight.detach().float(), BOOKS[kind]().to(weight.device), block)
        return cls(codes, scales, tuple(weight.shape), kind, block, double)

    def block_scales(self) -> Tensor:
        """(B,) float32, as dequantisation uses them."""
        if not self.double:
            return self.scales
        return dequantize_blocks(self.scale_codes, self.scale_scales, dynamic_book(), SCALES_IN_BLOCK) + self.scale_mean

    def dequantize(self) -> Tensor:
        """(out, in) float32."""
        codes = unpack(self.codes, self.shape[0] * self.shape[1])
        return dequantize_blocks(codes, self.block_scales(), BOOKS[self.kind](), self.block).view(self.shape)

    def matmul(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out), computed with dequantised weights in x's dtype."""
        return nn.functional.linear(x, self.dequantize().to(x.dtype))
