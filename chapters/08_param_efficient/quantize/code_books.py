"""Code books: the values that a code can mean, in [-1, 1] and sorted. A code is the index of the nearest value.

    int4     i / 7 for i = -7 .. 7: equal steps
    nf4      16 quantiles of a normal distribution: equal probabilities (QLoRA, section 3 and appendix E)
    dynamic  256 values of a small floating-point format, for the scales of scales

Weights of a trained network are close to normal. int4 spends most codes on large weights, which are rare. NF4 places its
values so that the codes are used more evenly.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def int4_book() -> Tensor:
    """(15,) float32: equal steps. A 16th value would make the positive side and the negative side differ."""
    return torch.arange(-7, 8, dtype=torch.float32, device="cpu") / 7


@cache
def nf4_book() -> Tensor:
    """(16,) float32: quantiles of N(0, 1), divided by the largest (QLoRA, equation 4 and appendix E).

    Zero must be exact, so the two halves are made separately: 8 values up to the negative end, 9 up to the positive end.
    Both contain zero, which counts once. The outermost quantile would be infinite; it is moved inwards to the mean of
    1 - 1/32 and 1 - 1/30, half a step of either half. The authors rounded that to 0.9677083, and computed the probabilities
    in float32; the published values come out bit for bit only with both.
    """
    end = 0.9677083
    positive = torch.special.ndtri(torch.linspace(end, 0.5, 9, device="cpu").double())[:-1]
    negative = -torch.special.ndtri(torch.linspace(end, 0.5, 8, device="cpu").double())[:-1]
    values = torch.cat([negative, torch.zeros(1, device="cpu"), positive]).float().sort().values
    return values / values.max()


@cache
def dynamic_book() -> Tensor:
    """(256,) float32: a sign, an exponent in unary, and the remaining bits as a fraction (Dettmers 2016, section 2).

    With e leading zeros, e = 0 .. 6, there are 2**(6 - e) fractions between 0.1 and 1, each the middle of its interval,
    times 10**-e. So values near 1 are close to each other, and values near 0 keep their relative precision. 0 and 1 complete
    the book: 2 * (64 + 32 + ... + 1) + 2 = 256 values.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        borders = torch.linspace(0.1, 1, 2 ** (6 - exponent) + 1, device="cpu")
        middles = (borders[:-1] + borders[1:]) / 2
        scaled = (10 ** (-exponent) * middles).tolist()
        values += scaled + [-value for value in scaled]
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu")


BOOKS = {"int4": int4_book, "nf4": nf4_book}


def nearest(values: Tensor, book: Tensor) -> Tensor:
    """The code of each value, uint8 of the same shape: the index of the nearest entry, the lower one in the middle.

    Args:
        values: float32 of any shape; below -1 and above 1 the outermost codes are the nearest.
        book: (K,) float32, sorted, K at most 256.
    """
    borders = (book[:-1] + book[1:]) / 2
    return torch.bucketize(values, borders, out_int32=True).to(torch.uint8)
