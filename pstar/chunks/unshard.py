"""Unsharding: copies a unit's bytes to near, by a gather from all ranks or, with one process, from a slower tier.

With one process a unit's near buffer is its ("param", u) block. With p ranks each rank keeps its piece in ("param", g). The
near buffer is then ("gathered", u), which is dropped when it is evicted. The ranks must agree about evictions, so all have
the same blocks in near: blocks are created on all ranks at the same moments.

Of parameters in codes the ranks gather the codes, and each decodes all of them: the collective moves no more than the link.
"""

from dataclasses import dataclass

import torch

from pstar.chunks.parameters import Parameters
from pstar.chunks.unit import Bytes, UnitRecord
from pstar.comm.collective_log import CollectiveLog
from pstar.comm.collectives import Collectives, Handle
from pstar.kernels import BlockCodes
from pstar.layout.layout import Unit
from pstar.memory.block import Block, Key
from pstar.memory.block_store import BlockStore
from pstar.memory.tier import NEAR
from pstar.memory.under_way import Pending


@dataclass(slots=True, eq=False)
class Decoding:
    """A gather of codes into the last bytes of a unit's near buffer, which are then decoded there."""

    gather: Handle
    codes: BlockCodes
    buffer: torch.Tensor

    def wait(self) -> None:
        self.gather.wait()
        self.codes.decode_tail(self.buffer)


@dataclass(slots=True, eq=False)
class Gather:
    """A gather that was begun before the unit is needed; its buffer is pinned until the gather is finished."""

    unit: UnitRecord
    handle: Handle | Decoding
    pin: Block
    gathers: list[Pending]
    """All gathers under way, this one among them."""

    def finish(self) -> None:
        self.gathers.remove(self)
        self.unit.gather = None
        self.handle.wait()
        self.unit.move(Bytes.GATHERED)
        self.pin.unpin()


def copy_near(store: BlockStore, target: torch.Tensor, key: Key) -> None:
    """Copies a block's fastest copy into a buffer in near, of the same bytes, for later work of the current stream. On a GPU
    this stream waits for the copy, and this thread does not."""
    with store.pinned(key):
        tier, source = store.peek(key)
    if tier == NEAR or not store.links.on_device:
        store.copy(target, source, tier, NEAR)
        return
    way, num_bytes = f"{tier} to {NEAR}", source.nbytes
    store.ledger.add(way, num_bytes)
    handle = store.links.submit(tier, NEAR, lambda: store.links.copy(target, source), num_bytes,
                                record=store.recorder(way, "piece", num_bytes))
    store.blocks[key].pending.append(handle)
    store.wait([handle], NEAR)


class Unsharding:
    """Unshards units into near.

    Args:
        parameters: are bound to the near buffers.
        store, collectives: copy the bytes between tiers, and between ranks.
        log: the log of this rank's collective calls.
    """

    def __init__(self, parameters: Parameters, store: BlockStore, collectives: Collectives, log: CollectiveLog):
        self.parameters, self.units = parameters, parameters.units
        self.store, self.collectives, self.log = store, collectives, log

    def unshard(self, unit: UnitRecord) -> torch.Tensor:
        """Returns the unit's near buffer with the pieces of all ranks, (elems,). Copies or gathers it if it is not in near,
        and binds the unit's parameters to it."""
        if self.units.one_rank:
            data = self.store.ensure(unit.key, NEAR)
        else:
            self.collectives.progress()
            if not self.store.is_near(unit.key):
                self._gather(unit).wait()
            elif unit.gather is not None:
                unit.gather.finish()
            data = self.store.peek(unit.key)[1]
        if unit.bytes is not Bytes.BOUND:
            self.parameters.bind(unit, data)
        return data

    def unshard_async(self, unit: UnitRecord) -> None:
        """Begins to gather a unit that is not in near; its buffer is pinned until the gather is finished."""
        handle, gathers = self._gather(unit), self.store.under_way.gathers
        unit.move(Bytes.GATHERING)
        unit.gather = Gather(unit, handle, self.store.pin(unit.key), gathers)
        gathers.append(unit.gather)

    def _gather(self, unit: UnitRecord) -> Handle | Decoding:
        spec, key = unit.spec, ("param", unit.spec.group)
        self.log.gather(spec.index)
        data = self.store.create(unit.key, spec.elems, self.parameters.dtype, NEAR, derived=True)
        codes = self.store.blocks[key].codes
        with self.store.pinned(unit.key):    # this rank's piece may need room on its way
            if codes is None:
                return self._collect(spec, data, key)
            return Decoding(self._collect(spec, codes.tail(data), key), codes, data)

    def _collect(self, spec: Unit, data: torch.Tensor, key: Key) -> Handle:
        """Begins to fill data, a unit's elements or their codes, from all ranks; key: of the block of this rank's piece."""
        collectives = self.collectives
        if spec.owner is None:
            copy_near(self.store, data.view(collectives.num_pieces, -1)[collectives.piece], key)
            return collectives.all_gather(data)
        if spec.owner == collectives.rank:
            copy_near(self.store, data, key)
        return collectives.broadcast(data, spec.owner)

    def drop_gathered(self, group: int) -> None:
        """Drops the group's gathered copies, which are out of date after an update."""
        if self.units.one_rank:
            return
        for unit in self.units.of_group[group]:
            if unit.key in self.store:
                if unit.gather is not None:
                    unit.gather.finish()
                self.store.drop(unit.key)
