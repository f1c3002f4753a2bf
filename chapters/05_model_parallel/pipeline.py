"""Pipeline parallel: a rank has some layers; activations go to the next rank, their gradients come back.

What is done when is data, made by schedules.py; here is what executes it: one worker, which walks through the list of its
rank and knows three things: to compute, to send, to receive. Sends and receives are started and not waited for; a
computation waits for what it needs. Why that cannot deadlock: schedules.with_transfers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import schedules
import torch
import torch.distributed as dist
from pictures import Timeline
from schedules import Transfer, Work
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # inputs and targets, (b, T) int64


class Stage:
    """Some layers of a model: ids or activations in, activations or the loss out. Holds no parameter of its own.

    Args:
        model: a GPT2LMHeadModel of which this rank has these layers at least.
        layers: numbers of the blocks.
        is_first: begins with the embedding.
        is_last: ends with the norm, the head and the loss.
    """

    def __init__(self, model: nn.Module, layers: range, is_first: bool, is_last: bool) -> None:
        self.model, self.layers, self.is_first, self.is_last = model, layers, is_first, is_last

    def __call__(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """(b, T) int64 or (b, T, C) -> (b, T, C); the last stage gives the loss, or logits where there are no targets."""
        body = self.model.transformer
        if self.is_first:
            x = body.embed(x)
        for number in self.layers:
            x = body.h[str(number)](x)
        if not self.is_last:
            return x
        logits = self.model.lm_head(body.ln_f(x))
        return logits if targets is None else self.model.loss(logits, targets)


def cut_into_stages(model: nn.Module, rank: int, num_ranks: int, num_virtual: int = 1) -> dict[int, Stage]:
    """Takes from a whole model what is not on this rank, in place; the names of what stays do not change.

    The head is tied to the embedding. Where they lie on different ranks each has a copy of the weight; the sum of both
    gradients (parallel.py) keeps the copies the same.

    Args:
        model: whole, perhaps cut by tensor parallel. n_layer must divide by num_ranks * num_virtual.
        rank, num_ranks: of the pipeline.
        num_virtual: stages of a rank.

    Returns:
        the rank's stages by number, stage s of rank s % num_ranks.
    """
    body, num_stages = model.transformer, num_ranks * num_virtual
    each = len(body.h) // num_stages
    stages = {}
    for number in range(rank, num_stages, num_ranks):
        layers = range(number * each, (number + 1) * each)
        stages[number] = Stage(model, layers, number == 0, number == num_stages - 1)
    here = [n for stage in stages.values() for n in stage.layers]
    body.h = nn.ModuleDict({str(n): block for n, block in enumerate(body.h) if n in here})
    if num_ranks > 1:
        if rank == num_ranks - 1:
            weight, place = model.lm_head.weight, getattr(model.lm_head.weight, "place", None)
            model.lm_head.weight = nn.Parameter(weight.detach().clone())
            if place is not None:
                model.lm_head.weight.place = place
        else:
            body.ln_f = model.lm_head = None
        if rank != 0:
            body.wte = body.wpe = body.drop = None
    return stages


class Worker:
    """Executes a rank's part of a schedule.

    Args:
        stages: of this rank, by number.
        group: of the pipeline's ranks, in order; None is one rank.
        schedule: a name of schedules.NAMES.
        num_virtual: stages of a rank.
        width: C of what travels between stages, which is float32 (b, T, C).
        sequence_ranks: t with sequence parallel, where (b, T/t, C) travels, else 1.
        timeline: where events are noted.
    """

    def __init__(
        self, stages: dict[int, Stage], group: Any, schedule: str, num_virtual: int, width: int, sequence_ranks: int,
        timeline: Timeline,
    ) -> None:  # fmt: skip
        self.stages, self.group, self.schedule, self.num_virtual = stages, group, schedule, num_virtual
        self.rank = 0 if group is None else dist.get_rank(group)
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self.width, self.sequence_ranks, self.timeline = width, sequence_ranks, timeline
        self.sent_bytes = 0
        self._programs: dict[tuple[int, bool], list[Work | Transfer]] = {}

    def _program(self, num_micros: int, training: bool) -> list[Work | Transfer]:
        """This rank's instructions, made once."""
        key = num_micros, training
        if key not in self._programs:
            if training:
                order = schedules.orders(self.schedule, self.num_ranks, num_micros, self.num_virtual)
            else:
                order = schedules.forward_only(self.num_ranks, num_micros, self.num_virtual)
            self._programs[key] = schedules.with_transfers(order)[self.rank]
        return self._programs[key]

    def train(self, micros: Iterable[Batch], scale: Callable[[Tensor], Tensor], precision: Callable[[], Any]) -> Tensor:
        """Forward and backward of all micro-batches; gradients add up in the parameters.

        Args:
            micros: the micro-batches, the same on all ranks of the pipeline.
            scale: of the loss, before backward: the loss scale of fp16.
            precision: a context for each forward: autocast.

        Returns:
            the mean loss of the micro-batches on the rank of the last stage, 0 elsewhere; a float32 scalar.
        """
        batches = list(micros)
        total = torch.zeros((), device=batches[0][0].device)

        def forward(work: Work, x: Tensor) -> Tensor:
            stage = self.stages[work.stage]
            with precision():
                y = stage(x, batches[work.micro][1])
            if stage.is_last:
                y = y / len(batches)
                total.add_(y.detach())
                y = scale(y)
            return y

        self._run(self._program(len(batches), training=True), batches, forward)
        return total

    @torch.no_grad()
    def predict(self, batch: Batch, last: Callable[[Tensor], Tensor], precision: Callable[[], Any]) -> Tensor | None:
        """The forward pass of one batch, and last(logits) on the rank of the last stage, None elsewhere."""
        found = []

        def forward(work: Work, x: Tensor) -> Tensor:
            stage = self.stages[work.stage]
            with precision():
                y = stage(x)
            if stage.is_last:
                found.append(last(y))
            return y

        self._run(self._program(1, training=False), [batch], forward)
        return found[0] if found else None

    def _run(self, program: list[Work | Transfer], batches: list[Batch], forward: Callable[[Work, Tensor], Tensor]) -> None:
        """Walks through a program."""
        b, length = batches[0][0].shape
        shape = b, length // self.sequence_ranks, self.width
        made: dict[Work, Tensor] = {}  # outputs and gradients that wait to be sent, or for the stage beside on this rank
        came: dict[Work, tuple[Any, Tensor]] = {}  # receives that are under way
        kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # input and output between F and B: the live activations
        sending: list[tuple[Any, Tensor]] = []

        def obtain(work: Work) -> Tensor:
            if work in made:  # a pipeline of one rank
                return made.pop(work)
            handle, tensor = came.pop(work)
            handle.wait()
            return tensor

        for what in program:
            if isinstance(what, Transfer):
                if what.kind == "send":
                    tensor = made.pop(what.of)
                    sending.append((dist.isend(tensor, group=self.group, group_dst=what.peer), tensor))
                    self.sent_bytes += tensor.nbytes
                else:
                    tensor = torch.empty(shape, device=batches[0][0].device)
                    came[what.of] = dist.irecv(tensor, group=self.group, group_src=what.peer), tensor
                continue
            stage, key = self.stages[what.stage], (what.stage, what.micro)
            if what.kind == "F":
                x = batches[what.micro][0] if stage.is_first else obtain(Work("F", what.stage - 1, what.micro))
                x.requires_grad_(x.is_floating_point() and torch.is_grad_enabled())
                with self._span(what):
                    y = forward(what, x)
                if torch.is_grad_enabled():
                    kept[key] = x, y
                if not stage.is_last:
                    made[what] = y.detach().float().contiguous()
            else:
                gradient = None if stage.is_last else obtain(Work("B", what.stage + 1, what.micro))
                x, y = kept.pop(key)
                with self._span(what):
                    torch.autograd.backward(y, gradient)
                if not stage.is_first:
                    made[what] = x.grad.contiguous()
        for handle, _ in sending:
            handle.wait()

    def _span(self, work: Work) -> contextlib.AbstractContextManager[Any]:
        if not torch.is_grad_enabled():
            return contextlib.nullcontext()
        return self.timeline.span(work.kind, work.micro, work.stage // self.num_ranks)
