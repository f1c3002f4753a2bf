"""A single parameter server: rank 0 owns the weights and the optimizer, workers pull weights and push gradients.

    worker 1   pull | forward, backward | push | wait ...        Li et al. 2014 (parameter server)
    worker 2   pull | forward, backward | push | wait ...
    rank 0          | forward, backward | mean | step | send weights

Rank 0 is server AND worker, so that the global batch divides by all ranks and the other chapters' curve is this one's.
A message is one flat float32 tensor in host memory, sent point to point over gloo, also where models are on GPUs:

    down   | weights | buffers | step | loss scale |
    up     | gradients | 1 or 0 for each: used | loss | step of the weights it was made with |

Synchronous: the server waits for all. Asynchronous (Dean et al. 2012, with the bound of Ho et al. 2013): it takes the
gradients that are there, steps, and answers those who sent them; the others work on. A worker that the server has
overtaken goes on with the batch of the newest step. Staleness is how many steps the server has taken since the weights
of a gradient; it waits for the one that would exceed the bound. With bound 0 that is the synchronous algorithm.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
import torch.distributed as dist
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


class ParameterServer:
    """One rank's side of it; the same calls on all ranks.

    Args:
        model: as above; after construction all ranks hold rank 0's weights.
        rank, num_ranks: rank 0 is the server.
        group: of torch.distributed; None when alone.
        bound: most staleness of the asynchronous mode, None for the synchronous one.
        version: the step that the weights have behind them.
        idle_s: seconds that this rank idles in each step, a straggler on purpose.

    Attributes:
        loss: on the server, the mean loss of the gradients of the last step, nats per token.
        staleness: on the server, of each of those gradients, in server steps.
    """

    def __init__(
        self, model: nn.Module, rank: int, num_ranks: int, group: Any = None, bound: int | None = None, version: int = 0,
        idle_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.model, self.rank, self.num_ranks, self.bound = model, rank, num_ranks, bound
        # The messages lie in host memory; the default group is not kept (its threads would outlive it and abort).
        self.group = None if group is None or group is dist.group.WORLD else group
        if num_ranks > 1 and dist.get_backend(self.group) != "gloo":
            self.group = dist.new_group(backend="gloo")
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.weights = [*model.parameters(), *model.buffers()]
        self.num_weights = sum(t.numel() for t in self.weights)
        self.num_gradients = sum(p.numel() for p in self.parameters)
        self.version = version  # the server's step whose weights this rank holds
        self.idle_s = idle_s
        self.loss, self.staleness = float("nan"), [0]
        self.sent_bytes = self.received_bytes = 0
        self._arriving: dict[int, Future[Tensor]] = {}  # of the workers that are at work: what they will push
        self._works_on = [version] * num_ranks  # the version that each of them has
        self._answer: list[int] = []  # the workers that wait for weights
        self._took_part = False
        # one thread a worker: gloo can wait for a message, but not look whether there is one
        self._threads = ThreadPoolExecutor(num_ranks - 1, "push") if self.is_server and num_ranks > 1 else None
        if num_ranks > 1:
            self._answer = list(range(1, num_ranks))
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
            for worker in (w for w in range(1, self.num_ranks) if w not in self._arriving):
                self._arriving[worker] = self._threads.submit(self._receive, worker)
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
        own = self._pack_gradients(loss)
        if self.is_server:
            self._average(step, own, meet)
        else:
            dist.send(own, group=self.group, group_dst=0)
            self.sent_bytes += own.nbytes

    def _pack_gradients(self, loss: Tensor) -> Tensor:
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        used = torch.tensor([p.grad is not None for p in self.parameters])
        tail = torch.tensor([float(loss), float(self.version)])
        return torch.cat([*(g.detach().reshape(-1).float().cpu() for g in grads), used.float(), tail])

    def _average(self, step: int, own: Tensor, meet: bool) -> None:
        """Waits for whom it must, in the synchronous mode for all, and takes what has arrived, in order of rank."""

        def must(worker: int) -> bool:
            return meet or must_wait(step, self._works_on[worker], self.bound)

        wait([future for worker, future in self._arriving.items() if must(worker)])
        here = sorted(worker for worker, future in self._arriving.items() if future.done())
        messages = [self._arriving.pop(worker).result() for worker in here]
        self.received_bytes += sum(message.nbytes for message in messages)
        self.staleness = [0, *(step - 1 - int(message[-1]) for message in messages)]
        total = mean_of([own, *messages])
        self.loss, self._answer = float(total[-2]), here
        pieces = total[: self.num_gradients].split([p.numel() for p in self.parameters])
        used = total[self.num_gradients : -2].tolist()
        for parameter, piece, anyone in zip(self.parameters, pieces, used, strict=True):
            # a parameter that nobody used keeps no gradient, and the optimizer leaves it alone, as on one process
            parameter.grad = piece.view_as(parameter).to(parameter) if anyone else None
        self.version = step

    # ---- down: weights --------------------------------------------------------------------------------------------------

    def pull(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Workers that have pushed wait for the weights of the server's newest step, and for its loss scale."""
        if self.num_ranks == 1 or not self._took_part and not self.is_server:
            return
        if self.is_server:
            scale = scaler.get_scale() if scaler is not None and scaler.is_enabled() else 1.0
            flat = [t.detach().reshape(-1).float().cpu() for t in self.weights]
            message = torch.cat([*flat, torch.tensor([float(self.version), scale])])
            # all at once: a worker that is slow to receive does not hold up the next one
            sending = [dist.isend(message, group=self.group, group_dst=worker) for worker in self._answer]
            for worker, send in zip(self._answer, sending, strict=True):
                send.wait()
                self.sent_bytes += message.nbytes
                self._works_on[worker] = self.version
            return
        message = torch.empty(self.num_weights + 2)
        dist.recv(message, group=self.group, group_src=0)
        self.received_bytes += message.nbytes
        self.version = int(message[-2])
        with torch.no_grad():
            pieces = message[: self.num_weights].split([t.numel() for t in self.weights])
            for tensor, piece in zip(self.weights, pieces, strict=True):
                tensor.copy_(piece.view_as(tensor))
        if scaler is not None and scaler.is_enabled():
            scaler.load_state_dict({**scaler.state_dict(), "scale": float(message[-1])})

    def _receive(self, worker: int) -> Tensor:
        message = torch.empty(self.num_gradients + len(self.parameters) + 2)
        dist.recv(message, group=self.group, group_src=worker)
        return message

    # ---- what it costs --------------------------------------------------------------------------------------------------

    def formula_bytes(self) -> int:
        """What passes through rank 0 in a synchronous step: each other rank's gradients come in, its weights go out."""
        up, down = self.num_gradients + len(self.parameters) + 2, self.num_weights + 2
        return 4 * (self.num_ranks - 1) * (up + down)

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
        ring = 2 * others / self.num_ranks * 4 * self.num_gradients
        return [
            ("through rank 0", f"{self.through_bytes / MIB:.2f} MiB in the last step"),
            ("by the formula", f"2 (p - 1) x {4 * self.num_weights / MIB:.2f} MiB = {formula / MIB:.2f} MiB a step"),
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
