"""Stages 0, 1 and 2 of ZeRO: every rank computes with whole parameters; the stage decides what is sharded.

    stage 0   all-reduce in backward, block by block, with the last micro-batch      update: everything on every rank
    stage 1   reduce-scatter after the last backward of the step                     update of my shard | all-gather
    stage 2   reduce-scatter in backward, block by block, with each micro-batch      update of my shard | all-gather
"""

from __future__ import annotations

import torch

from zero.sharded import Sharded
from zero.units import Unit


class Zero012(Sharded):
    """Stages 0, 1 and 2; see the top of this file."""

    def _after_backward(self, unit: Unit) -> None:
        if self.stage == 2 or (self.stage == 0 and self.synchronizing):
            self._reduce(unit)

    def _backward_is_done(self) -> None:
        if self.stage == 2:
            self._reduce_the_last()

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the updated masters to the model, on all ranks."""
        self._end_update()
        for unit in self.units:
            if self.host is not None:
                self.host.back(unit.master, unit.own)
            elif unit.master is not unit.own:
                unit.own.copy_(unit.master)
        gathers = [self.comm.all_gather(unit.full, unit.own) for unit in self.units] if self.stage in (1, 2) else []
        for gather in gathers:
            gather()
