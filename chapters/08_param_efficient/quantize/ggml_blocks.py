"""ggml's block formats Q8_0 and Q4_0: 32 weights and their scale side by side in the file.

    Q8_0   scale float16 | 32 codes int8                                34 bytes: 8.5 bits a weight
    Q4_0   scale float16 | 16 bytes, codes 0-15 low, 16-31 high half    18 bytes: 4.5 bits a weight

Q8_0: scale = largest magnitude / 127, weight = scale * code. Q4_0: scale = (the weight of the largest magnitude, with its
sign) / -8, weight = scale * (code - 8), so that -8, which has no positive counterpart, always falls on that weight.

The codes come from the scale in float32; what is stored, and multiplied when it is read, is the scale in float16 (ggml,
quantize_row_q8_0_ref and quantize_row_q4_0_ref in ggml-quants.c).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
ROW_BYTES = {"F32": 4 * BLOCK, "F16": 2 * BLOCK, "Q8_0": 34, "Q4_0": 18}  # of 32 weights
TYPE_NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8}  # enum ggml_type


def encode(weight: Tensor, kind: str) -> Tensor:
    """(rows, columns) float32 -> (rows, bytes of a row) uint8, as in the file; Q8_0, Q4_0: 32 divides columns."""
    weight = weight.detach().float().cpu()
    if kind in ("F32", "F16"):
        return weight.to(torch.float32 if kind == "F32" else torch.float16).contiguous().view(torch.uint8)
    blocks = weight.reshape(-1, BLOCK)
    scale, codes = _q8_0(blocks) if kind == "Q8_0" else _q4_0(blocks)
    stored = torch.cat([scale.half().view(torch.uint8), codes], 1)
    return stored.view(len(weight), -1)


def decode(stored: Tensor, kind: str) -> Tensor:
    """(rows, bytes of a row) uint8 -> (rows, columns) float32."""
    if kind in ("F32", "F16"):
        return stored.view(torch.float32 if kind == "F32" else torch.float16).float()
    blocks = stored.reshape(-1, ROW_BYTES[kind])
    scale, codes = blocks[:, :2].contiguous().view(torch.float16).float(), blocks[:, 2:]
    if kind == "Q8_0":
        values = codes.contiguous().view(torch.int8).float()
    else:
        values = torch.cat([codes & 15, codes >> 4], 1).float() - 8
    return (scale * values).view(len(stored), -1)


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale, 0 for a block of zeros."""
    return torch.where(scale == 0, 0.0, 1 / scale)


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales (N, 1) float32 and bytes (N, 32) of blocks (N, 32)."""
    scale = blocks.abs().amax(1, keepdim=True) / 127
    scaled = blocks * _inverse(scale)
    whole = scaled.abs().floor()
    rounded = (whole + (scaled.abs() - whole >= 0.5)) * scaled.sign()  # C's roundf: halves away from zero
    return scale, rounded.to(torch.int8).view(torch.uint8)


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales (N, 1) float32 and bytes (N, 16) of blocks (N, 32)."""
    scale = blocks.gather(1, blocks.abs().argmax(1, keepdim=True)) / -8
    codes = (blocks * _inverse(scale) + 8.5).clamp(0, 15.5).to(torch.uint8)  # the conversion cuts the fraction off
    return scale, codes[:, : BLOCK // 2] | codes[:, BLOCK // 2 :] << 4
