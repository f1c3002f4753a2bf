"""Collectives on groups of chunks. In the engine only this file, rail.py, node_groups.py and checkpoint/ import
torch.distributed."""

import os
import platform
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from durable.calls import name_next
from pstar.comm import shared_memory
from pstar.comm.member_group import new_member_group
from pstar.comm.node_groups import NodeGroups
from pstar.comm.rail import Rail, all_gather_flat, reduce_scatter_flat
from pstar.comm.replicas import Replicas
from pstar.comm.shared_memory import SharedMemory
from pstar.comm.two_levels import Lane, TwoLevels
from pstar.errors import ConfigError, StateError
from pstar.layout.nodes import ranks_by_node
from pstar.memory.tier import SUM, Ledger


class Waitable(Protocol):
    """What a backend returns for a collective that was begun."""

    def wait(self) -> object: ...


class Handle:
    """A collective that overlaps with computation. Its tensors must not be used before `wait` has returned.

    Args:
        begun: the backend's handle; None: nothing to wait for.
        ledger: counts the seconds of wait.
    """

    def __init__(self, begun: Waitable | None = None, ledger: Ledger | None = None):
        self._begun, self._ledger = begun, ledger

    def wait(self) -> None:
        """Returns when the result is there (on a GPU: when the current stream is ordered after it)."""
        if self._begun is not None:
            begin = time.perf_counter()
            self._begun.wait()
            self._ledger.waited_s += time.perf_counter() - begin
            self._begun = None


def check_initialized(group: "dist.ProcessGroup | None") -> None:
    """Raises ConfigError if a launcher has started several processes without a process group: each would train alone."""
    started = os.environ.get("WORLD_SIZE", "")
    if is_alone(group) and started.isdigit() and int(started) > 1:
        raise ConfigError(f"a launcher has started {started} processes (WORLD_SIZE), but torch.distributed is not "
                          "initialized: call torch.distributed.init_process_group() before initialize_engine, or unset "
                          "WORLD_SIZE to train with one process")


def launchers_local_rank() -> int:
    """LOCAL_RANK, which launchers set to this process's number on its machine, or 0; ConfigError for another value."""
    value = os.environ.get("LOCAL_RANK", "0")
    if not (value.isascii() and value.isdecimal()):
        raise ConfigError(f"the environment has LOCAL_RANK={value!r}, which a launcher sets to a whole number: unset it, or "
                          "give local_rank")
    return int(value)


def is_alone(group: "dist.ProcessGroup | None") -> bool:
    return group is None and not (dist.is_available() and dist.is_initialized())


class Collectives:
    """Gathers and reduces the pieces of a group of chunks over the ranks of a process group.

    Gathers and reductions return a Handle. They are carried out in the order of the calls, which must be the same on all
    ranks.

    Args:
        group: a torch.distributed process group; None: the default group if one is initialised, otherwise one process, for
            which every collective is a no-op.
        ledger: counts received bytes.
        through_memory: exchange chunks through shared memory if all ranks are on one host and their backend is gloo, and in
            two levels (two_levels.py) if they are on several hosts with equal numbers of ranks; otherwise, and with False,
            through the process group. NCCL knows hosts by itself.
        node: name of this rank's host; None: as the system says.
        replicate: the ranks of a host share the pieces of each unit, and every host has all of them (ownership node).

    Attributes:
        num_nodes: the hosts, if chunks are exchanged in two levels or by host; otherwise 1.
        piece, num_pieces: the number of this rank's piece of each unit, and how many pieces a unit has: rank and num_ranks,
            but with `replicate` this rank's place among those of its host, and how many these are.
        replica: the number of this rank's host with `replicate`; otherwise 0.

    Raises ConfigError with `replicate` if hosts have unequal numbers of ranks, or one rank each.
    """

    def __init__(self, group: "dist.ProcessGroup | None", ledger: Ledger, through_memory: bool = True,
                 node: str | None = None, replicate: bool = False):
        self.alone = is_alone(group)
        # The default group is looked up at each call: a reference here would keep its threads alive after
        # destroy_process_group, and a process that ends with gloo threads running aborts.
        self.group = None if group is None or group is dist.group.WORLD else group
        self.ledger = ledger
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.num_ranks = 1 if self.alone else dist.get_world_size(group)
        # Checkpoints and Python objects are sent from host memory, which NCCL cannot do.
        self.host_group = self.group
        if not self.alone and dist.get_backend(self.group) != "gloo":
            # Other ranks make no engine in this group, and so no such call: the members alone must suffice.
            self.host_group = (dist.new_group(timeout=self._host_timeout(), backend="gloo") if self.group is None
                               else new_member_group(dist.get_process_group_ranks(self.group), self._host_timeout()))
        self.piece, self.num_pieces, self.replica, self.num_nodes = self.rank, self.num_ranks, 0, 1
        self._memory: SharedMemory | TwoLevels | None = None
        self._by_node: Replicas | NodeGroups | None = None
        if self.num_ranks > 1 and (through_memory or replicate):
            names = self.from_all(node or platform.node())
            nodes = ranks_by_node(names)
            if replicate:
                self._check_replicas(names)
            replicate = replicate and len(nodes) > 1
            self._memory = self._share_memory(nodes, replicate) if through_memory and nodes else None
            if isinstance(self._memory, TwoLevels):
                self.num_nodes = len(nodes)
            if replicate:
                self._replicate(nodes)

    def check_still_alone(self) -> None:
        """Raises StateError if the process group of several ranks is newer than the engine: each rank would train alone."""
        if self.alone and not is_alone(None) and dist.get_world_size() > 1:
            raise StateError(f"torch.distributed has been initialized with {dist.get_world_size()} processes since the "
                             "engine started: call init_process_group before initialize_engine, and give it a group of "
                             "this process only to train with one process")

    @property
    def through_memory(self) -> bool:
        """Whether chunks are exchanged through shared memory, at least inside each host."""
        return self._memory is not None

    @property
    def where(self) -> str:
        """" on 2 nodes, in two levels" or " on 2 nodes, each with all chunks", or "" if hosts make no difference."""
        how = "in two levels" if self._by_node is None else "each with all chunks"
        return f" on {self.num_nodes} nodes, {how}" if self.num_nodes > 1 else ""

    def _check_replicas(self, names: list[str]) -> None:
        counts = {name: names.count(name) for name in sorted(set(names))}
        if len(counts) > 1 and (len(set(counts.values())) > 1 or 1 in counts.values()):
            each = ", ".join(f"{count} on {name}" for name, count in counts.items())
            raise ConfigError(f"ownership is node, and the processes are {each}: give each node equally many, at least 2, "
                              "or choose whole or sharded")

    def _replicate(self, nodes: list[list[int]]) -> None:
        """Exchanges each unit between the ranks of a host, and only gradients' sums between hosts."""
        self.num_nodes = len(nodes)
        self.replica, ranks = next((number, ranks) for number, ranks in enumerate(nodes) if self.rank in ranks)
        self.piece, self.num_pieces = ranks.index(self.rank), len(ranks)
        everyone = dist.get_process_group_ranks(self.group)
        inside = [everyone[rank] for rank in ranks]
        self._pieces_group = new_member_group(inside, self._host_timeout())
        if isinstance(self._memory, Replicas):
            self._by_node = self._memory
        else:
            between, backend = [everyone[ranks[self.piece]] for ranks in nodes], dist.get_backend(self.group)
            self._by_node = NodeGroups(inside, between, self.num_ranks, backend, self._timeout(), self.ledger)

    def _share_memory(self, nodes: list[list[int]], replicate: bool) -> SharedMemory | TwoLevels | None:
        """The staging area, on several hosts with the rails between them; None if not possible. The same on all ranks."""
        if not self._all_ranks(shared_memory.available() and dist.get_backend(self.group) == "gloo"):
            return None
        ranks = next(ranks for ranks in nodes if self.rank in ranks)
        made = []
        if self.rank == ranks[0]:
            made = [shared_memory.make_file(len(ranks)) for _ in range(1 if len(nodes) == 1 else 2)]
        paths = self.from_all(made)[ranks[0]]
        # Each container of a host may have another /dev/shm: then not all ranks see the files.
        seen = self._all_ranks(all(path is not None and os.path.exists(path) for path in paths))
        everyone, place = dist.get_process_group_ranks(self.group), ranks.index(self.rank)
        members = [everyone[rank] for rank in ranks]
        memories = [SharedMemory(path, place, members, self._timeout()) for path in paths] if seen else []
        dist.barrier(self.group)
        for path in filter(None, made):
            os.unlink(path)
        if len(memories) < 2:
            return memories[0] if memories else None
        rail = [everyone[ranks[place]] for ranks in nodes]
        lanes = [Lane(memory, Rail(rail, nodes.index(ranks), self._timeout())) for memory in memories]
        return (Replicas if replicate else TwoLevels)(nodes, self.rank, *lanes, self.ledger)

    def _timeout(self) -> timedelta:
        """Of the process group; a group made without a timeout would get torch's default."""
        group = self.group or dist.group.WORLD
        backend = group._get_backend(group._device_types[0])    # a group of NCCL has none for the CPU
        return getattr(getattr(backend, "options", None), "_timeout", default_pg_timeout)    # some have no such option

    def _host_timeout(self) -> timedelta:
        """The same for a group on the host; a rank that writes a checkpoint may take longer than NCCL's default."""
        return self._timeout() if dist.get_backend(self.group) == "gloo" else max(self._timeout(), default_pg_timeout)

    def from_all(self, value: object) -> list:
        """Returns the values of all ranks, by rank, on every rank; any object that can be pickled."""
        values: list = [value] * self.num_ranks
        if self.num_ranks > 1:
            dist.all_gather_object(values, value, group=self.host_group)
        return values

    def from_rank_0(self, value: object) -> object:
        """Rank 0's value, on every rank."""
        return self.from_all(value if self.rank == 0 else None)[0]

    def copy_from_rank_0(self, tensors: Iterable[torch.Tensor]) -> None:
        """Gives tensors, equal in form on all ranks, the values of rank 0, through host memory."""
        tensors = [tensor.detach() for tensor in tensors if tensor.numel()]
        if self.num_ranks == 1 or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1).cpu().view(torch.uint8) for tensor in tensors])
        dist.broadcast(flat, group=self.host_group, group_src=0)
        for tensor, values in zip(tensors, flat.split([tensor.nbytes for tensor in tensors]), strict=True):
            tensor.copy_(values.clone().view(tensor.dtype).view(tensor.shape))    # a clone is aligned

    def _all_ranks(self, value: bool) -> bool:
        return all(self.from_all(value))

    def about(self, unit: int) -> None:
        """Names the unit of the next collective: through shared memory, ranks with different units raise at once."""
        if self._memory:
            self._memory.subject = unit
        elif self.num_ranks > 1:
            name_next(f"unit {unit}")

    def progress(self) -> None:
        """Advances collectives that were begun, without waiting. Those of a process group advance by themselves."""
        if self._memory:
            self._memory.progress()

    def all_gather(self, flat: torch.Tensor) -> Handle:
        """In place: flat, (num_pieces * S,), holds this rank's piece at its position, and afterwards all pieces."""
        if self.num_ranks == 1:
            return Handle()
        piece = flat.view(self.num_pieces, -1)[self.piece]
        self.ledger.add("gather", flat.nbytes - piece.nbytes)
        if levels := self._by_node or self._memory:
            return Handle(levels.all_gather(flat), self.ledger)
        return Handle(all_gather_flat(flat, piece, group=self.group, async_op=True), self.ledger)

    def reduce_scatter_mean(self, piece: torch.Tensor, flat: torch.Tensor) -> Handle:
        """piece, (S,), becomes this rank's part of the mean of flat, (num_pieces * S,), over all ranks. Changes flat.

        Divides before it adds: a sum of p gradients may overflow in 16 bits though their mean does not.
        """
        self.ledger.add("reduce", flat.nbytes - piece.nbytes)
        if levels := self._by_node or self._memory:
            return Handle(levels.reduce_scatter_mean(piece, flat), self.ledger)
        flat.div_(self.num_ranks)
        return Handle(reduce_scatter_flat(piece, flat, group=self.group, async_op=True), self.ledger)

    def broadcast(self, flat: torch.Tensor, owner: int) -> Handle:
        """In place: flat, (S,), receives the values of rank `owner` of the group."""
        if self.num_ranks == 1:
            return Handle()
        self.ledger.add("gather", 0 if self.rank == owner else flat.nbytes)
        if self._memory:
            return Handle(self._memory.broadcast(flat, owner), self.ledger)
        return Handle(dist.broadcast(flat, group=self.group, group_src=owner, async_op=True), self.ledger)

    def reduce_mean(self, flat: torch.Tensor, owner: int) -> Handle:
        """In place: flat, (S,), becomes the mean over the ranks on rank `owner`; on other ranks it is overwritten."""
        self.ledger.add("reduce", flat.nbytes * (self.num_ranks - 1) if self.rank == owner else 0)
        if self._memory:
            return Handle(self._memory.reduce_mean(flat, owner), self.ledger)
        flat.div_(self.num_ranks)
        return Handle(dist.reduce(flat, group=self.group, group_dst=owner, async_op=True), self.ledger)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of values over the ranks, on every rank; waits for it."""
        if self.num_ranks == 1:
            return values
        self.ledger.add(SUM, values.nbytes)
        begin = time.perf_counter()
        if self._memory:
            values = self._memory.sum(values)
        else:
            dist.all_reduce(values, group=self.group)
        self.ledger.waited_s += time.perf_counter() - begin
        return values

    def gather_on_host(self, values: torch.Tensor) -> torch.Tensor | None:
        """Rank 0 receives the values, (N,), of all ranks, (p * N,) in host memory; the others receive None."""
        return self._gather_on_host(values, self.rank, self.num_ranks, self.host_group)

    def gather_pieces(self, piece: torch.Tensor) -> torch.Tensor | None:
        """Rank 0 receives all pieces of a unit, (num_pieces * S,) in host memory; the others receive None."""
        if self._by_node is None:
            return self.gather_on_host(piece)
        if self.replica:
            return None
        return self._gather_on_host(piece, self.piece, self.num_pieces, self._pieces_group)

    @staticmethod
    def _gather_on_host(values: torch.Tensor, rank: int, num_ranks: int,
                        group: "dist.ProcessGroup | None") -> torch.Tensor | None:
        if num_ranks == 1:
            return values
        flat = torch.empty(num_ranks, values.numel(), dtype=values.dtype, device="cpu") if rank == 0 else None
        parts = list(flat.unbind(0)) if flat is not None else None
        dist.gather(values, parts, group=group, group_dst=0)
        return flat.view(-1) if flat is not None else None
