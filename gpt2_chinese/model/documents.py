"""Where documents begin in rows of ids: positions that count from there, and a mask that keeps attention inside them.

    ids          a  b  E | B  c  d  E | B  e        B and E: the marks before and after every document
    positions    0  1  2   0  1  2  3   0  1
    mask         a b E B c  ...                     a position attends to earlier positions of its own document
                 x . . . .
                 x x . . .
                 x x x . .
                 . . . x .
                 . . . x x

The marks in the ids are all that these functions read. So each rank and each stage of a pipeline computes the same from the
same inputs, and nothing is sent. A window that begins inside a document counts its positions from the window's begin.
"""

from __future__ import annotations

import torch
from torch import Tensor

Marks = tuple[int, int]  # ids of the marks before and after a document


def document_starts(input_ids: Tensor, marks: Marks) -> Tensor:
    """(B, T) int64 -> (B, T) bool: the position begins a document, or the row.

    A document begins after an end mark. Where one token is both marks, it begins between two of them.
    """
    begin, end = marks
    starts = torch.zeros_like(input_ids, dtype=torch.bool)
    starts[:, 1:] = input_ids[:, :-1] == end
    if begin == end:
        starts &= input_ids == begin
    starts[:, :1] = True
    return starts


def document_positions(input_ids: Tensor, marks: Marks | None) -> Tensor:
    """Positions for the embedding: (T,) int64 where documents do not count, else (B, T) int64, from 0 in each document."""
    columns = torch.arange(input_ids.shape[1], device=input_ids.device)
    if marks is None:
        return columns
    first = torch.where(document_starts(input_ids, marks), columns, 0).cummax(dim=1).values
    return columns - first


def document_mask(input_ids: Tensor, marks: Marks | None) -> Tensor | None:
    """(B, 1, T, T) bool, True where a position attends; None where attention is causal and no more."""
    if marks is None:
        return None
    number = document_starts(input_ids, marks).cumsum(dim=1)  # (B, T)
    same = number[:, None, :, None] == number[:, None, None, :]
    return same.tril()
