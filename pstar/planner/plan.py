"""Layout, budgets and bytes a parameter, from a model's shapes and a configuration, before any memory is allocated."""

from collections.abc import Callable
from pathlib import Path

import torch

from pstar.config import Config, load_config
from pstar.errors import BudgetError, ConfigError
from pstar.layout.budget import (
    Costs,
    choose_near_states,
    largest_chunk_elems,
    model_data_bytes,
    near_states_for_capacity,
    smallest_far_budget,
    smallest_near_budget,
    smallest_streaming_budget,
)
from pstar.layout.layout import Layout, ModuleSpec, align, candidate_layouts, least_waste, make_layout
from pstar.memory.disk import check_disk_path
from pstar.memory.tier import parse_bytes
from pstar.modules.host_embedding import compute_embeddings_far
from pstar.modules.lazy_init import build
from pstar.modules.scope import mode_of, used_by
from pstar.numerics.precision import Precision


class Plan:
    """The layout and budgets for a model's shapes and a configuration, before any memory is allocated.

    Args:
        module: the model; the meta device suffices.
        config: a checked configuration.
        num_ranks: p.
        default_near_bytes: the near budget if the configuration says auto; None means all model data.

    Raises ConfigError, and BudgetError if a budget is too small.
    """

    def __init__(self, module: torch.nn.Module, config: Config, num_ranks: int, default_near_bytes: int | None = None):
        self.config = config
        names = {id(param): name for name, param in module.named_parameters() if mode_of(param) is None}
        specs, placed = [], set()
        uses: dict[str, tuple[str, ...]] = {}
        for module_name, child in module.named_modules():
            own = {names[id(param)]: param.numel() for param in used_by(child) if id(param) in names}
            uses[module_name] = tuple(own)
            specs.append(ModuleSpec(module_name, tuple((n, size) for n, size in own.items() if n not in placed)))
            placed |= set(own)
        self.precision = Precision(config.precision)
        self.param_dtype = self.precision.param_dtype
        self.accumulates = config.gradient_accumulation_steps > 1
        self.grad_dtype = self.precision.grad_dtype(self.accumulates)
        self.costs = Costs(self.param_dtype.itemsize, self.grad_dtype.itemsize, self.precision.state_bytes)
        self._default_near_bytes = default_near_bytes
        layouts = self._candidates(specs, num_ranks)
        # (layout, the least near bytes it needs, the module that needs them)
        needs = [(layout, *smallest_near_budget(layout, uses, self.costs, config.communication)) for layout in layouts]
        fitting = [layout for layout, need, _ in needs if config.near_budget != "min" and need <= self._near_bytes(layout)]
        least_layout, least, module_name = min(needs, key=lambda item: item[1])
        if config.near_budget == "min":
            fitting = [layout for layout, need, _ in needs if need == least]
        if not fitting:
            raise BudgetError(
                f"near budget {config.near_budget} ({self._near_bytes(least_layout)} bytes) is too small: module "
                f"'{module_name}' and its gradients need {least} on {num_ranks} process(es): give at least {least}, that is "
                f"{-(-100 * least // model_data_bytes(least_layout, self.costs))}% of the model data, or min; "
                "pstar.tile_linears cuts a large nn.Linear into smaller modules"
            )
        self.layout = least_waste(fitting)
        self.near_budget = least if config.near_budget == "min" else self._near_bytes(self.layout)
        self.least_near = next(need for layout, need, _ in needs if layout is self.layout)
        """Bytes of near with which every module can run: chunks need them in any case."""
        streaming = smallest_streaming_budget(self.layout, self.costs)
        if config.far_states == "stream":
            if config.near_budget == "min":
                self.near_budget = max(self.near_budget, streaming)
            if self.near_budget < streaming:
                raise BudgetError(f"near budget {config.near_budget} ({self.near_budget} bytes) is too small for far_states "
                                  f"stream: the update of one group needs {streaming}; give that, or a smaller chunk size")
            self.least_near = max(self.least_near, streaming)
        self.near_memory = None
        if config.near_memory != "auto":
            try:
                self.near_memory = parse_bytes(config.near_memory, 0)
            except ConfigError as error:
                raise ConfigError(f"near_memory is {config.near_memory!r}; give bytes, as 12GiB, or auto") from error
        whole = model_data_bytes(self.layout, self.costs)
        self.near_state_groups = []
        if config.optimizer.params.use_hybrid_adam and config.near_memory == "auto":    # else a step measures the margin
            self.near_state_groups = self.choose_near_states(self.near_budget)
        self.far_budget = None if config.far_budget == "auto" else parse_bytes(config.far_budget, whole)
        least_far = smallest_far_budget(self.layout, self.near_state_groups, self.costs,
                                        self.accumulates or config.find_unused_parameters)
        if config.disk_path is not None:
            check_disk_path(Path(config.disk_path))
            least_far = streaming
        all_near = len(self.near_state_groups) == len(self.layout.groups)
        self.stays_near = (num_ranks == 1 and self.near_memory is None and all_near and self.near_budget >= whole
                           and config.profile is None and not config.offload_activations)
        """Whether no block is ever evicted from near, so that modules need not acquire their parameters."""
        self.disk_budget = None if config.disk_budget == "auto" else parse_bytes(config.disk_budget, whole)
        may_fill = config.optimizer.params.use_hybrid_adam and config.near_memory == "auto"
        if self.far_budget is not None and self.far_budget < least_far and may_fill:
            # Far alone is too small: near takes states instead of parameters, which are then copied and evicted.
            working = smallest_near_budget(self.layout, uses, self.costs, config.communication)[0]
            near_groups = near_states_for_capacity(self.layout, self.near_budget, working, self.costs)
            least_full = smallest_far_budget(self.layout, near_groups, self.costs,
                                             self.accumulates or config.find_unused_parameters, grads_wait_far=True)
            if least_full < least_far:
                self.near_state_groups, least_far = near_groups, least_full
        if self.far_budget is not None and self.far_budget < least_far:
            raise BudgetError(
                f"far budget {config.far_budget} ({self.far_budget} bytes) is too small: the chunks of one of {num_ranks} "
                f"process(es) need {least_far}: give at least {least_far}, that is {-(-100 * least_far // whole)}% of the "
                f"model data, or auto{'' if config.disk_path else ', or a disk_path'}"
            )
        self.activation_room = None if self.far_budget is None else self.far_budget - least_far

    def choose_near_states(self, room: int) -> list[int]:
        """The groups whose optimizer states are in near, if chunks have `room` bytes there."""
        layout, costs = self.layout, self.costs
        near = choose_near_states(self.config.near_states, layout, room, costs, self.config.communication, self.least_near,
                        self.config.prefetch)
        if self.config.far_states == "stream" and len(near) < len(layout.groups):
            # States in near never leave it: one streamed group must fit in addition to them.
            left = room - smallest_streaming_budget(layout, costs)
            while near and costs.states * sum(layout.groups[index].piece_elems for index in near) > left:
                near.pop()
        return near

    def _near_bytes(self, layout: Layout) -> int:
        whole = model_data_bytes(layout, self.costs)
        if self.config.near_budget == "auto":
            return self._default_near_bytes or whole
        return parse_bytes(self.config.near_budget, whole)

    def _candidates(self, specs: list[ModuleSpec], num_ranks: int) -> list[Layout]:
        """The layout of the configured chunk size, or layouts to choose from."""
        config = self.config
        if config.default_chunk_size != "auto":
            whole = sum(align(size) for spec in specs for _, size in spec.parameters)    # a larger chunk is padding
            chunk = min(config.default_chunk_size, max(whole, 1))
            return [make_layout(specs, chunk, num_ranks, config.ownership)]
        params = sum(size for spec in specs for _, size in spec.parameters)
        chunks_a_group = num_ranks if config.ownership == "whole" and config.communication == "group" else 1
        # At least four groups, so that one can be copied while another is in use, and at most 64 Mi elements a chunk.
        most = min(params // (4 * chunks_a_group), 64 * 2**20)
        if config.near_budget not in ("auto", "min"):
            near = parse_bytes(config.near_budget, self.costs.total * params)
            most = min(most, largest_chunk_elems(near, num_ranks, self.costs) * num_ranks // chunks_a_group)
        return candidate_layouts(specs, num_ranks, most, config.ownership)


def plan_engine(model_func: Callable[[], torch.nn.Module], config: "dict | str | Path | Config | None" = None,
                num_ranks: int = 1) -> Plan:
    """Checks a configuration against a model before any process is started; builds the model without memory if possible.

    Raises the errors that initialize_engine would raise.
    """
    module, config = build(model_func)[0], load_config(config)
    if config.use_cpu_embedding:
        compute_embeddings_far(module, torch.device("cpu"))
    return Plan(module, config, num_ranks)
