"""initialize_engine: a model and a configuration become an engine and its optimizer."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pstar.budget import model_data_bytes
from pstar.checkpoint import gather_state, load_state
from pstar.chunks import Chunks
from pstar.collectives import Collectives
from pstar.config import Config, load_config
from pstar.errors import ConfigError, StateError
from pstar.hooks import Hooks
from pstar.optimizer import ChunkedAdam
from pstar.plan import Plan
from pstar.residency import Residency
from pstar.schedule import Schedule
from pstar.tiers import FAR, MOVES, NEAR, Ledger, Tier, format_bytes


class Engine(torch.nn.Module):
    """A module whose model data live in chunks. Called like the module; made by initialize_engine.

    Attributes:
        module: the model. Its parameters have memory only while they are in use.
        layout, ledger, near, far: what lies where, and what was moved (see memory_table).
    """

    def __init__(self, module: torch.nn.Module, plan: Plan, collectives: Collectives, device: torch.device):
        super().__init__()
        self.module, self.config, self.layout = module, plan.config, plan.layout
        self.device, self.costs = device, plan.costs
        on_gpu = device.type == "cuda"
        self.ledger = collectives.ledger
        self.near = Tier(NEAR, device, plan.near_budget)
        self.far = Tier(FAR, torch.device("cpu"), plan.far_budget, pin_memory=on_gpu)
        self.schedule = Schedule(plan.config.eviction_policy)
        self._residency = Residency(self.near, self.far, self.ledger, self.schedule, lambda key: self._chunks.on_leave(key))
        self._params = dict(module.named_parameters())
        self._chunks = Chunks(plan.layout, self._params, self._residency, collectives, plan.param_dtype, plan.grad_dtype,
                              device)
        for group in plan.near_homes:
            self._chunks.home[group] = NEAR
        for group in plan.layout.groups:
            self._residency.create(("param", group.index), group.piece_elems, plan.param_dtype, FAR).zero_()
        self._optimizer: ChunkedAdam | None = None
        self._micro_step = 0

    def _take_over(self, param_groups: list[dict]) -> ChunkedAdam:
        """Moves the module's weights into chunks and installs the hooks: the module has no memory of its own any more."""
        settings = self.config.optimizer
        self._optimizer = ChunkedAdam(param_groups, self._chunks, settings.type == "AdamW", self.config.gradient_clipping,
                                      asdict(settings.params))
        load_state(self._optimizer, {name: param.data for name, param in self._params.items()})
        for group in self.layout.groups:
            self._chunks.release_data(group.index)
        for buffer in self.module.buffers():
            buffer.data = buffer.data.to(self.device)
        self._hooks = Hooks(self.module, self._chunks)
        self.ledger.reset()
        return self._optimizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward. With gradients it is part of a training step; without, it leaves the schedule alone."""
        training = torch.is_grad_enabled() and self.training
        if training and not self.schedule.in_step:
            self.schedule.begin_step()
            self.ledger.begin_step()
        args, kwargs = self._cast(args), {name: self._cast(value) for name, value in kwargs.items()}
        with nullcontext() if training else self.schedule.paused():
            return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of loss / gradient_accumulation_steps; after the last micro-step they are averaged over the ranks."""
        if not self.schedule.in_step:
            raise StateError("model.backward(loss) without a training forward before it: call model(...) in train mode")
        steps = self.config.gradient_accumulation_steps
        self._micro_step += 1
        self._hooks.last_micro_step = self._micro_step == steps
        (loss / steps if steps > 1 else loss).backward()
        self._hooks.end_backward()
        self._micro_step %= steps

    def _cast(self, value: Any) -> Any:
        """Floating inputs in the dtype of the parameters."""
        if isinstance(value, tuple):
            return tuple(self._cast(item) for item in value)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(self._chunks.param_dtype)
        return value

    # ---------------------------------------------------------------- state

    def gather_state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(weights, moments) by plain names on rank 0, empty dicts elsewhere; see pstar.checkpoint. Every rank calls it."""
        return gather_state(self._optimizer)

    def load_state(self, weights: dict[str, torch.Tensor], moments: dict[str, torch.Tensor] | None = None) -> None:
        """Puts gathered tensors back, at any number of ranks and with any chunk size."""
        load_state(self._optimizer, weights, moments)

    # ---------------------------------------------------------------- what it did

    @property
    def model_data_bytes(self) -> int:
        """Bytes of model data that exist on this rank now, each counted once, padding included."""
        return self._residency.model_bytes()

    def memory_plan(self) -> list[tuple[str, str]]:
        """(name, value) rows for people: the chunks and the budgets, as they are before the first step."""
        layout, budgets = self.layout, []
        for tier in (self.near, self.far):
            bound = "no bound" if tier.budget_bytes is None else format_bytes(tier.budget_bytes)
            budgets.append(f"{tier.name} {bound}")
        whole = model_data_bytes(layout, self.costs)
        return [
            ("chunks", f"{layout.chunk_elems:,} elements each (larger parameters apart), in {len(layout.groups)} groups of "
                       f"{layout.num_ranks} {'' if self.config.ownership == 'whole' else 'pieces of one '}(one a rank), "
                       f"{layout.utilisation:.1%} used"),
            ("model data", f"{format_bytes(whole)} in all, {self.costs.total} bytes a parameter"),
            ("budgets", f"{', '.join(budgets)} ({self.near.device.type}) on each of {layout.num_ranks} process(es); "
                        f"eviction by {self.schedule.policy}"),
        ]

    def memory_table(self) -> list[tuple[str, str]]:
        """(name, value) rows for people: what the tiers held at most, and what the last step moved, on this rank."""
        near_homes = sum(tier == NEAR for tier in self._chunks.home)
        rows = self.memory_plan()
        for tier in (self.near, self.far):
            rows.append((tier.name, f"{format_bytes(tier.used_bytes)} now, {format_bytes(tier.peak_bytes)} at most"))
        rows.append(("Adam", f"{near_homes} groups updated near, {len(self.layout.groups) - near_homes} far"))
        rows += [(kind, f"{format_bytes(self.ledger.step_bytes[kind])} a step") for kind in MOVES]
        return rows

    def step_scalars(self) -> dict[str, int]:
        """Numbers of the last step for a metrics log, in bytes, of this rank."""
        moved = {f"{kind.replace(' ', '_')}_bytes": self.ledger.step_bytes[kind] for kind in MOVES}
        return {"near_bytes": self.near.used_bytes, "near_peak_bytes": self.near.peak_bytes,
                "far_bytes": self.far.used_bytes} | moved


def initialize_engine(model_func: Callable[[], torch.nn.Module], local_rank: int = 0,
                      config: "dict | str | Path | Config | None" = None, *,
                      param_groups: Callable[[torch.nn.Module], list[dict]] | None = None,
                      group: Any = None, device: "torch.device | str | None" = None) -> tuple[Engine, ChunkedAdam]:
    """Builds the model, moves it into chunks, and returns (model, optimizer).

    The loop: optimizer.zero_grad(); loss = model(batch); model.backward(loss); optimizer.step().

    Args:
        model_func: makes the model; every rank must make the same one.
        local_rank: number of this process on its machine, and of its GPU.
        config: a dict, a JSON file, a Config, or None for all defaults.
        param_groups: from the module to parameter groups as torch.optim takes them; default: one group of all.
        group: process group; default: the default group where torch.distributed is initialised, else one process.
        device: of near; default: this process's GPU where there is one, else host memory.

    Raises:
        ConfigError: the configuration cannot be run. BudgetError: the budget cannot hold one module's working set.
    """
    config = load_config(config)
    if device is None:
        device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    default_near = None
    if device.type == "cuda":
        default_near = int(0.4 * torch.cuda.get_device_properties(device).total_memory)
    module = model_func()
    collectives = Collectives(group, Ledger())
    plan = Plan(module, config, collectives.num_ranks, default_near)
    engine = Engine(module, plan, collectives, device)
    groups = param_groups(module) if param_groups else [{"params": list(module.parameters())}]
    listed = sum(len(entry["params"]) for entry in groups)
    if listed != len(list(module.parameters())):
        raise ConfigError(f"param_groups lists {listed} parameters, the model has {len(list(module.parameters()))}")
    return engine, engine._take_over(groups)
