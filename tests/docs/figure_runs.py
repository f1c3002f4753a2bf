"""What chapters really do, recorded for the figures that move inside the lessons: ZeRO's moments on real ranks."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2_chinese.distributed.ranks import Ranks
from pstar.comm.two_levels import Lane, TwoLevels
from pstar.memory.tier import Ledger
from tests.chapters.technique import technique

SIZE = 12  # parameters of each unit: 2, 3 and 4 ranks divide it


class Layers(nn.Module):
    """A tied embedding and some layers, SIZE parameters each; calls `note` in the forward of each."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(blocks))
        self.note: Any = lambda phase, unit=None: None

    def forward(self, inputs: Tensor) -> Tensor:
        self.note("forward", 0)
        x = self.embed(inputs)
        for layer in self.layers:
            x = x + layer(x)
        return F.linear(x, self.embed.weight).square().mean()


class ZeroRecord:
    """Notes what a rank holds at the moments of a step; `sharded` is the chapter's class once it is made."""

    def __init__(self) -> None:
        self.sharded: Any = None
        self.moments: list[dict[str, Any]] = []
        self.gathering: set[int] = set()  # addresses of the tensors whose all-gather is under way
        self.reducing: list[int] = []     # bytes of the whole gradients whose reduction is under way

    def note(self, phase: str, unit: int | None = None) -> None:
        """Adds the states and bytes of now. A later moment shows a reduction that starts between two blocks' backward."""
        if phase == "backward" and self.moments[-1]["phase"] == "reduce":
            self.moments.pop()
        alive = self.sharded.ledger.alive()
        self.moments.append({
            "phase": phase, "unit": unit, "parameters": [self.parameters_of(one) for one in self.sharded.units],
            "gradients": [self.gradients_of(one) for one in self.sharded.units],
            "bytes": {"parameters": alive["parameters"], "gradients": alive.get("gradients", 0) + sum(self.reducing),
                      "optimizer": alive["masters"] + alive["moments"]}})  # fmt: skip

    def parameters_of(self, unit: Any) -> str:
        if not unit.full.untyped_storage().nbytes():
            return "shard"
        return "coming" if unit.full.data_ptr() in self.gathering else "whole"

    def gradients_of(self, unit: Any) -> str:
        found = ["whole" for p in unit.parameters.values() if p.grad is not None]
        found += ["under way" for one, _ in self.sharded._under_way if one is unit]
        found += ["mean"] if unit.grad is not None else []
        found += [str(p.master.grad.dtype).replace("torch.float", "fp") for p in unit.pieces if p.master.grad is not None]
        assert len(set(found)) <= 1, found
        return found[0] if found else "none"

    def gather(self, real: Any) -> Any:
        """Comm.all_gather; the first wait of publish is the moment when all gathers are under way."""
        def all_gather(comm: Any, full: Tensor, own: Tensor) -> Any:
            result = real(comm, full, own)
            self.gathering.add(full.data_ptr())

            def wait() -> Tensor:
                if self.moments[-1]["phase"] == "update":
                    self.note("gather")
                self.gathering.discard(full.data_ptr())
                return result()
            return wait
        return all_gather

    def reduction(self, real: Any) -> Any:
        """Comm.reduce_scatter_mean or all_reduce_mean."""
        def reduce(comm: Any, flat: Tensor) -> Any:
            result = real(comm, flat)
            self.reducing.append(flat.nbytes)
            return lambda: (self.reducing.pop(0), result())[1]
        return reduce

    def after(self, real: Any) -> Any:
        """Sharded._reduce, with a note when it has started one reduction and ended the one before."""
        def reduce(sharded: Any, unit: Any) -> None:
            real(sharded, unit)
            self.note("reduce", sharded.units.index(unit))
        return reduce

    def before(self, real: Any, phase: str, unit: int | None = None) -> Any:
        """A method with a note at its beginning."""
        def method(sharded: Any) -> Any:
            self.note(phase, unit)
            return real(sharded)
        return method


def zero_moments(rank: int, num_ranks: int, stage: int, blocks: int) -> dict[str, Any]:
    """The moments of the second step in bf16 on this rank, and (first, number) of the elements that it owns of each unit."""
    zero, comm, sharded_py = (technique("06_zero", f"zero{name}") for name in ("", ".comm", ".sharded"))
    torch.manual_seed(0)
    model, record, real = Layers(blocks), ZeroRecord(), sharded_py.Sharded
    for number, layer in enumerate(model.layers, 1):  # before the chapter's own hooks
        layer.register_full_backward_hook(lambda *_, number=number: model.note("backward", number))
    settings = SimpleNamespace(zero_stage=stage, offload="none", precision="bf16", loss_scale=None, backend="own",
                               activation_checkpointing=False)  # fmt: skip
    sharded, scaler = zero.shard(model, Ranks(rank, num_ranks, rank, torch.device("cpu"), dist.group.WORLD), settings)
    for number, layer in enumerate(model.layers, 1):  # after the chapter's hook, which gathers
        layer.register_forward_pre_hook(lambda *_, number=number: model.note("forward", number))
    kind = type(sharded)
    record.sharded, sharded.optimizer = sharded, torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    sharded.optimizer.register_step_pre_hook(lambda *_: model.note("update"))
    patches = [mock.patch.object(comm.Comm, name, wrap(getattr(comm.Comm, name))) for name, wrap in (
        ("all_gather", record.gather), ("reduce_scatter_mean", record.reduction), ("all_reduce_mean", record.reduction))]
    patches += [mock.patch.object(real, "_reduce", record.after(real._reduce)),
                mock.patch.object(real, "_agree_on_used", record.before(real._agree_on_used, "mean")),
                mock.patch.object(kind, "_backward_is_done",
                                  record.before(kind._backward_is_done, "backward", 0))]  # fmt: skip

    def step() -> None:
        scaler.scale(sharded(torch.arange(4))).backward()
        sharded.wait()
        scaler.step(sharded.optimizer)
        scaler.update()

    step()  # makes the optimizer's states
    model.note = record.note
    for patch in patches:
        patch.start()
    try:
        record.note("start")
        step()
        record.note("end")
    finally:
        mock.patch.stopall()
    return {"moments": record.moments, "owned": [(unit.first, unit.master.numel()) for unit in sharded.units]}


# ---- the parameter server


class Arrival:
    """A receive under way on the server: done when the clock has reached the tick at which the worker pushes."""

    def __init__(self, world: ServerWorld, worker: int, receive: Any) -> None:
        self.world, self.worker, self.receive = world, worker, receive

    def done(self) -> bool:
        return self.world.pushed[self.worker][0] <= self.world.now

    def result(self) -> Tensor:
        return self.receive(self.worker)


class ServerWorld:
    """Chapter 01's server and workers in one process, on a clock. Messages take no time. Stands in for torch.distributed,
    for the threads of the server, and for `wait`, which moves the clock on."""

    def __init__(self, durations: list[int], bound: int | None) -> None:
        self.durations, self.bound, self.now = durations, bound, 0
        self.pushed: dict[int, tuple[int, Tensor]] = {}  # worker: (tick, message)
        self.answers: dict[int, Tensor] = {}
        self.began = dict.fromkeys(range(len(durations)), 0)
        self.pushing = 0  # the rank that calls send

    def get_backend(self, _: Any) -> str:
        return "gloo"

    def isend(self, message: Tensor, group: Any, group_dst: int) -> Any:
        self.answers[group_dst] = message.clone()
        return SimpleNamespace(wait=lambda: None)

    def send(self, message: Tensor, group: Any, group_dst: int) -> None:
        self.pushed[self.pushing] = (self.now + self.durations[self.pushing], message)

    def recv(self, message: Tensor, group: Any, group_src: int) -> None:
        message.copy_(self.pushed[group_src][1] if group_src else self.answers.pop(self.pushing))

    def wait(self, arrivals: list[Arrival]) -> None:
        self.now = max([self.now, *(self.pushed[one.worker][0] for one in arrivals)])

    def start_worker(self, worker: Any, num_steps: int) -> None:
        """The next step that a worker takes part in, up to its push."""
        self.began[worker.rank], self.pushing = self.now, worker.rank
        for step in range(1, num_steps + 2):
            if list(worker.work(step, [None])):
                worker.push(step, torch.zeros(()))
                return

    def run(self, num_steps: int) -> list[dict[str, Any]]:
        """What courseServer.server_run answers."""
        module, found = technique("01_parameter_server", "server"), []
        threads = SimpleNamespace(submit=lambda receive, worker: Arrival(self, worker, receive))
        with (mock.patch.object(module, "dist", self), mock.patch.object(module, "wait", self.wait),
              mock.patch.object(module, "ThreadPoolExecutor", lambda *_: threads)):  # fmt: skip
            server, *workers = [self.rank(module, rank) for rank in range(len(self.durations))]
            for worker in workers:
                self.start_worker(worker, num_steps)
            for step in range(1, num_steps + 1):
                began, self.began[0] = dict(self.began), self.now
                began[0] = self.now
                list(server.work(step, [None]))
                versions = [server.version, *(worker.version for worker in workers)]
                self.now += self.durations[0]
                server.push(step, torch.zeros(()))
                used = [0, *server._workers.to_answer]
                found.append({"step": step, "at": self.now, "gradients": [
                    {"rank": rank, "version": versions[rank], "staleness": staleness, "began": began[rank],
                     "arrived": began[rank] + self.durations[rank]}
                    for rank, staleness in zip(used, server.staleness, strict=True)]})  # fmt: skip
                server.pull()
                for worker in workers:
                    if worker.rank in used:
                        self.pushing = worker.rank
                        worker.pull()
                        self.start_worker(worker, num_steps)
                found[-1]["works_on"] = [server.version, *server._workers.works_on.values()]
                assert found[-1]["works_on"][1:] == [worker.version for worker in workers]
        return found

    def rank(self, module: Any, rank: int) -> Any:
        self.pushing = rank
        return module.ParameterServer(nn.Linear(1, 1), rank, len(self.durations), None, self.bound)


class Handed:
    """A stage of a collective of GatherWorld: done when every member has given its pieces."""

    def __init__(self, given: dict[int, Any], members: list[int]) -> None:
        self._given, self._members = given, members

    @property
    def done(self) -> bool:
        return len(self._given) == len(self._members)

    @property
    def rows(self) -> list[Tensor]:
        return [self._given[member][0] for member in self._members]


class GatherWorld:
    """An all-gather of pstar's TwoLevels on n nodes of m ranks in one process. Stands in for rails and shared memories,
    which hand tensors over. The number in rank r's piece, chunk r, is r.

    Attributes:
        passed: (chunk, source, target) of all copies between nodes, and of those inside nodes.
        held: the chunks of each rank at the start, after the copies between nodes, and at the end.
    """

    def __init__(self, n: int, m: int) -> None:
        self.nodes = [list(range(node * m, node * m + m)) for node in range(n)]
        self.passed: tuple[list[list[int]], list[list[int]]] = ([], [])
        self.held: list[list[list[int]]] = [[[rank] for rank in range(n * m)], [[]] * (n * m), [[]] * (n * m)]
        self._rails: dict[int, dict[int, Any]] = defaultdict(dict)
        self._memories: dict[int, dict[int, Any]] = defaultdict(dict)

    def run(self) -> GatherWorld:
        """Begins the collective on every rank, and advances it on all until it is done."""
        exchanges, flats = [], []
        for rank in sum(self.nodes, []):
            flats.append(torch.where(torch.arange(sum(map(len, self.nodes))) == rank, float(rank), -1.0))
            node = next(ranks for ranks in self.nodes if rank in ranks)
            members = [ranks[node.index(rank)] for ranks in self.nodes]
            rail = SimpleNamespace(subject=-1, all_gather=partial(self._cross, members, rank))
            memory = SimpleNamespace(subject=-1, progress=lambda: None, all_gather_rows=partial(self._share, node, rank))
            lane = Lane(memory, rail)
            exchanges.append(TwoLevels(self.nodes, rank, lane, lane, Ledger()).all_gather(flats[-1]))
        while not all(exchange.done for exchange in exchanges):
            for exchange in exchanges:
                exchange.lane.progress()
        self.held[2] = [_chunks_in(flat) for flat in flats]
        return self

    def _cross(self, members: list[int], rank: int, piece: Tensor) -> Handed:
        given = self._rails[members[0]]
        given[rank] = [piece.clone()]
        self.passed[0].extend([int(piece), rank, other] for other in members if other != rank)
        return Handed(given, members)

    def _share(self, members: list[int], rank: int, flats: list[list[Tensor]]) -> Handed:
        given = self._memories[members[0]]
        given[rank] = flats
        self.held[1][rank] = sorted(_chunks_in(torch.stack([piece for pieces in flats for piece in pieces])))
        for pieces in flats:
            self.passed[1].extend([int(pieces[members.index(rank)]), rank, other] for other in members if other != rank)
        if len(given) == len(members):    # the last member has come
            for row, place, source in product(range(len(flats)), range(len(members)), members):
                given[members[place]][row][members.index(source)].copy_(given[source][row][members.index(source)])
        return Handed(given, members)


def _chunks_in(flat: Tensor) -> list[int]:
    return [int(chunk) for chunk in flat.view(-1) if chunk >= 0]
