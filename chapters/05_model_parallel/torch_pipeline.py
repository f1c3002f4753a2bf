"""Pipelines by torch: torch.distributed.pipelining executes the same schedules as schedules.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from pipeline import Batch, Stage, Worker
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B


class StageModule(nn.Module):
    """A Stage as an nn.Module, which torch's PipelineStage needs."""

    def __init__(self, stage: Stage, precision: Callable[[], Any]) -> None:
        super().__init__()
        self.stage, self.precision = stage, precision

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """(b, T) int64 or (b, T, C) -> (b, T, C), on the last stage logits (b, T, V), float32; ids as in Stage."""
        with self.precision():
            return self.stage(x, ids=ids).float()


class TorchWorker(Worker):
    """Trains with torch's schedules; predicts as Worker does."""

    torch_schedule: Any = None
    """Made at the first call of train, because torch needs the shapes of a micro-batch."""
    weight: Callable[[Tensor], Any] = staticmethod(lambda _: 1.0)
    """Of the present step; the schedule's loss reads it."""

    def train(self, micros: Iterable[Batch], scale: Callable[[Tensor], Tensor], precision: Callable[[], Any],
              weight: Callable[[Tensor], Any] = lambda _: 1.0) -> Tensor:
        """As in Worker. torch's schedule takes the whole batch and splits it into the same micro-batches."""
        batches = list(micros)
        inputs, targets = (torch.cat(tensors) for tensors in zip(*batches, strict=True))
        self.weight = weight
        if self.torch_schedule is None:
            self.torch_schedule = self._make_schedule(batches, scale, precision)
        losses: list[Tensor] = []
        for_first_stage = [inputs] if 0 in self.stages else []
        is_last = any(stage.is_last for stage in self.stages.values())
        for_last_stage = {"target": targets, "losses": losses} if is_last else {}
        marked = next(iter(self.stages.values())).model.transformer.marks is not None
        for_all_stages = {"ids": inputs} if marked else {}  # torch cuts them into the same micro-batches
        self.torch_schedule.step(*for_first_stage, **for_all_stages, **for_last_stage, return_outputs=False)
        if not losses:
            return torch.zeros((), device=inputs.device)
        # scale() multiplied each loss by the loss scale: scale(1) is that factor, and the logged loss is without it
        return torch.stack(losses).sum().detach() / scale(torch.ones((), device=inputs.device))

    def _make_schedule(self, batches: list[Batch], scale: Callable[[Tensor], Tensor], precision: Callable[[], Any]) -> Any:
        """Makes torch's schedule for micro-batches of these shapes."""
        example, num_stages = batches[0][0], self.num_ranks * self.num_virtual
        b, length = example.shape
        model = next(iter(self.stages.values())).model
        stages = []
        for number, stage in self.stages.items():
            hidden = torch.empty(b, length // self.sequence_ranks, self.width, device=example.device, requires_grad=True)
            logits = torch.empty(b, length, model.config.vocab_size, device=example.device, requires_grad=True)
            stages.append(PipelineStage(
                StageModule(stage, precision), number, num_stages, example.device, group=self.group,
                input_args=(example if stage.is_first else hidden,), output_args=(logits if stage.is_last else hidden,),
            ))  # fmt: skip

        def loss(y: Tensor, target: Tensor) -> Tensor:
            return scale(model.loss(y, target) * self.weight(target) / len(batches))

        # scale_grads=False: loss() already divides by the number of micro-batches
        if self.schedule == "interleaved":
            return ScheduleInterleaved1F1B(stages, len(batches), loss_fn=loss, scale_grads=False)
        kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[self.schedule]
        return kind(stages[0], len(batches), loss_fn=loss, scale_grads=False)
