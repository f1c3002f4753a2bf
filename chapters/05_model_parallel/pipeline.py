"""Pipeline parallel: each rank has some layers; it sends activations to the next rank and gets their gradients back.

schedules.py makes the order of work as data, a list of instructions for each rank. The Worker here executes its rank's list:
compute, send or receive. It starts sends and receives without waiting; a computation waits for the tensors it needs.
schedules.with_transfers explains why this cannot deadlock.
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

from durable.calls import message
from gpt2_chinese.model.documents import document_mask

Batch = tuple[Tensor, Tensor]  # inputs and targets, (b, T) int64


class Stage:
    """Some layers of a model: takes ids or activations, returns activations or the loss. The model holds the parameters.

    Args:
        model: a GPT2LMHeadModel of which this rank has at least these layers.
        layers: numbers of the blocks.
        is_first: the stage begins with the embedding.
        is_last: the stage ends with the norm, the head and the loss.
    """

    def __init__(self, model: nn.Module, layers: range, is_first: bool, is_last: bool) -> None:
        self.model, self.layers, self.is_first, self.is_last = model, layers, is_first, is_last

    def __call__(self, x: Tensor, targets: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        """(b, T) int64 or (b, T, C) -> (b, T, C); the last stage returns the loss, or logits if there are no targets.

        A head that computes the loss by tiles makes no logits: without targets the last stage returns the head's input.
        ids (b, T) are the first stage's input. Every stage has them, so each makes the mask of the documents itself.
        """
        body = self.model.transformer
        mask = None if ids is None else document_mask(ids, body.marks)
        if self.is_first:
            x = body.embed(x)
        for number in self.layers:
            x = body.h[str(number)](x, mask=mask)
        if not self.is_last:
            return x
        x = body.ln_f(x)
        if self.model.tiled:
            return x if targets is None else self.model.lm_head(x, targets)
        logits = self.model.lm_head(x)
        return logits if targets is None else self.model.loss(logits, targets)


def cut_into_stages(model: nn.Module, rank: int, num_ranks: int, num_virtual: int = 1) -> dict[int, Stage]:
    """Removes the layers of other ranks from a whole model, in place; the remaining parameters keep their names.

    The head is tied to the embedding. If they are on different ranks, each has a copy of the weight. parallel.py sums both
    gradients, so that the copies stay equal.

    Args:
        model: all layers, perhaps sliced by tensor parallel. num_ranks * num_virtual must divide n_layer.
        rank, num_ranks: of the pipeline.
        num_virtual: number of stages of each rank.

    Returns:
        the rank's stages by number; stage s is on rank s % num_ranks.
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
        group: the pipeline's ranks, in order; None is one rank.
        schedule: one of schedules.NAMES.
        num_virtual: number of stages of each rank.
        width: C of the activations between stages, float32 (b, T, C).
        sequence_ranks: t with sequence parallel, where the activations are (b, T/t, C), else 1.
        timeline: records events.
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
        """This rank's instructions for a step; made once and kept."""
        key = num_micros, training
        if key not in self._programs:
            if training:
                order = schedules.orders(self.schedule, self.num_ranks, num_micros, self.num_virtual)
            else:
                order = schedules.forward_only(self.num_ranks, num_micros, self.num_virtual)
            self._programs[key] = schedules.with_transfers(order)[self.rank]
        return self._programs[key]

    def train(self, micros: Iterable[Batch], scale: Callable[[Tensor], Tensor], precision: Callable[[], Any],
              weight: Callable[[Tensor], Any] = lambda _: 1.0) -> Tensor:
        """Runs forward and backward of all micro-batches; gradients add up in the parameters.

        Args:
            micros: the micro-batches, the same on all ranks of the pipeline.
            scale: applied to the loss before backward: the loss scale of fp16.
            precision: makes the context of each forward: autocast.
            weight: of a micro-batch with these targets, in the mean.

        Returns:
            the mean loss of the micro-batches on the rank of the last stage, 0 elsewhere; a float32 scalar.
        """
        batches = list(micros)
        total = torch.zeros((), device=batches[0][0].device)

        def forward(work: Work, x: Tensor) -> Tensor:
            stage = self.stages[work.stage]
            with precision():
                y = stage(x, batches[work.micro][1], batches[work.micro][0])
            if stage.is_last:
                y = y * weight(batches[work.micro][1]) / len(batches)
                total.add_(y.detach())
                y = scale(y)
            return y

        self._run(self._program(len(batches), training=True), batches, forward)
        return total

    @torch.no_grad()
    def predict(self, batch: Batch, last: Callable[[Tensor], Tensor], precision: Callable[[], Any]) -> Tensor | None:
        """Runs forward on one batch; returns last(result of the last stage) on that stage's rank, None elsewhere."""
        found = []

        def forward(work: Work, x: Tensor) -> Tensor:
            stage = self.stages[work.stage]
            with precision():
                y = stage(x, ids=batch[0])
                if stage.is_last:
                    found.append(last(y))
            return y

        self._run(self._program(1, training=False), [batch], forward)
        return found[0] if found else None

    def _run(self, program: list[Work | Transfer], batches: list[Batch], forward: Callable[[Work, Tensor], Tensor]) -> None:
        """Executes a list of instructions."""
        b, length = batches[0][0].shape
        shape = b, length // self.sequence_ranks, self.width
        made: dict[Work, Tensor] = {}  # outputs and gradients to be sent, or for a stage on this rank
        came: dict[Work, tuple[Any, Tensor, int]] = {}  # receives under way, and from whom
        kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # input and output from F until B: the live activations
        sending: list[tuple[Any, Tensor, Transfer]] = []
        members = dist.get_process_group_ranks(self.group) if self.num_ranks > 1 else [0]

        def obtain(work: Work) -> Tensor:
            if work in made:  # a pipeline of one rank
                return made.pop(work)
            handle, tensor, peer = came.pop(work)
            with message("receive", str(work), members[peer]):  # named for the report of a hang
                handle.wait()
            return tensor

        for what in program:
            if isinstance(what, Transfer):
                if what.kind == "send":
                    tensor = made.pop(what.of)
                    sending.append((dist.isend(tensor, group=self.group, group_dst=what.peer), tensor, what))
                    self.sent_bytes += tensor.nbytes
                else:
                    tensor = torch.empty(shape, device=batches[0][0].device)
                    came[what.of] = dist.irecv(tensor, group=self.group, group_src=what.peer), tensor, what.peer
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
        for handle, _, what in sending:
            with message("send", str(what.of), members[what.peer]):
                handle.wait()

    def _span(self, work: Work) -> contextlib.AbstractContextManager[Any]:
        if not torch.is_grad_enabled():
            return contextlib.nullcontext()
        return self.timeline.span(work.kind, work.micro, work.stage // self.num_ranks)
