"""Cuts runs of a flattened tensor into rectangular boxes, the parts that torch's distributed checkpoints know.

    shape (4, 6), start 3, 12 elements:   . . . a a a      three boxes: (1, 3) at (0, 3), (1, 6) at (1, 0), (1, 3) at (2, 0)
                                          b b b b b b
                                          c c c . . .
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor that is one run of its flattened elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """Its first element in the flattened tensor."""

    @property
    def numel(self) -> int:
        return prod(self.sizes)


def boxes(shape: Sequence[int], start: int, numel: int) -> list[Box]:
    """The run of `numel` elements from `start` on of a flattened tensor, as boxes in order; at most 2n - 1 in n dimensions.

    In two dimensions: the rest of the first row, the whole rows, the beginning of the last row.
    """
    if numel == 0:
        return []
    if len(shape) <= 1:
        return [Box((start,), (numel,), start) if shape else Box((), (), 0)]
    row = prod(shape[1:])
    first, last = -(-start // row), (start + numel) // row    # the whole rows are [first, last)

    def inside(index: int, begin: int, end: int) -> list[Box]:
        parts = boxes(shape[1:], begin - index * row, end - begin)
        return [Box((index, *part.offsets), (1, *part.sizes), part.start + index * row) for part in parts]

    if first > last:    # the run is inside one row
        return inside(last, start, start + numel)
    found = inside(first - 1, start, first * row) if start < first * row else []
    if first < last:
        found.append(Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]), first * row))
    return found + (inside(last, last * row, start + numel) if last * row < start + numel else [])
