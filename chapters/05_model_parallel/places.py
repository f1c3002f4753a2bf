"""The position of a rank's slice in the whole parameter; checkpoints, resuming and the global norm need it.

    c_attn.weight (C, 3C) has three blocks q k v of columns. Cut over two ranks, each rank's columns are three boxes:

        | q0 q1 | k0 k1 | v0 v1 |     rank 0 has [q0 k0 v0], rank 1 has [q1 k1 v1]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2_chinese.checkpoint.sharded import Part


@dataclass
class Place:
    """Boxes of a whole tensor that a rank's parameter concatenates along one dimension.

    Attributes:
        shape: of the whole tensor.
        dim: the dimension along which it is cut.
        spans: (start, length) along `dim` of each box.
        transposed: the parameter is (out, in), the whole tensor (in, out).
        shared: every rank of the tensor group holds the whole tensor, not a part.
    """

    shape: tuple[int, ...]
    dim: int
    spans: Sequence[tuple[int, int]]
    transposed: bool = False
    shared: bool = False

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Place:
        """The place of a parameter that is not cut."""
        return cls(tuple(shape), 0, [(0, shape[0])], shared=True)

    @classmethod
    def cut(cls, shape: Sequence[int], dim: int, rank: int, num_ranks: int, num_blocks: int = 1) -> Place:
        """The place of one rank's part if each of `num_blocks` equal blocks along `dim` is cut into `num_ranks` slices."""
        block = shape[dim] // num_blocks
        each = block // num_ranks
        return cls(tuple(shape), dim, [(number * block + rank * each, each) for number in range(num_blocks)])

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, in the parameter's layout."""
        part = torch.cat([whole.narrow(self.dim, *span) for span in self.spans], self.dim)
        return part.t() if self.transposed else part

    def part(self, own: Tensor) -> Part:
        """For a checkpoint: this rank's values, with their offsets in the whole tensor."""
        own = own.detach().t() if self.transposed else own.detach()
        boxes = {}
        for (start, _), values in zip(self.spans, own.split([n for _, n in self.spans], self.dim), strict=True):
            boxes[tuple(start if dim == self.dim else 0 for dim in range(len(self.shape)))] = values
        return Part(self.shape, boxes)


def place_of(parameter: Tensor) -> Place:
    """The parameter's `place` attribute; without one, the place of a whole parameter."""
    return getattr(parameter, "place", None) or Place.whole(parameter.shape)
