"""Adam on flat arrays with torch operations, and the split fp32 master: the kernels' reference and fallback.

Kingma and Ba 2015 (Adam), Loshchilov and Hutter 2019 (AdamW). Each operation does one rounding of adam_formula.h, so the
bits are those of the compiled kernels. Two operations need care. torch's add with alpha is a fused multiply-add on GPUs, on
ARM and on x86 with AVX2, but rounds twice on other x86; there it is computed in float64. So is the square root everywhere:
torch's fp32 sqrt on x86 is a library routine that is off by one unit in the last place in a sixth of all cases.
"""

from functools import cache

import torch

from pstar.kernels.quantize import code_tables, decode, encode
from pstar.kernels.update import QUANT_BLOCK, AdamUpdate

# Elements that are updated at once: few enough that temporaries stay in the cache.
BLOCK = 64 * QUANT_BLOCK
# As in cpu_adam.cpp.
NORM_BLOCK, NORM_LANES = 8192, 256


@torch.no_grad()
def update_with_torch(update: AdamUpdate) -> None:
    """One Adam update, in place; the arguments are checked already."""
    if update.skip is not None and bool(update.skip):
        return
    numel = update.param.numel()
    step = BLOCK if update.param.device.type == "cpu" else max(1, -(-numel // QUANT_BLOCK)) * QUANT_BLOCK
    for begin in range(0, numel, step):
        _update_block(update, slice(begin, min(begin + step, numel)))


def _update_block(update: AdamUpdate, part: slice) -> None:
    param = update.param.view(-1)[part]
    low = None if update.low is None else update.low.view(-1)[part]
    grad = update.grad.view(-1)[part].to(torch.float32)
    exp_avg, exp_avg_sq = update.exp_avg.view(-1)[part], update.exp_avg_sq.view(-1)[part]
    moments = exp_avg, exp_avg_sq
    if update.scales is not None:
        tables = code_tables(param.device)
        blocks = slice(part.start // QUANT_BLOCK, -(-part.stop // QUANT_BLOCK))
        scales = [each[blocks] for each in update.scales]
        moments = (decode(exp_avg, tables[0], scales[0], QUANT_BLOCK), decode(exp_avg_sq, tables[2], scales[1], QUANT_BLOCK))
    if isinstance(update.grad_scale, torch.Tensor) or update.grad_scale != 1.0:
        grad = grad * update.grad_scale
    master = param.to(torch.float32) if low is None else join_master(param, low)    # an fp32 param is the master

    _formula(master, grad, *moments, update)

    if low is not None:
        split_master(master, param, low)
    elif update.seed is not None:
        param.copy_(round_stochastically(master, update.seed, update.first_index + part.start))
    elif param.dtype != torch.float32:
        param.copy_(master)
    if update.copy16 is not None:
        update.copy16.view(-1)[part].copy_(master)
    if update.scales is not None:
        encode(moments[0], tables[1], exp_avg, scales[0], QUANT_BLOCK)
        encode(moments[1], tables[3], exp_avg_sq, scales[1], QUANT_BLOCK)


def _formula(param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor,
             update: AdamUpdate) -> None:
    """adam_element of the header. All tensors fp32, (N,); updates param and the moments in place."""
    neg_decay, l2, lerp, from_grad, lerp_sq, sq_from_grad, inv_bias2_sqrt, eps, neg_step_size = update.scalars()
    if l2:
        grad = _fused_add(grad, param, l2, out=torch.empty_like(grad))
    _fused_add(grad if from_grad else exp_avg, grad - exp_avg, lerp, out=exp_avg)
    square = grad.square()
    _fused_add(square if sq_from_grad else exp_avg_sq, square - exp_avg_sq, lerp_sq, out=exp_avg_sq)
    del square
    root = exp_avg_sq.to(torch.float64).sqrt_().to(torch.float32)
    denominator = _fused_add(torch.full_like(root, eps), root, inv_bias2_sqrt, out=root)
    change = exp_avg.mul(neg_step_size).div_(denominator)
    param.add_(_fused_add(change, param, neg_decay, out=change))


def _fused_add(start: torch.Tensor, values: torch.Tensor, factor: float, out: torch.Tensor) -> torch.Tensor:
    """start + factor * values with one rounding, as fmaf does. fp32, (N,); the factor is rounded to fp32 first."""
    if start.device.type != "cpu" or _torch_fuses_on_cpu():
        return torch.add(start, values, alpha=factor, out=out)
    return out.copy_(_rounded_once(start, values, factor))


@cache
def _torch_fuses_on_cpu() -> bool:
    x = torch.full((100,), 1 + 2**-12, dtype=torch.float32, device="cpu")
    # x * x is 1 + 2**-11 + 2**-24, and rounded to fp32 it is 1 + 2**-11.
    return bool((torch.full_like(x, -1 - 2**-11).add_(x, alpha=1 + 2**-12) == 2**-24).all())


def _rounded_once(start: torch.Tensor, values: torch.Tensor, factor: float) -> torch.Tensor:
    """_fused_add in float64, where the product is exact.

    The sum is rounded to odd: if it is not exact, its last bit is 1. Then rounding it to fp32 gives what one rounding of the
    exact sum gives (Boldo and Melquiond 2008), which two roundings to nearest do not.
    """
    product = values.to(torch.float64) * torch.tensor(factor, dtype=torch.float32, device="cpu").to(torch.float64)
    other = start.to(torch.float64)
    total = product + other
    part = total - product
    error = (product - (total - part)) + (other - part)    # TwoSum of Knuth: total + error is the exact sum
    bits = total.view(torch.int64)
    must_change = (error != 0) & error.isfinite() & (bits & 1 == 0)
    bits += torch.where((error > 0) == (total > 0), 1, -1) * must_change
    return total.to(torch.float32)


SPLIT_ELEMS = 2**18
"""Split at once on the CPU: their intermediate values stay in the caches, where each larger tensor would get new pages."""


def split_master(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Splits fp32 into the nearest bf16 (high) and the signed difference of the bit patterns (low, int16).

    The model computes with high, the optimizer with both: 4 bytes instead of 2 + 4 with a separate master, without loss.
    `+ 0x8000` before the shift rounds to nearest, ties away from zero; the difference to the rounded number is then in
    [-32768, 32767] and fits 16 bits. Every NaN becomes the halves 0x7FC0 and 0: rounding the bits of a GPU's NaN,
    0x7FFFFFFF, would give -0.
    """
    places = master.view(torch.int32), high.view(torch.int16), low
    if master.device.type == "cpu" and all(each.is_contiguous() for each in places):
        scratch = torch.empty(min(SPLIT_ELEMS, master.numel()), dtype=torch.int32, device="cpu")
        for bits, its_high, its_low in zip(*(each.view(-1).split(SPLIT_ELEMS) for each in places), strict=True):
            kept = torch.add(bits, 0x8000, out=scratch[: bits.numel()]).bitwise_right_shift_(16)
            its_high.copy_(kept)
            its_low.copy_(torch.sub(bits, kept.bitwise_left_shift_(16), out=kept))
    else:
        kept = (places[0] + 0x8000) >> 16
        low.copy_(places[0] - (kept << 16))
        places[1].copy_(kept)
    if master.sum().isnan():
        nan = master.isnan()
        places[1].masked_fill_(nan, 0x7FC0)
        low.masked_fill_(nan, 0)


def join_master(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The fp32 master from the halves of split_master: bit for bit, but of a NaN only that it is one."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def round_stochastically(values: torch.Tensor, seed: int, first_index: int) -> torch.Tensor:
    """bf16 from fp32 (N,): rounds up with a probability equal to the cut-off part. A function of (seed, first_index + i)."""
    mask = 0xFFFFFFFF
    index = torch.arange(first_index, first_index + values.numel(), dtype=torch.int64, device=values.device)
    x = (index & mask) ^ (seed & mask)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15)) + (index >> 32) * 0x9E3779B9) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    x = x ^ (x >> 16)
    bits = values.view(torch.int32)
    rounded = (bits + (x >> 16).to(torch.int32)) >> 16
    return torch.where(values.isfinite(), rounded.to(torch.int16).view(torch.bfloat16), values.to(torch.bfloat16))


def squared_norm_with_torch(grad: torch.Tensor) -> torch.Tensor:
    """The sum of squares, float64, a scalar on grad's device, added in the order of cpu_adam.cpp and cuda_adam.cu."""
    return sum_blocks(norm_blocks_with_torch(grad))


def norm_blocks_with_torch(grad: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each block of NORM_BLOCK elements, float64, on grad's device."""
    squares = torch.nn.functional.pad(grad.reshape(-1).to(torch.float64), (0, -grad.numel() % NORM_BLOCK)).square_()
    return _sum_lanes(squares.view(-1, NORM_BLOCK)) if grad.numel() else squares


def sum_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """The sum of squares, a scalar, from the sums of a gradient's blocks, (num_blocks,) float64."""
    return _sum_lanes(blocks.view(1, -1))[0]


def _sum_lanes(values: torch.Tensor) -> torch.Tensor:
    """(rows,) from (rows, N): lane j adds elements j, j + 256, ... in order; then one half of the lanes is added to the
    other, until one lane is left."""
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % NORM_LANES if values.shape[1] else NORM_LANES))
    lanes = values.new_zeros(values.shape[0], NORM_LANES)
    for part in values.split(NORM_LANES, dim=1):
        lanes += part
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]
