"""The optimizer front: a torch.optim.Optimizer whose states lie in chunks."""

from collections.abc import Callable

import torch

from pstar.chunks import Chunks
from pstar.errors import StateError
from pstar.kernels import AdamUpdate, adam_steps
from pstar.layout import Group, Span

LOW, EXP_AVG, EXP_AVG_SQ = "low", "exp_avg", "exp_avg_sq"


class ChunkedAdam(torch.optim.Optimizer):
    """Adam and AdamW over chunks. Parameter groups and learning-rate schedulers work as on any torch optimizer.

    Each group of chunks is updated in its home tier, where its states are: only gradients and parameters travel. The
    global norm is taken per parameter and then over parameters in the model's order, exactly as clip_grad_norm_ does, so
    that no layout changes it while a parameter lies on one rank (on several its norm is the root of a sum of parts).

    Args:
        param_groups: as for any torch optimizer.
        chunks: the parameters and gradients.
        adamw: decoupled weight decay, or Adam with L2 regularisation.
        clip_norm: largest global norm; 0 for no clipping.
        defaults: lr, betas, eps, weight_decay.
    """

    def __init__(self, param_groups: list[dict], chunks: Chunks, adamw: bool, clip_norm: float, defaults: dict):
        super().__init__(param_groups, defaults)
        self.chunks, self.residency = chunks, chunks.residency
        self.adamw, self.clip_norm = adamw, clip_norm
        self.split = chunks.param_dtype == torch.bfloat16
        self.state_kinds = {EXP_AVG: torch.float32, EXP_AVG_SQ: torch.float32} | ({LOW: torch.int16} if self.split else {})
        self.grad_norm: float | None = None
        """Global norm of the last step's gradients, before clipping."""
        self.steps = dict.fromkeys(chunks.params, 0)
        for group in chunks.layout.groups:
            for kind, dtype in self.state_kinds.items():
                key = (kind, group.index)
                self.residency.create(key, group.piece_elems, dtype, chunks.home[group.index]).zero_()
                self.residency.pin(key)    # states stay where their update is computed

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients."""
        self.chunks.drop_grads()

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """One update of every parameter that got a gradient on some rank."""
        if closure is not None:
            raise StateError("ChunkedAdam.step takes no closure: call model.backward(loss) before it")
        norms, used = self._norms()
        total = torch.linalg.vector_norm(norms)
        self.grad_norm = float(total)
        scale = 1.0
        if self.clip_norm > 0:
            scale = float(torch.clamp(self.clip_norm / (total + 1e-6), max=1.0))
        for name in used:
            self.steps[name] += 1
        options = self._options()
        for group in self.chunks.layout.groups:
            if ("grad", group.index) in self.residency:
                self._update(group, scale, used, options)
        self.chunks.drop_grads()
        self.residency.schedule.end_step()
        self.residency.ledger.end_step()

    def _norms(self) -> tuple[torch.Tensor, set[str]]:
        """(fp32 norm of each parameter's gradient in the model's order, names of those that have one).

        Squares travel as float64, in which the square of an fp32 number is exact: where one rank holds the whole parameter
        the sum over ranks and the root give back the very norm it computed.
        """
        names = list(self.chunks.params)
        number = {name: index for index, name in enumerate(names)}
        sums = torch.zeros(2, len(names), dtype=torch.float64)
        for group in self.chunks.layout.groups:
            if ("grad", group.index) not in self.residency:
                continue
            _, grads = self.residency.peek(("grad", group.index))
            for span in self._spans(group):
                if self.chunks.arrived(span.name):
                    part = grads[span.piece_offset : span.piece_offset + span.numel]
                    norm = torch.linalg.vector_norm(part, dtype=torch.float32)
                    sums[0, number[span.name]] += float(norm) ** 2
        for name in names:
            sums[1, number[name]] = float(self.chunks.arrived(name))
        sums = self.chunks.collectives.sum(sums.to(self.chunks.device)).cpu()
        used = {name for name in names if sums[1, number[name]] > 0}
        present = torch.tensor([name in used for name in names])
        return sums[0].sqrt().to(torch.float32)[present], used

    def _update(self, group: Group, scale: float, used: set[str], options: dict[str, dict]) -> None:
        """Adam on this rank's piece of one group, in the group's home tier."""
        tier = self.chunks.home[group.index]
        self.chunks.drop_gathered(group.index)
        buffers = {}
        for kind in ("param", "grad", *self.state_kinds):
            buffers[kind] = self.residency.ensure((kind, group.index), tier)
            self.residency.pin((kind, group.index))
        updates = []
        for span in self._spans(group):
            if span.name in used:
                part, option = slice(span.piece_offset, span.piece_offset + span.numel), options[span.name]
                own = {kind: buffers[kind][part] for kind in ("param", "grad", *self.state_kinds)}
                updates.append(AdamUpdate(**own, step=self.steps[span.name], lr=float(option["lr"]), betas=option["betas"],
                                          eps=option["eps"], weight_decay=option["weight_decay"], adamw=self.adamw,
                                          grad_scale=scale))
        adam_steps(updates)
        for kind in buffers:
            self.residency.unpin((kind, group.index))
            self.residency.mark_written((kind, group.index), tier)

    def _spans(self, group: Group) -> list[Span]:
        return group.spans(self.chunks.collectives.rank)

    def _options(self) -> dict[str, dict]:
        """Each parameter's hyper-parameters, as they are now in param_groups."""
        names = {id(param): name for name, param in self.chunks.params.items()}
        return {names[id(param)]: group for group in self.param_groups for param in group["params"]}

    def state_dict(self) -> dict:
        """param_groups only: weights and moments are gathered by the engine's gather_state."""
        state = super().state_dict()
        return {"param_groups": state["param_groups"], "state": {}}
