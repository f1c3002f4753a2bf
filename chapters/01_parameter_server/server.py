"""A single parameter server: rank 0 owns the weights and the optimizer, workers pull weights and push gradients.

    worker 1   pull | forward, backward | push | wait ...        Li et al. 2014 (parameter server)
    worker 2   pull | forward, backward | push | wait ...
    rank 0          | forward, backward | mean | step | send weights

Rank 0 is server AND worker, so that the global batch divides by all ranks and the other chapters' curve is this one's.
A message (messages.py) is one flat float32 tensor, sent point to point over gloo.

Synchronous: the server waits for all workers. Asynchronous (Dean et al. 2012, with the bound of Ho et al. 2013): the server
uses the gradients that have arrived, steps, and answers the workers that sent them; the others work on. A worker that the
server has overtaken goes on with the batch of the newest step. The staleness of a gradient is how many steps the server
has taken since the weights that it was made with. The server waits for a gradient that would exceed the bound; with bound
0 that is the synchronous algorithm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
import torch.distributed as dist
from messages import Messages
from torch import Tensor, nn

MIB = 1 << 20


def parameter_server(model: nn.Module, ranks: Any, settings: Any) -> ParameterServer | DataParallel:
    """What the settings ask for: this file's server, or nn.DataParallel.

    Args:
        model: on its device, the same architecture on all ranks.
        ranks: with rank, num_ranks and group.
        settings: backend, mode, staleness, slow_worker_s, num_devices, resume_step.
    """
    if settings.backend == "torch":
        return DataParallel(model, settings.num_devices)
    bound = settings.staleness if settings.mode == "async" else None
    idle_s = settings.slow_worker_s if ranks.rank == 1 else 0.0
    return ParameterServer(model, ranks.rank, ranks.num_ranks, ranks.group, bound, settings.resume_step, idle_s)


def must_wait(step: int, works_on: int, bound: int | None) -> bool:
    """Whether the server may not take `step` without a worker that computes with the weights of step `works_on`.

    The staleness of its gradient is step - 1 - works_on now, and one more in the next step. Bound None: it always waits.
    """
    return bound is None or step - 1 - works_on >= bound


def mean_of(vectors: list[Tensor]) -> Tensor:
    """Their mean; each is divided before the sum, which might overflow."""
    total = vectors[0] / len(vectors)
    for vector in vectors[1:]:
        total += vector / len(vectors)
    return total


class Workers:
    """What the server knows of its workers, by rank.

    Attributes:
        arriving: the message of each worker that computes: it will push it.
        works_on: the version of the weights that each worker has.
        to_answer: the workers that have pushed, and wait for weights.
    """

    def __init__(self, num_ranks: int, version: int, receive: Callable[[int], Tensor]) -> None:
        self.arriving: dict[int, Future[Tensor]] = {}
        self.works_on = dict.fromkeys(range(1, num_ranks), version)
        self.to_answer = list(self.works_on)
        self._receive = receive
        # One thread for each worker: gloo can wait for a message, but cannot tell whether one has arrived.
        self._threads = ThreadPoolExecutor(max(1, num_ranks - 1), "push")

    def listen(self) -> None:
        """Begins to wait for a message of every worker that has got its answer."""
        for worker in self.works_on:
            if worker not in self.arriving:
                self.arriving[worker] = self._threads.submit(self._receive, worker)

    def take(self, must_arrive: Callable[[int], bool]) -> list[Tensor]:
        """Waits for the workers that must, and returns all messages that have arrived, in order of rank."""
        wait([future for worker, future in self.arriving.items() if must_arrive(worker)])
        self.to_answer = sorted(worker for worker, future in self.arriving.items() if future.done())
        return [self.arriving.pop(worker).result() for worker in self.to_answer]


class ParameterServer:
    """One rank's side of it; the same calls on all ranks.

    Args:
        model: as above; after construction all ranks hold rank 0's weights.
        rank, num_ranks: rank 0 is the server.
        group: of torch.distributed; None when alone.
        bound: most staleness of the asynchronous mode, None for the synchronous one.
        version: how many steps have made the weights.
        idle_s: seconds that this rank idles in each step, a straggler on purpose.

    Attributes:
        version: of the weights that this rank holds: the server's step that made them.
        loss: on the server, the mean loss of the gradients of the last step, nats per token.
        staleness: on the server, of each of those gradients, in server steps.
    """

    def __init__(
        self, model: nn.Module, rank: int, num_ranks: int, group: Any = None, bound: int | None = None, version: int = 0,
        idle_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.model, self.rank, self.num_ranks, self.bound = model, rank, num_ranks, bound
        # Messages are in host memory. The default group is not stored: its threads would outlive it and abort.
        self.group = None if group is None or group is dist.group.WORLD else group
        if num_ranks > 1 and dist.get_backend(self.group) != "gloo":
            self.group = dist.new_group(backend="gloo")
        self.messages, self.version, self.idle_s = Messages(model), version, idle_s
        self.loss, self.staleness = float("nan"), [0]
        self.sent_bytes = self.received_bytes = 0
        self._workers = Workers(num_ranks, version, self._receive) if self.is_server else None
        self._took_part = not self.is_server
        self.pull()

    @property
    def is_server(self) -> bool:
        """True on the rank that owns the weights and the optimizer."""
        return self.rank == 0

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The model's forward."""
        return self.model(*inputs)

    def work(self, step: int, micro_batches: Iterable[Any]) -> Iterator[Any]:
        """The micro-batches of a step, or none for a worker that the server has overtaken."""
        self._took_part = step > self.version
        if self.is_server:
            self._workers.listen()
        if self._took_part:
            time.sleep(self.idle_s)
        return iter(micro_batches) if self._took_part else iter(())

    # ---- up: gradients --------------------------------------------------------------------------------------------------

    def push(self, step: int, loss: Tensor, meet: bool = False) -> None:
        """Workers send their gradients; on the server every .grad becomes the mean of those it has.

        Args:
            step: the step at hand.
            loss: of this rank's part of the batch, a scalar.
            meet: the server waits for all workers, whatever the mode: before an evaluation, and at the end.
        """
        if not self._took_part:
            return
        own = self.messages.pack_gradients(loss, self.version)
        if self.is_server:
            self._average(step, own, meet)
        else:
            dist.send(own, group=self.group, group_dst=0)
            self.sent_bytes += own.nbytes

    def _average(self, step: int, own: Tensor, meet: bool) -> None:
        """Waits for the gradients that it must not miss, in the synchronous mode for all, and averages what has arrived."""
        works_on = self._workers.works_on
        others = self._workers.take(lambda worker: meet or must_wait(step, works_on[worker], self.bound))
        self.received_bytes += sum(message.nbytes for message in others)
        self.staleness = [0, *(step - 1 - int(message[-1]) for message in others)]
        self.loss = self.messages.unpack_gradients(mean_of([own, *others]))
        self.version = step

    # ---- down: weights --------------------------------------------------------------------------------------------------

    def pull(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Workers that have pushed wait for the weights of the server's newest step, and for its loss scale."""
        if self.num_ranks == 1 or not self._took_part and not self.is_server:
            return
        if self.is_server:
            scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0
            message = self.messages.pack_weights(self.version, scale)
            # All sends begin at once, so that a slow receiver does not delay the next worker.
            workers = self._workers.to_answer
            sending = [dist.isend(message, group=self.group, group_dst=worker) for worker in workers]
            for worker, send in zip(workers, sending, strict=True):
                send.wait()
                self.sent_bytes += message.nbytes
                self._workers.works_on[worker] = self.version
            return
        message = self._receive(0)
        self.received_bytes += message.nbytes
        self.version, scale = self.messages.unpack_weights(message)
        if scaler is not None and scaler.is_enabled():
            scaler.load_state_dict({**scaler.state_dict(), "scale": scale})

    def _receive(self, sender: int) -> Tensor:
        message = torch.empty(self.messages.up_elems if self.is_server else self.messages.down_elems)
        dist.recv(message, group=self.group, group_src=sender)
        return message

    # ---- what it costs --------------------------------------------------------------------------------------------------

    def formula_bytes(self) -> int:
        """What passes through rank 0 in a synchronous step: each other rank's gradients come in, its weights go out."""
        return 4 * (self.num_ranks - 1) * (self.messages.up_elems + self.messages.down_elems)

    def step_scalars(self) -> dict[str, float]:
        """For metrics.jsonl: bytes through rank 0 since the last call, and the staleness of the gradients used."""
        through, self.sent_bytes, self.received_bytes = self.sent_bytes + self.received_bytes, 0, 0
        if self.num_ranks == 1:
            return {}
        self.through_bytes = through
        return {
            "server_bytes": through,
            "formula_bytes": self.formula_bytes(),
            "num_gradients": len(self.staleness),
            "batch_share": len(self.staleness) / self.num_ranks,
            "staleness_mean": sum(self.staleness) / len(self.staleness),
            "staleness_max": max(self.staleness),
        }

    def table(self) -> list[tuple[str, Any]]:
        """For the summary: the bottleneck."""
        if self.num_ranks == 1:
            return [("communication", "none: one process")]
        others, formula = self.num_ranks - 1, self.formula_bytes()
        weights, ring = 4 * self.messages.num_weights, 2 * others / self.num_ranks * 4 * self.messages.num_gradients
        return [
            ("through rank 0", f"{self.through_bytes / MIB:.2f} MiB in the last step"),
            ("by the formula", f"2 (p - 1) x {weights / MIB:.2f} MiB = {formula / MIB:.2f} MiB a step"),
            ("a ring's rank", f"sends {ring / MIB:.2f} MiB and receives as much, however many ranks (chapter 02)"),
        ]


class DataParallel:
    """The same by nn.DataParallel: one process, GPU 0 holds the weights, and a forward copies them to the other GPUs."""

    is_server, staleness = True, [0]

    def __init__(self, model: nn.Module, num_replicas: int) -> None:
        self.model = nn.DataParallel(model, device_ids=list(range(num_replicas)))
        self.num_replicas, self.loss = num_replicas, float("nan")

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The mean of the replicas' losses; the rows of a micro-batch are cut evenly among them."""
        return self.model(*inputs).mean()

    def work(self, step: int, micro_batches: Iterable[Any]) -> Iterator[Any]:
        """All micro-batches."""
        return iter(micro_batches)

    def push(self, step: int, loss: Tensor, meet: bool = False) -> None:
        """Nothing to do: backward has added the replicas' gradients up on GPU 0."""
        self.loss = float(loss)

    def pull(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Nothing to do: the next forward copies the weights."""

    def step_scalars(self) -> dict[str, float]:
        """Nothing that can be counted from here."""
        return {}

    def table(self) -> list[tuple[str, Any]]:
        """For the summary."""
        return [("communication", f"inside nn.DataParallel, on {self.num_replicas} GPUs")]
