"""Arranges the ranks as a mesh of data x pipeline x tensor, and makes the process groups along each dimension.

    8 ranks, --tp 2 --pp 2:       pipeline 0          pipeline 1
                              data 0    data 1    data 0    data 1
                  tensor 0      0         4         2         6
                  tensor 1      1         5         3         7

Tensor ranks are neighbours: they communicate in every layer, over the fastest links (Narayanan et al. 2021, section 3).
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch.distributed as dist

from gpt2_chinese.distributed.ranks import Ranks


class Mesh:
    """Process groups of the run's ranks; a group of one rank is None. All ranks construct it together.

    Args:
        ranks: all ranks of the run.
        tp, pp: ranks along tensor and pipeline; their product divides the number of ranks.

    Attributes:
        tensor, pipeline, replica, ends: groups of torch.distributed: the ranks that share this rank's layers; one rank of
            each stage; all ranks of one model replica; first and last rank of the pipeline (None on ranks between).
        data: the ranks with the same part of the model, as Ranks: they split the batch and average gradients.
        dp_rank, tp_rank, pp_rank: this rank's coordinates in the mesh.
    """

    def __init__(self, ranks: Ranks, tp: int, pp: int) -> None:
        self.ranks, self.tp, self.pp, self.dp = ranks, tp, pp, ranks.num_ranks // (tp * pp)
        rest, self.tp_rank = divmod(ranks.rank, tp)
        self.dp_rank, self.pp_rank = divmod(rest, pp)
        self._own: list[Any] = []

        def at(d: int, p: int, t: int) -> int:
            return (d * pp + p) * tp + t

        data, pipeline, tensor = range(self.dp), range(pp), range(tp)
        self.tensor = self._group([[at(d, p, t) for t in tensor] for d, p in product(data, pipeline)])
        self.pipeline = self._group([[at(d, p, t) for p in pipeline] for d, t in product(data, tensor)])
        self.replica = self._group([[at(d, p, t) for p, t in product(pipeline, tensor)] for d in data])
        self.ends = self._group([[at(d, p, t) for p in sorted({0, pp - 1})] for d, t in product(data, tensor)])
        group = self._group([[at(d, p, t) for d in data] for p, t in product(pipeline, tensor)])
        self.data = Ranks(self.dp_rank, self.dp, ranks.local_rank, ranks.device, group)

    def _group(self, members: list[list[int]]) -> Any:
        """Makes these groups, all of one size, on all ranks in the same order; returns the one that contains this rank."""
        if self.ranks.num_ranks == 1 or len(members[0]) == 1:
            return None
        found = None
        for numbers in members:
            group = dist.new_group(numbers, self.ranks.timeout)
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                self._own.append(group)
                found = group
        return found

    def close(self) -> None:
        """Destroys the groups, before the default group: otherwise gloo's threads would abort the process at exit."""
        for group in self._own:
            dist.destroy_process_group(group)
        self._own, self.tensor, self.pipeline, self.replica, self.ends = [], None, None, None, None
        self.data.group = None
