"""Tensor, pipeline and data parallel together, as train.py calls them.

    forward and backward of all micro-batches      over the pipeline ranks (Worker); in each layer over the tensor ranks
    sequence parallel: sum of the gradients of whole parameters       over the tensor ranks
    sum of both gradients of the tied weight                          over the first and the last rank of the pipeline
    mean of all gradients                                             over the data parallel ranks
    global norm: counts every parameter of the model once             over all ranks of one model replica

Every rank makes the same initial weights from the seed and keeps its part, so no weights are sent at the start.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pictures
import torch
import torch.distributed as dist
from mesh import Mesh
from pipeline import Worker, cut_into_stages
from places import place_of
from schedules import bubble_formula
from tensor import TensorGroup
from tensor_apply import apply_tensor_parallel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt2_chinese.checkpoint.sharded import Part, write_whole
from gpt2_chinese.data.batches import IGNORED, Batches
from gpt2_chinese.errors import UserError
from gpt2_chinese.model.gpt2 import next_token_loss
from gpt2_chinese.run.optim import autocast
from gpt2_chinese.run.run import seed_step

MIB = 1 << 20
TIED, COPY = "transformer.wte.weight", "lm_head.weight"


class ModelParallel:
    """A rank's part of the model: its training step, evaluation and checkpoints.

    Args:
        model: whole and the same on all ranks; layers and slices of other ranks are removed from it, in place.
        mesh: the process groups.
        settings: schedule, virtual_stages, sequence_parallel, activation_checkpointing, backend, timeline, precision, seed.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, settings: Any) -> None:
        self.model, self.mesh, self.settings = model, mesh, settings
        self.tensor = TensorGroup(mesh.tensor, settings.sequence_parallel)
        if mesh.tp > 1:
            if settings.backend == "torch":
                from torch_tensor import apply_torch_tensor_parallel

                apply_torch_tensor_parallel(model, mesh.tensor, mesh.ranks.device, settings.sequence_parallel)
            else:
                apply_tensor_parallel(model, self.tensor)
        if settings.activation_checkpointing:
            for block in model.transformer.h:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        stages = cut_into_stages(model, mesh.pp_rank, mesh.pp, settings.virtual_stages)
        if mesh.tp == 1 or settings.backend == "own":
            model.to(mesh.ranks.device)  # DTensors are there already; to() would make parameters without Place
        self.timeline = pictures.Timeline(settings.timeline, mesh.ranks.device)
        kind = Worker
        if settings.backend == "torch" and mesh.pp > 1:
            from torch_pipeline import TorchWorker as kind
        self.worker = kind(stages, mesh.pipeline, settings.schedule, settings.virtual_stages, settings.model.n_embd,
                           mesh.tp if settings.sequence_parallel else 1, self.timeline)  # fmt: skip
        self.parameters = dict(model.named_parameters())
        self.tied = self.parameters.get(COPY if mesh.pp_rank else TIED) if mesh.pp > 1 else None
        self.precision = partial(autocast, mesh.ranks.device, settings.precision)
        self.sent: dict[str, int] = {}  # bytes sent in the last step, by kind of layer

    # -- a step -------------------------------------------------------------------------------------------------------

    def train(self, step: int, batches: Batches, scaler: torch.amp.GradScaler) -> Tensor:
        """Runs forward and backward of a step; returns the mean loss of this replica's micro-batches, on all its ranks.

        Afterwards every gradient is that of the global batch.
        """
        seed_step(self.settings.seed, step, self.mesh.dp_rank * self.mesh.pp + self.mesh.pp_rank)  # see different_dropout
        self.tensor.sent.clear()
        self.worker.sent_bytes = 0
        scaler.scale(torch.ones((), device=self.mesh.ranks.device))  # starts it also on ranks without a loss
        weight = partial(batches.weight, step)
        loss = self.worker.train(batches.micro_batches(step), scaler.scale, self.precision, weight)
        self.sent = {**self.tensor.sent, "pipeline": self.worker.sent_bytes}
        self.timeline.end_step()
        self._sum_gradients()
        if scaler.is_enabled():
            self._spread_overflow()
        if self.mesh.pipeline is not None:
            dist.all_reduce(loss, group=self.mesh.pipeline)
        return loss

    def _sum_gradients(self) -> None:
        """Sums partial gradients over the ranks that hold them, then averages over the data parallel ranks."""
        for parameter in self.parameters.values():  # DTensor: a gradient may be Partial, its weight Shard
            if getattr(parameter, "placements", None) != getattr(parameter.grad, "placements", None):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        if self.tensor.sequence and self.settings.backend == "own":
            _sum([p.grad for p in self.parameters.values() if place_of(p).shared], self.mesh.tensor)
        if self.tied is not None:
            _sum([self.tied.grad], self.mesh.ends)
        if self.mesh.data.group is not None:
            grads = [_local(p.grad) for p in self.parameters.values()]
            for grad in grads:
                grad.div_(self.mesh.dp)  # before the sum, which may overflow where the mean does not
            _sum(grads, self.mesh.data.group)

    def _spread_overflow(self) -> None:
        """Writes inf into a gradient on all ranks if one rank has an overflow, so that all skip the step."""
        grads = [_local(p.grad) for p in self.parameters.values()]
        wrong = torch.stack([~grad.isfinite().all() for grad in grads]).any().float()
        if self.mesh.ranks.sum(wrong) > 0:
            grads[0].fill_(torch.inf)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales all gradients down to a global norm of `max_norm` (0: not at all); returns the norm before, a scalar.

        A parameter that several ranks hold is counted once: whole parameters on the first tensor parallel rank, the tied
        weight in the first stage.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.ranks.device)
        for name, parameter in self.parameters.items():
            if (name != COPY) and (self.mesh.tp_rank == 0 or not place_of(parameter).shared):
                total += _local(parameter.grad).float().norm().double() ** 2
        if self.mesh.replica is not None:
            dist.all_reduce(total, group=self.mesh.replica)
        norm = total.sqrt().float()
        if max_norm:
            scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ does
            for parameter in self.parameters.values():
                _local(parameter.grad).mul_(scale)
        return norm

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def score(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """For evaluate(): summed loss, correct guesses, targets counted; (3,) float64 on the CPU, the same on all ranks."""

        def last(result: Tensor) -> Tensor:
            if self.model.tiled:  # the result is the head's input; otherwise it is the logits
                return self.model.lm_head(result, targets, scores=True)
            loss = self.model.loss(result, targets, reduction="sum")
            guesses = result.argmax(-1) if self.model.loss is next_token_loss else self.model.loss.guesses(result)
            counted = targets != IGNORED
            return torch.stack([loss.double(), ((guesses == targets) & counted).sum().double(), counted.sum().double()])

        self.model.eval()
        found = self.worker.predict((inputs, targets), last, self.precision)
        self.model.train()
        total = torch.zeros(3, dtype=torch.float64, device=inputs.device) if found is None else found
        if self.mesh.pipeline is not None:
            dist.all_reduce(total, group=self.mesh.pipeline)
        return total.cpu()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def load(self, optimizer: torch.optim.Optimizer, weights: Any, moments: Any) -> None:
        """Loads this rank's part of a checkpoint of any chapter and any split.

        Raises:
            UserError: names or shapes differ from the model's.
        """
        names = {name: TIED if name == COPY else whole_name(p, name) for name, p in self.parameters.items()}
        shapes = {there: place_of(self.parameters[name]).shape for name, there in names.items()}
        wrong = [there for there, shape in shapes.items() if there not in weights or weights[there].shape != shape]
        if wrong:
            raise UserError(f"the weights do not fit the model: {', '.join(wrong)}")
        with torch.no_grad():
            for name, there in names.items():
                parameter = self.parameters[name]
                _local(parameter).copy_(place_of(parameter).take(weights[there]))
                if f"step.{there}" not in moments:
                    continue  # never updated so far
                state = optimizer.state[parameter] = {"step": moments[f"step.{there}"].clone()}
                for kind in ("exp_avg", "exp_avg_sq"):
                    state[kind] = torch.zeros_like(parameter)
                    _local(state[kind]).copy_(place_of(parameter).take(moments[f"{kind}.{there}"]))

    def weights(self) -> dict[str, Part]:
        """This rank's part of the weights, by the names of the whole model."""
        return self._parts("", self.parameters)

    def _parts(self, kind: str, tensors: dict[str, Tensor]) -> dict[str, Part]:
        """The tensors (by parameter name) as parts of the whole model's tensors; `kind` is put before the names."""
        found: dict[str, Part] = {}
        for name, tensor in tensors.items():
            parameter = self.parameters[name]
            if name != COPY:
                part = place_of(parameter).part(_local(tensor))
                found.setdefault(kind + whole_name(parameter, name), part).boxes.update(part.boxes)
        return found

    def parts(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Part], dict[str, int]]:
        """For Run.save_parts: this rank's part of weights and moments, all counts of updates; all ranks call it together."""
        states = {name: optimizer.state[p] for name, p in self.parameters.items() if optimizer.state.get(p)}
        parts = self._parts("model.", self.parameters)
        for kind in ("exp_avg", "exp_avg_sq"):
            parts |= self._parts(kind + ".", {name: state[kind] for name, state in states.items()})
        steps = {whole_name(self.parameters[name], name): int(state["step"]) for name, state in states.items()}
        steps.pop(COPY, None)
        everyone: list[Any] = [steps]
        if self.mesh.replica is not None:
            everyone = [None] * dist.get_world_size(self.mesh.replica)
            dist.all_gather_object(everyone, steps, group=self.mesh.replica)
        return parts, {k: n for each in everyone for k, n in each.items()}

    def write_final(self, file: Path) -> None:
        """For Run.finish: writes the whole weights into one file; all ranks call it together."""
        write_whole(file, self.weights(), self.mesh.ranks)

    # -- the end ------------------------------------------------------------------------------------------------------

    def step_scalars(self) -> dict[str, float]:
        """For metrics.jsonl: bytes that rank 0 sent in the last step within its tensor and pipeline groups."""
        return {"model_parallel_bytes": sum(self.sent.values())} if self.mesh.tp * self.mesh.pp > 1 else {}

    def close(self) -> list[tuple[str, Any]]:
        """Returns rows for the summary: bubble and bytes, measured and by formula. Destroys the groups."""
        mesh, settings, rows = self.mesh, self.settings, []
        if mesh.pp > 1:
            events = self.timeline.gather(mesh.pipeline)
            found = pictures.measured_bubble(events)
            formula = bubble_formula(settings.schedule, mesh.pp, settings.grad_accum, settings.virtual_stages)
            measured = "not measured" if found is None else f"{found:.1%} measured"
            how = "(p - 1) / p" if settings.schedule == "naive" else "(p - 1) / (v m + p - 1)"
            rows.append(("bubble", f"{measured}, {formula:.1%} by {how}"))
            if settings.timeline and mesh.ranks.is_main:
                pictures.write(events, Path(settings.timeline))
        if mesh.tp > 1 and self.sent and settings.backend == "own":
            tokens = settings.batch_size // mesh.dp * settings.seq_len
            whole = tokens * settings.model.n_embd * (4 if settings.precision == "fp32" else 2)
            again = settings.activation_checkpointing  # recomputing repeats f and g of attention, f of the MLP
            passes = {"attention": 3 if again else 2, "mlp": 2 + 0.5 * (again and settings.sequence_parallel)}
            for kind, number in passes.items():
                sent = self.sent[kind] / len(self.model.transformer.h) / MIB
                formula = number * 2 * (mesh.tp - 1) / mesh.tp * whole / MIB
                rows.append((f"{kind}: bytes", f"{sent:.3f} MiB sent a layer and step by each rank, {formula:.3f} by "
                             f"{number:g} x 2 (t - 1) / t of B T C"))  # fmt: skip
        self.timeline.events.clear()
        mesh.close()
        return rows or [("split", "none: one rank holds the model")]


def whole_name(parameter: Tensor, name: str) -> str:
    """A parameter's name in the whole model; it differs from `name` if a backend has renamed the parameter."""
    return getattr(parameter, "whole_name", name)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _sum(grads: list[Tensor], group: Any) -> None:
    """Sums gradients over a group in one message, in place."""
    grads = [_local(grad) for grad in grads]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, piece in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(piece.view_as(grad))
