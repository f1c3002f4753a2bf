"""Parameters outside the chunks (see scope.py): ordinary tensors with masters and moments, on near's device, or in host
memory if their module computes there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from pstar.comm.collectives import Collectives
from pstar.errors import StateError
from pstar.kernels import adam_steps
from pstar.layout.layout import num_blocks
from pstar.modules.scope import Outside, mode_of
from pstar.numerics.grad_norm import parameter_norms
from pstar.numerics.precision import EXP_AVG, EXP_AVG_SQ, MASTER, PARAM, SCALES, Precision

SUM_ELEMS = 2**19
"""Elements a collective sums at once; bounded by the staging area of shared memory."""


def _widen(param: torch.nn.Parameter) -> None:
    """From a step's first micro-step on, its gradient is in fp32: those of the other micro-steps are added in fp32."""
    if param.grad.dtype != torch.float32:
        param.grad = param.grad.float()


class OutsideParams:
    """Values, gradients and states of these parameters. Every rank must have the same names in the same order.

    Args:
        params: qualified name to parameter, in the model's order; adopt() moves them.
        precision: compute dtype and states.
        accumulates: sum the gradients of micro-steps in fp32.
        collectives, device: as for the chunks.
    """

    def __init__(self, params: Mapping[str, torch.nn.Parameter], precision: Precision, accumulates: bool,
                 collectives: Collectives, device: torch.device):
        self.params, self.precision, self.collectives, self.device = dict(params), precision, collectives, device
        self.modes = {name: mode_of(param) for name, param in params.items()}
        self.shapes = {name: param.shape for name, param in params.items()}
        self._devices = {name: torch.device("cpu") if mode == Outside.FAR else device for name, mode in self.modes.items()}
        self._grad_dtype = precision.grad_dtype(accumulates)
        self.frozen = frozenset(name for name, param in params.items() if not param.requires_grad)
        """Those that were frozen at the start: they have no states."""
        self._without_states = Precision(precision.name, frozen=True)
        self._buffers: dict[str, dict[str, torch.Tensor]] = {}

    def keys(self, name: str) -> list[str]:
        """The parameter's names in a checkpoint: one, or NAME@RANK for each rank if it is LOCAL (differs between ranks)."""
        local = self.modes[name] == Outside.LOCAL
        return [f"{name}@{rank}" for rank in range(self.collectives.num_ranks)] if local else [name]

    def own_key(self, name: str) -> str:
        """This rank's name among keys()."""
        keys = self.keys(name)
        return keys[self.collectives.rank] if self.modes[name] == Outside.LOCAL else keys[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of parameters and states on this rank."""
        return sum(buffer.nbytes for buffers in self._buffers.values() for buffer in buffers.values())

    def check_frozen(self) -> None:
        """Raises StateError if a parameter that was frozen at the start requires a gradient now."""
        thawed = [name for name in self.params if name in self.frozen and self.params[name].requires_grad]
        if thawed:
            raise StateError(
                f"parameter {thawed[0]} was frozen when the engine started and requires a gradient now: it has no optimizer "
                "states. Freeze what will be trained later after initialize_engine, not in model_func")

    @torch.no_grad()
    def adopt(self) -> None:
        """Moves the parameters with their initial values to the device, in the compute dtype, and makes their states. All
        but LOCAL ones begin with the values of rank 0."""
        for name, param in self.params.items():
            device = self._devices[name]
            values = param.data.to(device, torch.float32).reshape(-1)
            precision = self._precision_of(name)
            kinds = {PARAM: precision.param_dtype, **precision.states}
            numel = values.numel()
            buffers = {kind: torch.zeros(precision.numel_of(kind, numel, num_blocks(numel)), dtype=dtype, device=device)
                       for kind, dtype in kinds.items()}
            buffers = precision.part_of(buffers, slice(None), slice(None))
            precision.write_master(values, buffers)
            param.data = buffers[PARAM].view(self.shapes[name])
            if param.requires_grad and param.dtype != self._grad_dtype:
                # With a grad_dtype of fp32 autograd would sum several uses in fp32: other bits than those of chunks.
                param.grad_dtype = None
                param.register_post_accumulate_grad_hook(_widen)
            self._buffers[name] = buffers
        same = [self._buffers[name] for name, mode in self.modes.items() if mode != Outside.LOCAL]
        self.collectives.copy_from_rank_0(buffer for buffers in same for kind, buffer in buffers.items()
                                          if kind not in (EXP_AVG, EXP_AVG_SQ, SCALES))    # these begin with zeros

    def _precision_of(self, name: str) -> Precision:
        return self._without_states if name in self.frozen else self.precision

    # --------------------------------------------------------------- gradients

    def drop_grads(self) -> None:
        for param in self.params.values():
            param.grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Averages the gradients of all but LOCAL parameters: divided first, then added in fp32, as in chunks.

        Ranks that did not use a parameter contribute zeros; a parameter that no rank used gets no gradient. Every rank calls
        it.
        """
        if self.collectives.num_ranks == 1:
            return
        names = [name for name, mode in self.modes.items() if mode != Outside.LOCAL and self.params[name].requires_grad]
        for name, users in zip(names, self._sum([self.params[name].grad is not None for name in names]), strict=True):
            if not users:
                continue
            param = self.params[name]
            grad = param.grad if param.grad is not None else torch.zeros_like(param, dtype=self._grad_dtype)
            mean = torch.div(grad, self.collectives.num_ranks).to(torch.float32).reshape(-1)
            parts = [self.collectives.sum(part.to(self.device).contiguous()) for part in mean.split(SUM_ELEMS)]
            param.grad = torch.cat(parts).to(param.device, self._grad_dtype).view(param.shape)

    def norms(self) -> tuple[dict[str, torch.Tensor], set[str]]:
        """(fp32 norm of each gradient, names that this rank must update); after reduce(). Every rank calls it.

        The norm of a LOCAL parameter is the root of the sum of squares over the ranks, so all ranks clip and skip equally.
        """
        self.check_frozen()    # again: a forward may have thawed one
        used = {name for name, param in self.params.items() if param.grad is not None}
        names = [name for name in self.params if name in used]
        norms = dict(zip(names, parameter_norms([self.params[name].grad for name in names]) if names else (), strict=True))
        names = [name for name, mode in self.modes.items() if mode == Outside.LOCAL]
        if names and self.collectives.num_ranks > 1:
            users = self._sum([name in used for name in names])
            squares = self._sum([float(norms.get(name, 0.0)) ** 2 for name in names])
            norms |= {name: torch.tensor(square, dtype=torch.float32, device="cpu").sqrt()
                      for name, count, square in zip(names, users, squares, strict=True) if count}
        return norms, used

    def _sum(self, values: Iterable[float]) -> list[float]:
        """The sums over the ranks, in float64, of one number for each parameter."""
        numbers = torch.tensor([float(value) for value in values], dtype=torch.float64, device=self.device)
        return self.collectives.sum(numbers).tolist() if len(numbers) else []

    @torch.no_grad()
    def update(self, used: set[str], fields: Callable[[str], Mapping[str, Any]]) -> None:
        """Adam on the parameters in `used`; fields returns a name's step, options and grad_scale, as in AdamUpdate."""
        updates = []
        for name, param in self.params.items():
            if name in used:
                self._take_changes(name)
                updates.append(self.precision.update(param.grad.reshape(-1), self._buffers[name], **fields(name)))
        adam_steps(updates)
        for name in used & self.params.keys():
            torch.autograd.graph.increment_version(self.params[name])    # autograd does not see what kernels write

    def _take_changes(self, name: str) -> None:
        """Takes over what the program wrote into the parameter: `param.data = other`, or in fp16 values other than those of
        the master, which the next update would overwrite."""
        param, place, master = self.params[name], self._buffers[name][PARAM], self._buffers[name].get(MASTER)
        if param.data_ptr() != place.data_ptr():
            place.copy_(param.data.reshape(-1))
            param.data = place.view(self.shapes[name])
        if master is not None:
            torch.where(master.to(place.dtype) == place, master, place.to(master.dtype), out=master)

    # ------------------------------------------------------------------- state

    @torch.no_grad()
    def read(self, name: str) -> dict[str, torch.Tensor]:
        """{kind: fp32 values in the parameter's shape, on the host} of the master (PARAM) and both moments, if any."""
        self._take_changes(name)
        buffers, precision = self._buffers[name], self._precision_of(name)
        moments = {kind: precision.read_moment(kind, buffers) for kind in (EXP_AVG, EXP_AVG_SQ) if kind in buffers}
        values = {PARAM: precision.read_master(buffers)} | moments
        return {kind: each.to("cpu").view(self.shapes[name]) for kind, each in values.items()}

    def read_codes(self, name: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """{kind: (codes in the parameter's shape, their scales (blocks,)), on the host} of 8-bit moments; else empty."""
        buffers = self._buffers[name]
        return {kind: (buffers[kind].to("cpu", copy=True).view(self.shapes[name]), scales.to("cpu", copy=True))
                for kind, scales in zip((EXP_AVG, EXP_AVG_SQ), buffers.get(SCALES, ()), strict=False)}

    @torch.no_grad()
    def write(self, kind: str, name: str, values: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        """Sets the master (kind PARAM) or a moment to values, which have its shape and any floating dtype.

        scales: of 8-bit moments, as in Precision.write_moment.
        """
        flat = values.to(self._devices[name], torch.float32).reshape(-1)
        if kind == PARAM:
            self._precision_of(name).write_master(flat, self._buffers[name])
        else:
            self._precision_of(name).write_moment(kind, flat, self._buffers[name], scales)
