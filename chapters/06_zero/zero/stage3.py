"""Stage 3 of ZeRO: a rank owns a p-th of every unit and holds the rest only while its block computes.

    forward    gather h.0 | compute h.0, gather h.1 meanwhile | free h.0, compute h.1, gather h.2 | ...
    backward   gather h.n | backward of h.n, gather h.n-1     | reduce-scatter and free h.n | ...

Two blocks are whole at a time. Parameters outside the blocks (embeddings, the last norm) stay whole from the start of
forward to the end of backward: both passes use the tied embedding first and last. Evaluation frees them after forward.
The model keeps its parameters: views of a storage that is emptied and filled again, while their shapes do not change.
Recomputation (--activation-checkpointing) runs inside a block's backward, while the block is whole.

Sent in a step: two gathers and one reduce-scatter, 3Ψ instead of 2Ψ (Rajbhandari et al. 2020, section 7.2.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from durable.calls import name_next
from zero.comm import Result
from zero.sharded import Sharded
from zero.units import Unit


class Zero3(Sharded):
    """Shards the parameters as well; see the top of this file."""

    def __init__(self, model: nn.Module, ranks: Any, settings: Any) -> None:
        super().__init__(model, ranks, settings)
        self.params_on_host = self.host is not None and "params" in settings.offload
        self._coming: dict[Unit, Result] = {}
        blocks = [unit for unit in self.units if unit.module is not None]
        self._next = dict(zip(blocks, blocks[1:], strict=False))
        self._previous = dict(zip(blocks[1:], blocks, strict=False))
        for unit in self.units:
            self._shard(unit)
            if unit.module is not None:
                unit.module.register_forward_pre_hook(lambda *_, unit=unit: self._gather(unit, self._next))
                unit.module.register_forward_hook(lambda *_, unit=unit: self._free(unit))
                unit.module.register_full_backward_pre_hook(lambda *_, unit=unit: self._gather(unit, self._previous))
        model.register_forward_pre_hook(lambda *_: self._gather(self.units[0], {}))
        model.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else self._free(self.units[0]))

    def _shard(self, unit: Unit) -> None:
        """Keeps only this rank's shard and empties the whole storage."""
        own = self.host.copy_of(unit.own) if self.params_on_host else unit.own.clone()
        if unit.master is unit.own or (self.params_on_host and own.dtype == torch.float32):
            unit.master = own  # in fp32 the shard is the master, if both are on the same device
        unit.own = own
        unit.cut_pieces()
        unit.full.untyped_storage().resize_(0)

    def _gather(self, unit: Unit, after: dict[Unit, Unit]) -> None:
        """Waits until a unit is whole, and starts to gather the unit that is used after it."""
        self._start(unit)
        if unit in self._coming:
            self._coming.pop(unit)()
        if unit in after:
            self._start(after[unit])
        self.ledger.note_gathered()

    @torch.no_grad()
    def _start(self, unit: Unit) -> None:
        """Starts to gather a unit, unless it is whole or its gather is under way."""
        storage = unit.full.untyped_storage()
        if storage.nbytes() > 0:
            return
        storage.resize_(unit.full.numel() * unit.full.element_size())
        own = unit.own
        if self.params_on_host:
            own = torch.empty_like(own, device=self.device)
            self.host.back(unit.own, own)
        name_next(unit.name)
        self._coming[unit] = self.comm.all_gather(unit.full, own)

    def _free(self, unit: Unit) -> None:
        unit.full.untyped_storage().resize_(0)

    def _after_backward(self, unit: Unit) -> None:
        self._reduce(unit)
        self._free(unit)

    def _backward_is_done(self) -> None:
        self._reduce_the_last()
        self._free(self.units[0])

    @torch.no_grad()
    def publish(self) -> None:
        """Updates the shards from the masters. Sends nothing: the next forward gathers."""
        self._end_update()
        for unit in self.units:
            if unit.master is unit.own:
                continue
            if self.host is not None and not self.params_on_host:
                self.host.back(unit.master, unit.own)
            else:
                unit.own.copy_(unit.master)
