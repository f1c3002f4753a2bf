"""A single parameter server: rank 0 owns the weights and the optimizer, workers pull weights and push gradients.

    worker 1   pull | forward, backward | push | wait ...        Li et al. 2014 (parameter server)
    worker 2   pull | forward, backward | push | wait ...
    rank 0          | forward, backward | mean | step | send weights

Rank 0 is server AND worker: the global batch is divided among all ranks, so the loss curve is that of the other chapters.
A message (messages.py) is one flat float32 tensor, sent point to point over gloo.

Synchronous: the server waits for all workers. Asynchronous (Dean et al. 2012, with the bound of Ho et al. 2013): the server
averages the gradients that have arrived, steps, and sends the weights to the workers that pushed; the others continue. A
worker that the server has overtaken skips the batches of the steps already taken. The staleness of a gradient is the number
of server steps since the weights it was computed with. The server waits for a worker whose gradient would exceed the
bound in the next step; with bound 0 this is the synchronous algorithm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from messages import Messages
from torch import Tensor, nn

from durable.calls import message

MIB = 1 << 20


def parameter_server(model: nn.Module, ranks: Any, settings: Any) -> ParameterServer | DataParallel:
    """Builds this file's server, or nn.DataParallel for --backend torch.

    Args:
        model: on its device, the same architecture on all ranks.
        ranks: has rank, num_ranks, group and timeout.
        settings: has backend, mode, staleness, slow_worker_s, num_devices, resume_step.
    """
    if settings.backend == "torch":
        return DataParallel(model, settings.num_devices)
    bound = settings.staleness if settings.mode == "async" else None
    idle_s = settings.slow_worker_s if ranks.rank == 1 else 0.0
    return ParameterServer(model, ranks.rank, ranks.num_ranks, ranks.group, bound, settings.resume_step, idle_s,
                           timeout=ranks.timeout)


def must_wait(step: int, works_on: int, bound: int | None) -> bool:
    """Whether the server must wait, before `step`, for a worker that computes with weights of version `works_on`.

    The worker's gradient has staleness step - 1 - works_on in this step, and one more in the next. Bound None: always wait.
    """
    return bound is None or step - 1 - works_on >= bound


def mean_of(vectors: list[Tensor]) -> Tensor:
    """The mean of the vectors; each is divided before it is added, because the sum might overflow."""
    total = vectors[0] / len(vectors)
    for vector in vectors[1:]:
        total += vector / len(vectors)
    return total


class Workers:
    """The server's record of its workers, by rank.

    Attributes:
        arriving: the receive under way for each worker that is computing gradients.
        works_on: the version of the weights that each worker has.
        to_answer: the workers that have pushed, and wait for weights.
    """

    def __init__(self, num_ranks: int, version: int, receive: Callable[[int], Tensor]) -> None:
        self.arriving: dict[int, Future[Tensor]] = {}
        self.works_on = dict.fromkeys(range(1, num_ranks), version)
        self.to_answer = list(self.works_on)
        self._receive = receive
        # One thread for each worker: gloo can wait for a message, but cannot test whether one has arrived.
        self._threads = ThreadPoolExecutor(max(1, num_ranks - 1), "push")

    def listen(self) -> None:
        """Starts a receive for every worker that has got its weights and has no receive under way."""
        for worker in self.works_on:
            if worker not in self.arriving:
                self.arriving[worker] = self._threads.submit(self._receive, worker)

    def take(self, must_arrive: Callable[[int], bool]) -> list[Tensor]:
        """Waits for each worker with must_arrive(worker); returns all messages that have arrived, in order of rank."""
        wait([future for worker, future in self.arriving.items() if must_arrive(worker)])
        self.to_answer = sorted(worker for worker, future in self.arriving.items() if future.done())
        return [self.arriving.pop(worker).result() for worker in self.to_answer]


class ParameterServer:
    """The server on rank 0, a worker on every other rank; all ranks make the same calls.

    Args:
        model: as in `parameter_server`; after construction all ranks hold rank 0's weights.
        rank, num_ranks: rank 0 is the server.
        group: of torch.distributed; None for one process.
        bound: largest staleness of the asynchronous mode, None for the synchronous mode.
        version: number of steps already taken with these weights.
        idle_s: seconds that this rank idles in each step, to act as a straggler.
        timeout: how long a message may take in the gloo group that is made if `group` is of another backend; None: torch's
            default.

    Attributes:
        version: of this rank's weights: the number of the server's step that made them.
        loss: on the server, the mean loss over the gradients of the last step, nats per token.
        staleness: on the server, the staleness of each gradient of the last step, in server steps.
    """

    def __init__(
        self, model: nn.Module, rank: int, num_ranks: int, group: Any = None, bound: int | None = None, version: int = 0,
        idle_s: float = 0.0, timeout: timedelta | None = None,
    ) -> None:  # fmt: skip
        self.model, self.rank, self.num_ranks, self.bound = model, rank, num_ranks, bound
        # Messages are in host memory. The default group is not stored: its threads would outlive it and abort.
        self.group = None if group is None or group is dist.group.WORLD else group
        if num_ranks > 1 and dist.get_backend(self.group) != "gloo":
            self.group = dist.new_group(timeout=timeout, backend="gloo")
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
        """The micro-batches of a step, or none if the server has already taken this step without the worker."""
        self._took_part = step > self.version
        if self.is_server:
            self._workers.listen()
        if self._took_part:
            time.sleep(self.idle_s)
        return iter(micro_batches) if self._took_part else iter(())

    # ---- up: gradients --------------------------------------------------------------------------------------------------

    def push(self, step: int, loss: Tensor, meet: bool = False) -> None:
        """Workers send their gradients; on the server every .grad becomes the mean of its own and the received ones.

        Args:
            step: the current step.
            loss: the loss of this rank's part of the batch, a scalar.
            meet: the server waits for all workers in either mode: before an evaluation or a save, and at the end.
        """
        if not self._took_part:
            return
        own = self.messages.pack_gradients(loss, self.version)
        if self.is_server:
            self._average(step, own, meet)
        else:
            with message("send", f"gradients of step {step}", 0):
                dist.send(own, group=self.group, group_dst=0)
            self.sent_bytes += own.nbytes

    def _average(self, step: int, own: Tensor, meet: bool) -> None:
        """Waits for gradients that would exceed the bound (synchronous: for all); averages those that have arrived."""
        works_on = self._workers.works_on
        others = self._workers.take(lambda worker: meet or must_wait(step, works_on[worker], self.bound))
        self.received_bytes += sum(gradients.nbytes for gradients in others)
        self.staleness = [0, *(step - 1 - int(gradients[-1]) for gradients in others)]
        self.loss = self.messages.unpack_gradients(mean_of([own, *others]))
        self.version = step

    # ---- down: weights --------------------------------------------------------------------------------------------------

    def pull(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Workers that have pushed receive the weights of the server's newest step, and its loss scale."""
        if self.num_ranks == 1 or not self._took_part and not self.is_server:
            return
        if self.is_server:
            scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0
            weights = self.messages.pack_weights(self.version, scale)
            # All sends begin at once, so that a slow receiver does not delay the next worker.
            workers = self._workers.to_answer
            sending = [dist.isend(weights, group=self.group, group_dst=worker) for worker in workers]
            for worker, send in zip(workers, sending, strict=True):
                with message("send", f"weights of version {self.version}", worker):
                    send.wait()
                self.sent_bytes += weights.nbytes
                self._workers.works_on[worker] = self.version
            return
        weights = self._receive(0)
        self.received_bytes += weights.nbytes
        self.version, scale = self.messages.unpack_weights(weights)
        if scaler is not None and scaler.is_enabled():
            scaler.load_state_dict({**scaler.state_dict(), "scale": scale})

    def _receive(self, sender: int) -> Tensor:
        received = torch.empty(self.messages.up_elems if self.is_server else self.messages.down_elems)
        what = "gradients" if self.is_server else "weights"
        with message("receive", f"{what} after version {self.version}", sender):  # named for the report of a hang
            dist.recv(received, group=self.group, group_src=sender)
        return received

    # ---- traffic --------------------------------------------------------------------------------------------------------

    def formula_bytes(self) -> int:
        """Bytes through rank 0 in a synchronous step: it receives gradients from, and sends weights to, each worker."""
        return 4 * (self.num_ranks - 1) * (self.messages.up_elems + self.messages.down_elems)

    def step_scalars(self) -> dict[str, float]:
        """For metrics.jsonl: bytes through rank 0 since the last call, number and staleness of the gradients used."""
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
        """Rows for the closing summary: bytes through rank 0, and what a ring would send."""
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
    """The same calls over nn.DataParallel: one process; GPU 0 holds the weights, each forward copies them to the others."""

    is_server, staleness = True, [0]

    def __init__(self, model: nn.Module, num_replicas: int) -> None:
        self.model = nn.DataParallel(model, device_ids=list(range(num_replicas)))
        self.num_replicas, self.loss = num_replicas, float("nan")

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The mean of the replicas' losses; each replica computes an equal part of the micro-batch's rows."""
        return self.model(*inputs).mean()

    def work(self, step: int, micro_batches: Iterable[Any]) -> Iterator[Any]:
        """All micro-batches."""
        return iter(micro_batches)

    def push(self, step: int, loss: Tensor, meet: bool = False) -> None:
        """Keeps the loss; backward has already summed the replicas' gradients on GPU 0."""
        self.loss = float(loss)

    def pull(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Nothing to do: the next forward copies the weights."""

    def step_scalars(self) -> dict[str, float]:
        """Empty: the copies inside nn.DataParallel cannot be counted here."""
        return {}

    def table(self) -> list[tuple[str, Any]]:
        """Rows for the closing summary."""
        return [("communication", f"inside nn.DataParallel, on {self.num_replicas} GPUs")]
