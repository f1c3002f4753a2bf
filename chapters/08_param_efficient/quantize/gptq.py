"""GPTQ (Frantar et al. 2022): rounds a weight column by column, and lets later columns make up for each rounding error.

Rounding to nearest minimises the error of each weight. What counts is the error of the output, for the inputs x that occur:

    E |(W - W') x|^2  =  1/2 * sum over rows r of  (w_r - w'_r) H (w_r - w'_r)^T,      H = 2 E[x x^T]       (section 2)

With column i rounded, the best change of the columns that are still free follows from H alone (Optimal Brain Surgeon):

    error  =  (W[:, i] - W'[:, i]) / U[i, i]
    W[:, i+1:]  -=  error  U[i, i+1:]                   H^-1 = U^T U, U upper triangular                    (section 3.3)

The rows of U are what elimination of the columns 0, 1, ... leaves of H^-1, so one Cholesky factor serves all columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantize.blockwise import BLOCK, BlockWeight
from quantize.code_books import BOOKS, nearest

_TINY = 1e-38


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """U (in, in) float64, upper triangular, with U^T U = (H + damping * mean of H's diagonal * I)^-1 (section 3.3, step 3).

    Features that never occurred have an empty row in H; damping makes H invertible all the same.
    """
    hessian = hessian.double()
    level = hessian.diagonal().mean().clamp(min=1e-12)
    damped = hessian + damping * level * torch.eye(len(hessian), dtype=torch.float64, device=hessian.device)
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)


def gptq(weight: Tensor, hessian: Tensor, kind: str = "int4", block: int = BLOCK, double: bool = False,
         damping: float = 0.01) -> BlockWeight:  # fmt: skip
    """Quantises a weight to the same codes and scales as `BlockWeight.of`, with less error in the output.

    Args:
        weight: (out, in).
        hessian: (in, in), from `InputStatistics.hessian`.
        kind: the code book, int4 or nf4.
        block: columns that share a scale in each row; it must divide `in`.
        double: quantise the scales, too, after the columns are rounded.
        damping: share of the mean of H's diagonal that is added to the diagonal.

    Raises:
        ValueError: `block` does not divide `in`.
    """
    num_out, num_in = weight.shape
    if num_in % block:
        raise ValueError(f"blocks of {block} do not divide {num_in} inputs")
    book = BOOKS[kind]().to(weight.device)
    factor = inverse_factor(hessian, damping).float()
    free = weight.detach().float().clone()  # its columns from i on are still to be rounded
    codes = torch.empty(num_out, num_in, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(num_out, num_in // block, device=weight.device)
    for i in range(num_in):
        if i % block == 0:
            scales[:, i // block] = free[:, i : i + block].abs().amax(1)  # with the corrections so far
        scale = scales[:, i // block]
        codes[:, i] = nearest(free[:, i] * (1 / scale.clamp(min=_TINY)), book)
        error = (free[:, i] - book[codes[:, i].long()] * scale) / factor[i, i]
        free[:, i + 1 :] -= error[:, None] * factor[i, i + 1 :]
    return BlockWeight(codes.view(-1), scales.view(-1), (num_out, num_in), kind, block, double)


def output_error(weight: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    """E |(W - W') x|^2 / E |W x|^2 for weights (out, in) and the inputs that made the Hessian (in, in)."""

    def energy(matrix: Tensor) -> Tensor:
        matrix = matrix.double()
        return ((matrix @ hessian.double()) * matrix).sum()

    return float(energy(weight - rounded) / energy(weight))
