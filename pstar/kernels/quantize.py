"""The 256 values of an 8-bit moment: dynamic tree quantisation (Dettmers et al. 2022, 8-bit Optimizers).

A block of QUANT_BLOCK elements is divided by its largest magnitude. The codes then represent values in [-1, 1] (first
moment) or (0, 1] (second): seven decades, with more digits for larger values. Unlike in the paper, the second moment has no
code for zero: a small moment in a block with a large one would become zero, and its update be divided by eps alone. A block
of zeros has scale 0.
"""

from functools import cache

import torch

NUM_DECADES = 7


def _magnitudes(steps_in_the_last_decade: int) -> list[float]:
    """Midpoints of equal steps in each decade below 1; each lower decade has half as many steps."""
    values = []
    for decade in range(NUM_DECADES):
        steps = steps_in_the_last_decade >> (NUM_DECADES - 1 - decade)
        top = 10.0 ** (decade - NUM_DECADES + 1)
        values += [top * (0.1 + 0.9 * (step + 0.5) / steps) for step in range(steps)]
    return values


@cache
def code_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values, boundaries) of the first moment, then of the second: fp32, ascending, (256,), on `device`.

    The code of a number is the number of boundaries below it; the last boundary is infinity.
    """
    halves = _magnitudes(64)
    signed = [-value for value in reversed(halves)] + [0.0, *halves, 1.0]
    unsigned = [10.0**-NUM_DECADES, *_magnitudes(128), 1.0]
    tables = []
    for values in (signed, unsigned):
        exact = torch.tensor(values, dtype=torch.float64, device="cpu")
        boundaries = torch.cat([(exact[1:] + exact[:-1]) / 2, exact.new_full((1,), torch.inf)])
        tables += [exact.float().to(device), boundaries.float().to(device)]
    return tuple(tables)


@cache
def least_codes() -> tuple[torch.Tensor, torch.Tensor]:
    """For each upper half of an fp32 number the least code of all numbers with it: uint8, (65536,), for both moments.

    Most numbers have that code, the others the next one: so the CPU finds a code without a search. A NaN gets 0.
    """
    upper = torch.arange(65536, dtype=torch.int64, device="cpu")
    magnitude, negative = upper & 0x7FFF, upper >= 0x8000
    # The least number of a cell: its lower bound if positive; if negative, just above the next larger magnitude.
    bits = torch.where(negative, magnitude + 1, magnitude).to(torch.int32) << 16
    least = bits.view(torch.float32)
    tables = []
    for boundaries in code_tables(torch.device("cpu"))[1::2]:
        codes = torch.where(negative, torch.bucketize(-least, boundaries, right=True), torch.bucketize(least, boundaries))
        tables.append(torch.where((magnitude >= 0x7F80) & (upper != 0x7F80), 0, codes).to(torch.uint8))
    return tuple(tables)


def decode(codes: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """fp32 moments (N,) from uint8 codes (N,) and one scale for each `block` elements."""
    return values[codes.to(torch.int64)] * scales.repeat_interleave(block)[: codes.numel()]


def encode(moments: torch.Tensor, boundaries: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, block: int,
           keep_scales: bool = False) -> None:
    """Writes codes (N,) and scales of fp32 moments (N,), rounded to the nearest value. The scale gets a NaN or infinity.

    keep_scales: only codes are written. Moments that `decode` gave with these scales then get codes of the same values.
    """
    if not keep_scales:
        padded = torch.nn.functional.pad(moments, (0, -moments.numel() % block)).view(-1, block)
        scales.copy_(padded.abs().amax(dim=1))
    each = scales.repeat_interleave(block)[: moments.numel()]
    relative = torch.where(each > 0, moments / each, 0.0).nan_to_num(nan=-1.0, posinf=torch.inf, neginf=-torch.inf)
    codes.copy_(torch.bucketize(relative, boundaries))
