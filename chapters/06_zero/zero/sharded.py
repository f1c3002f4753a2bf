"""What all stages of ZeRO share: units, this rank's pieces of them, reductions in backward, the update, checkpoints."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from durable.calls import name_next
from gpt2_chinese.checkpoint.sharded import Part, write_whole
from gpt2_chinese.run.optim import adamw
from zero.checkpoint import load_pieces, parts_of
from zero.comm import Comm, Result
from zero.end_of_backward import call_at_end_of_backward
from zero.ledger import Ledger
from zero.offload import Host
from zero.units import Piece, Unit, flatten, groups_of

DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Sharded:
    """The methods that train.py calls, for every stage. The arguments are those of `shard`.

    A subclass defines `_after_backward` (a block's gradients are complete), `_backward_is_done` (all are complete), and
    `publish` (after an update).

    Attributes:
        units: groups of parameters that are reduced together: first those outside the blocks, then each block.
        host: host memory if the optimizer is offloaded, else None; params_on_host: parameter shards too.
        ledger: bytes of model states, measured.
    """

    def __init__(self, model: nn.Module, ranks: Any, settings: Any) -> None:
        self.model, self.stage, self.device, self.ranks = model, settings.zero_stage, ranks.device, ranks
        self.comm = Comm(ranks)
        self.host = Host(ranks.device) if settings.offload != "none" else None
        self.params_on_host = False
        self.synchronizing = True
        dtype = DTYPE[settings.precision]
        rank, num_shards = (self.comm.rank, self.comm.num_ranks) if self.stage else (0, 1)
        self.units: list[Unit] = []
        for module, parameters in groups_of(model):
            weights = flatten(parameters, num_shards)
            self.comm.broadcast(weights)
            self.units.append(Unit(module, parameters, weights, dtype, (rank, num_shards)))
        for buffer in model.buffers():
            self.comm.broadcast(buffer)
            buffer.data = buffer.to(dtype) if buffer.is_floating_point() else buffer
        if self.host is not None:
            for unit in self.units:
                unit.master = self.host.copy_of(unit.master)
                unit.cut_pieces()
        self.optimizer: torch.optim.Optimizer | None = None
        self.ledger = Ledger(self)
        self.num_updates = {name: 0 for unit in self.units for name in unit.parameters}
        self._used: dict[str, bool] = {}  # name: whether it got a gradient in this step
        self._reduced: set[Unit] = set()  # units already reduced in this step
        self._under_way: list[tuple[Unit, Result]] = []
        for unit in self.units:
            if unit.module is not None:
                unit.module.register_forward_pre_hook(functools.partial(self._before_forward, unit))
                unit.module.register_full_backward_hook(lambda *_, unit=unit: self._after_backward(unit))
        model.register_forward_hook(self._after_forward)

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs)

    @contextlib.contextmanager
    def no_sync(self, active: bool = True) -> Iterator[None]:
        """While active, stages 0 and 1 only add up gradients on this rank. Use it for all micro-batches but the last."""
        before, self.synchronizing = self.synchronizing, not active
        try:
            yield
        finally:
            self.synchronizing = before

    # ---- the optimizer sees this rank's pieces as if they were a model's parameters -------------------------------------

    @property
    def pieces(self) -> list[Piece]:
        """The pieces that this rank owns."""
        return [piece for unit in self.units for piece in unit.pieces]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The fp32 masters of this rank's pieces."""
        return (piece.master for piece in self.pieces)

    def make_optimizer(self, settings: Any) -> torch.optim.Optimizer:
        """The AdamW of all chapters, on this rank's pieces: it works element by element, so cuts do not matter."""
        self.optimizer = adamw(self, settings)
        return self.optimizer

    # ---- backward: hooks of the blocks ----------------------------------------------------------------------------------

    def _before_forward(self, unit: Unit, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        wanted = any(isinstance(each, Tensor) and each.requires_grad for each in inputs)
        if torch.is_grad_enabled() and not wanted:
            name = next(iter(unit.parameters))
            raise RuntimeError(f"the block of {name} has an input without gradient: the end of its backward cannot be seen")

    def _after_forward(self, _: nn.Module, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            call_at_end_of_backward(output, self._backward_is_done)

    def _after_backward(self, unit: Unit) -> None:
        """Called when a block's gradients are complete: autograd accumulates them before it runs this hook."""
        raise NotImplementedError

    def _backward_is_done(self) -> None:
        """Called when all gradients are complete."""
        raise NotImplementedError

    def _reduce_the_last(self) -> None:
        """Reduces the parameters outside the blocks (the tied embedding's gradient comes last), and ends all reductions."""
        self._reduce(self.units[0])
        late = [name for unit in self.units for name, p in unit.parameters.items() if p.grad is not None]
        if late:
            raise RuntimeError(f"rank {self.comm.rank}: the gradient of {late[0]} came after its block was reduced")
        self._finish(0)

    def _reduce(self, unit: Unit) -> None:
        """Starts the reduction of a unit's gradients, then ends the previous one: at most two are under way."""
        self._reduced.add(unit)
        for name, parameter in unit.parameters.items():
            self._used[name] = self._used.get(name, False) or parameter.grad is not None
        self.ledger.note_gradients()
        flat = unit.take_gradients()
        reduce = self.comm.all_reduce_mean if self.stage == 0 else self.comm.reduce_scatter_mean
        name_next(unit.name)
        self._under_way.append((unit, reduce(flat)))
        self._finish(1)

    def _finish(self, left: int) -> None:
        while len(self._under_way) > left:
            unit, result = self._under_way.pop(0)
            grad = result() if self.host is None else self.host.out(result())
            if self.host is not None and unit.grad is not None:
                self.host.arrive()  # micro-batches are added on the host
            unit.grad = grad if unit.grad is None else unit.grad.add_(grad)

    # ---- the step -------------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Waits until this rank's pieces have mean gradients in fp32. Call it once a step on all ranks, before clipping."""
        self.ledger.sample("after backward")
        for unit in reversed(self.units):
            if unit not in self._reduced:
                self._reduce(unit)
        self._finish(0)
        if self.host is not None:
            self.host.arrive()
        self.ledger.sample("after backward")
        self._agree_on_used()
        for unit in self.units:
            for piece in unit.pieces:
                run = unit.grad[piece.offset : piece.offset + piece.numel].view_as(piece.master)
                piece.master.grad = run.float() if self._used[piece.name] else None
            unit.grad = None  # in fp32 the pieces' gradients are views of this tensor
        self._reduced.clear()
        self.ledger.sample("in the update")

    def _agree_on_used(self) -> None:
        """A parameter that no rank used keeps gradient None: the optimizer skips it, as on one process."""
        flags = torch.tensor([self._used[name] for name in self.num_updates], dtype=torch.int32, device=self.device)
        self._used = dict(zip(self.num_updates, (self.comm.sum(flags) > 0).tolist(), strict=True))

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales all gradients down to a global norm of `max_norm` (0: no clipping); returns the norm before, a scalar.

        The squared global norm is the sum of the shards' squared norms, so each rank sends one number.
        """
        gradients = [master.grad for master in self.parameters() if master.grad is not None]
        squares = [torch.linalg.vector_norm(gradient, dtype=torch.float64).square() for gradient in gradients]
        square = sum(squares, torch.zeros((), dtype=torch.float64)).to(self.device)
        norm = (square if self.stage == 0 else self.comm.sum(square)).sqrt()
        if max_norm and gradients:
            torch._foreach_mul_(gradients, float((max_norm / (norm + 1e-6)).clamp(max=1.0)))
        return norm.float()

    def publish(self) -> None:
        """Copies the updated masters to the model, on all ranks."""
        raise NotImplementedError

    def _end_update(self) -> None:
        for master in self.parameters():
            master.grad = None
        for name, used in self._used.items():
            self.num_updates[name] += used
        self._used = {}

    def step_scalars(self) -> dict[str, float]:
        """Values for metrics.jsonl: bytes sent (by the formulas) and moved between device and host. Resets the counts."""
        self.comm.end_step()
        sent = {f"{what.replace('-', '_')}_sent_bytes": n for what, n in self.comm.last_sent.items()}
        return {**sent, **(self.host.end_step() if self.host else {})}

    def close(self) -> list[tuple[str, Any]]:
        """Rows for the summary: bytes of model states and of communication, measured and by the formulas."""
        return self.ledger.rows()

    # ---- checkpoints ----------------------------------------------------------------------------------------------------

    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
        """Loads this rank's pieces from a checkpoint of any chapter. Run.resume_parts calls it.

        Raises:
            UserError: names or shapes differ.
        """
        load_pieces(self.pieces, self.num_updates, self.optimizer, weights, moments)
        self.num_updates |= {name: int(moments[f"step.{name}"]) for name in weights if f"step.{name}" in moments}
        self.publish()

    def parts(self) -> tuple[dict[str, Part], dict[str, int]]:
        """For Run.save_parts: this rank's pieces of masters and moments, and the counts of updates."""
        kinds = {"model.": lambda piece: piece.master}
        for kind in ("exp_avg", "exp_avg_sq"):
            kinds[f"{kind}."] = lambda piece, kind=kind: self.optimizer.state.get(piece.master, {}).get(kind)
        parts = {kind + name: part for kind, values in kinds.items() for name, part in parts_of(self.pieces, values).items()}
        return parts, self.num_updates

    def write_weights(self, file: Path) -> None:
        """Writes all fp32 masters as whole tensors, for final/. All ranks must call it."""
        write_whole(file, parts_of(self.pieces, lambda piece: piece.master), self.ranks)
