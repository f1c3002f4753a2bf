"""Where a rank's parameter lies in the whole one: what checkpoints, resuming and the global norm need to know.

    c_attn.weight (C, 3C), three blocks q k v side by side, cut over two ranks: this rank's columns are three boxes

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
    """Boxes of a whole tensor, put one after the other along one dimension.

    Attributes:
        shape: of the whole tensor.
        dim: along which it is cut.
        spans: (start, length) along `dim` of each box.
        transposed: the parameter is (out, in), the whole tensor (in, out).
        shared: other ranks that share the layer hold the same: the whole tensor, not a part.
    """

    shape: tuple[int, ...]
    dim: int
    spans: Sequence[tuple[int, int]]
    transposed: bool = False
    shared: bool = False

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Place:
        """Of what is not cut."""
        return cls(tuple(shape), 0, [(0, shape[0])], shared=True)

    @classmethod
    def cut(cls, shape: Sequence[int], dim: int, rank: int, num_ranks: int, num_blocks: int = 1) -> Place:
        """The part of one rank when each of `num_blocks` equal blocks along `dim` is cut in `num_ranks`."""
        block = shape[dim] // num_blocks
        each = block // num_ranks
        return cls(tuple(shape), dim, [(number * block + rank * each, each) for number in range(num_blocks)])

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, as the parameter is laid out."""
        part = torch.cat([whole.narrow(self.dim, *span) for span in self.spans], self.dim)
        return part.t() if self.transposed else part

    def part(self, own: Tensor) -> Part:
        """The same for a checkpoint: this rank's values at their places in the whole tensor."""
        own = own.detach().t() if self.transposed else own.detach()
        boxes = {}
        for (start, _), values in zip(self.spans, own.split([n for _, n in self.spans], self.dim), strict=True):
            boxes[tuple(start if dim == self.dim else 0 for dim in range(len(self.shape)))] = values
        return Part(self.shape, boxes)


def place_of(parameter: Tensor) -> Place:
    """The note on a parameter, the whole of it where there is none."""
    return getattr(parameter, "place", None) or Place.whole(parameter.shape)
