"""Layout, budgets and bytes a parameter, from a model's shapes and a configuration, before any memory is allocated."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from pstar.config import Config, load_config
from pstar.errors import BudgetError, ConfigError
from pstar.kernels.build import find_compiler
from pstar.layout.budget import (
    Costs,
    auto_layouts,
    choose_near_states,
    model_data_bytes,
    near_data_bytes,
    near_states_for_capacity,
    smallest_far_budget,
    smallest_far_budget_with_disk,
    smallest_near_budget,
    smallest_streaming_budget,
)
from pstar.layout.layout import GPU_PACKING, HOST_PACKING, Layout, ModuleSpec, Packing, align, least_waste, make_layout
from pstar.memory.accelerator import is_accelerator
from pstar.memory.disk import check_disk_path
from pstar.memory.pinned import far_page_bytes
from pstar.memory.tier import parse_bytes
from pstar.modules.compiled_blocks import NO_BLOCKS, find_blocks, owners
from pstar.modules.host_embedding import compute_embeddings_far
from pstar.modules.lazy_init import build
from pstar.modules.scope import mode_of
from pstar.numerics.precision import Precision

Uses = Mapping[str, Sequence[str]]
"""The name of each module, and the names of the parameters that its forward uses."""


def module_specs(module: torch.nn.Module, blocks: Mapping[str, torch.nn.Module] = MappingProxyType({})
                 ) -> tuple[list[ModuleSpec], Uses]:
    """(each module with the parameters that it is the first to use, each module's name with all parameters that it uses).

    blocks: the compiled ones, each of which uses all parameters below it.
    """
    names = {id(param): name for name, param in module.named_parameters() if mode_of(param) is None}
    frozen = frozenset(name for name, param in module.named_parameters() if not param.requires_grad)
    matrices = frozenset(name for name, param in module.named_parameters() if param.dim() > 1)
    specs, uses, placed = [], {}, set()
    for module_name, _, acquired in owners(module, blocks):
        used = {names[id(param)]: param.numel() for param in acquired if id(param) in names}
        uses[module_name] = tuple(used)
        first = {name: size for name, size in used.items() if name not in placed}
        specs.append(ModuleSpec(module_name, tuple(first.items()), frozen & first.keys(), matrices & first.keys()))
        placed |= set(used)
    return specs, uses


def packing_of(device: torch.device) -> Packing:
    """How a layout for near on this device is chosen."""
    return GPU_PACKING if is_accelerator(device) else HOST_PACKING


def check_compiler(compile: str | list[str], device: torch.device) -> None:
    """Raises ConfigError if blocks are to be compiled and the machine lacks what torch.compile needs for that device."""
    if compile == NO_BLOCKS:
        return
    shown = compile if isinstance(compile, str) else ", ".join(compile)
    if device.type == "cpu" and find_compiler() is None:
        raise ConfigError(f"compile is {shown}, which needs a C++ compiler: install one (apt install g++), name "
                          "it in CXX, or set compile to none")
    if device.type != "cpu" and importlib.util.find_spec("triton") is None:
        raise ConfigError(f"compile is {shown}, which needs Triton on {device.type}: install the one that belongs "
                          "to your torch, or set compile to none")


class Plan:
    """The layout and budgets for a model's shapes and a configuration, before any memory is allocated.

    Args:
        module: the model; the meta device suffices.
        config: a checked configuration.
        num_ranks: p; with ownership node the ranks of a node, which share all chunks.
        default_near_bytes: the near budget if the configuration says auto; None means all model data.
        packing: of the kind of near's device.
        page_bytes: buffers of far are a multiple of it; 1: of any size.

    Raises ConfigError, and BudgetError if a budget is too small.
    """

    def __init__(self, module: torch.nn.Module, config: Config, num_ranks: int, default_near_bytes: int | None = None,
                 packing: Packing = HOST_PACKING, page_bytes: int = 1):
        self.config, self._default_near_bytes, self._packing = config, default_near_bytes, packing
        self.precision = Precision(config.precision, state_bits=config.optimizer.params.state_bits)
        self.costs = Costs(self.param_dtype.itemsize, self.grad_dtype.itemsize, self.precision.state_bytes,
                           self.precision.scale_bytes, config.frozen_bits, page_bytes)
        specs, uses = module_specs(module, find_blocks(module, config.compile))
        self.near_memory = None if config.near_memory == "auto" else self._parse_near_memory()
        self.layout, self.near_budget, self.least_near = self._fit_near(specs, uses, num_ranks)
        """least_near: bytes of near with which every module can run. Chunks need them in any case."""
        if self.near_memory is not None and self.near_memory < self.least_near:
            raise BudgetError(f"near_memory {config.near_memory} is too small: chunks alone need {self.least_near} bytes: "
                              "give as much and what activations take, or auto")
        self.near_state_groups = self.choose_near_states(self.near_budget) if self._states_near else []
        whole = model_data_bytes(self.layout, self.costs)
        all_near = len(self.near_state_groups) == len(self.layout.trained)
        self.stays_near = (num_ranks == 1 and self.near_memory is None and all_near
                           and self.near_budget >= near_data_bytes(self.layout, self.costs)
                           and config.profile is None and not config.offload_activations)
        """Whether no block is ever evicted from near, so that modules need not acquire their parameters."""
        self.far_budget = None if config.far_budget in ("auto", "min") else parse_bytes(config.far_budget, whole)
        if config.disk_path is not None:
            check_disk_path(Path(config.disk_path))
        self.disk_budget = None if config.disk_budget == "auto" else parse_bytes(config.disk_budget, whole)
        self.least_far = self._fit_far(num_ranks)
        """Bytes that far holds in any case on each rank, when all gradients have arrived."""
        self._check_log()
        if config.far_budget == "min":
            self.far_budget = self.least_far
        self.activation_room = None if self.far_budget is None else self.far_budget - self.least_far

    def _fit_near(self, specs: list[ModuleSpec], uses: Uses, num_ranks: int) -> tuple[Layout, int, int]:
        """(the layout that wastes least of those that fit, its near budget, the least near budget that it could have).

        Raises BudgetError, which names what needs most, where no layout fits.
        """
        config = self.config
        # (layout, the least near bytes it needs, what needs them)
        needs = [(layout, *self._least_near(layout, uses)) for layout in self._candidates(specs, num_ranks)]
        smallest, least, what = min(needs, key=lambda item: item[1])
        if config.near_budget == "min":
            fitting = [layout for layout, need, _ in needs if need == least]
        else:
            fitting = [layout for layout, need, _ in needs if need <= self._near_bytes(layout)]
        if not fitting:
            raise BudgetError(
                f"near budget {config.near_budget} ({self._near_bytes(smallest)} bytes) is too small: {what} {least} on "
                f"{num_ranks} process(es): give at least {least}, that is "
                f"{-(-100 * least // near_data_bytes(smallest, self.costs))}% of the model data, or min; "
                "pstar.tile_linears cuts a large nn.Linear into smaller modules"
            )
        chosen = least_waste(fitting, group_cost_elems=self._packing.group_cost_elems)
        budget = least if config.near_budget == "min" else self._near_bytes(chosen)
        return chosen, budget, next(need for layout, need, _ in needs if layout is chosen)

    def _least_near(self, layout: Layout, uses: Uses) -> tuple[int, str]:
        """(bytes of near that a layout needs, what needs them)."""
        least, module_name = smallest_near_budget(layout, uses, self.costs, self.config.communication)
        streaming = smallest_streaming_budget(layout, self.costs) if self.config.far_states == "stream" else 0
        if streaming > least:
            return streaming, "far_states is stream, and the update of one group needs"
        return least, f"module '{module_name}' and its gradients need"

    def _parse_near_memory(self) -> int:
        given = self.config.near_memory
        try:
            return parse_bytes(given, 0)
        except ConfigError as error:
            raise ConfigError(f"near_memory is {given!r}; give bytes, as 12GiB, or auto") from error

    def _fit_far(self, num_ranks: int) -> int:
        """The least bytes that far needs. Where far alone is too small, states take the place of parameters near.

        Parameters that leave near travel then in every step. Raises BudgetError where that is not enough either.
        """
        config, layout, costs = self.config, self.layout, self.costs
        grads_stay = self.accumulates or config.find_unused_parameters
        if config.disk_path is not None:
            least = smallest_far_budget_with_disk(layout, costs, config.communication)
        else:
            least = smallest_far_budget(layout, self.near_state_groups, costs, grads_stay)
        if self.far_budget is None or self.far_budget >= least:
            return least
        if self._states_near:
            homes = near_states_for_capacity(layout, self.near_budget, self.least_near, costs)
            least_full = smallest_far_budget(layout, homes, costs, grads_stay, grads_wait_far=True)
            if least_full < least:
                self.near_state_groups, least = homes, least_full
        if self.far_budget < least:
            raise BudgetError(
                f"far budget {config.far_budget} ({self.far_budget} bytes) is too small: the chunks of one of "
                f"{num_ranks} process(es) need {least}: give at least {least}, that is "
                f"{-(-100 * least // model_data_bytes(layout, costs))}% of the model data, or auto"
                f"{'' if config.disk_path else ', or a disk_path'}"
            )
        return least

    @property
    def log_budget(self) -> int | None:
        """Bytes on each rank for what speculative updates overwrite: with auto a quarter of its model data, at least one
        group. None: there are no such updates."""
        if not self.config.speculative_update:
            return None
        whole = model_data_bytes(self.layout, self.costs)
        if self.config.speculative_log == "auto":
            return max([whole // self.layout.num_ranks // 4, *self._overwritten])
        return parse_bytes(self.config.speculative_log, whole)

    @property
    def _overwritten(self) -> list[int]:
        """Bytes that the update of each group overwrites."""
        return [self.costs.param * group.piece_elems + self.costs.state_bytes(group) for group in self.layout.trained]

    def _check_log(self) -> None:
        """Raises BudgetError if no group fits into the log."""
        budget, least = self.log_budget, min(self._overwritten, default=0)
        if budget is not None and budget < least:
            raise BudgetError(f"speculative_log {self.config.speculative_log} ({budget} bytes) is too small: an update "
                              f"overwrites at least {least}, the parameters and states of the smallest group; give at least "
                              "that, or a smaller chunk size")

    @property
    def param_dtype(self) -> torch.dtype:
        return self.precision.param_dtype

    @property
    def accumulates(self) -> bool:
        """Whether a step adds the gradients of several micro-steps."""
        return self.config.gradient_accumulation_steps > 1

    @property
    def keeps_gradients(self) -> bool:
        """Whether autograd's own gradients serve for the update, and are not copied into chunks."""
        return self.stays_near and self.grad_dtype == self.param_dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        return self.precision.grad_dtype(self.accumulates)

    @property
    def _states_near(self) -> bool:
        """Whether states may live near from the first step on. With near_memory, the first step measures what is left."""
        return self.config.optimizer.params.use_hybrid_adam and self.config.near_memory == "auto"

    def choose_near_states(self, room: int) -> list[int]:
        """The groups whose optimizer states are in near, if chunks have `room` bytes there."""
        layout, costs = self.layout, self.costs
        near = choose_near_states(self.config.near_states, layout, room, costs, self.config.communication, self.least_near,
                                  self.config.prefetch, self.config.find_unused_parameters)
        if self.config.far_states == "stream" and len(near) < len(layout.trained):
            # States in near never leave it: one streamed group must fit in addition to them.
            left = room - smallest_streaming_budget(layout, costs)
            while near and sum(costs.state_bytes(layout.groups[index]) for index in near) > left:
                near.pop()
        return near

    def _near_bytes(self, layout: Layout) -> int:
        whole = near_data_bytes(layout, self.costs)
        if self.config.near_budget == "auto":
            return self._default_near_bytes or whole
        return parse_bytes(self.config.near_budget, whole)

    @property
    def _ownership(self) -> str:
        """Of the layout: a node's ranks share each chunk."""
        return "sharded" if self.config.ownership == "node" else self.config.ownership

    def _candidates(self, specs: list[ModuleSpec], num_ranks: int) -> list[Layout]:
        """The layout of the configured chunk size, or layouts to choose from."""
        config = self.config
        if config.default_chunk_size != "auto":
            align_elems = self._packing.align_elems
            whole = sum(align(size, align_elems) for spec in specs for _, size in spec.parameters)
            chunk = min(config.default_chunk_size, max(whole, 1))    # a larger chunk is padding
            return [make_layout(specs, chunk, num_ranks, self._ownership, self.costs.scales > 0, self.costs.in_codes,
                                align_elems)]
        limits = []
        if config.near_budget not in ("auto", "min"):
            whole = sum(size * (self.costs.param if name in spec.frozen else self.costs.total)
                        for spec in specs for name, size in spec.parameters)
            limits.append(parse_bytes(config.near_budget, whole))
        if self._packing.near_groups:
            if config.near_budget == "auto" and self._default_near_bytes is not None:
                limits.append(self._default_near_bytes)
            if self.near_memory is not None:    # activations are not known yet
                limits.append(self.near_memory)
        near = min(limits, default=None)
        return auto_layouts(specs, num_ranks, self.costs, near, self._ownership, config.communication, self._packing)


def plan_engine(model_func: Callable[[], torch.nn.Module], config: "dict | str | Path | Config | None" = None,
                num_ranks: int = 1, device: torch.device | str | None = None) -> Plan:
    """Checks a configuration against a model before any process is started; builds the model without memory if possible.

    device: near's, as for initialize_engine; chunks in host memory take whole pages if it is a GPU.
    Raises the errors that initialize_engine would raise.
    """
    config = load_config(config).for_ranks(num_ranks)
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    check_compiler(config.compile, torch.device(device))
    module = build(model_func)[0]
    if config.use_cpu_embedding:
        compute_embeddings_far(module, torch.device("cpu"))
    return Plan(module, config, num_ranks, packing=packing_of(torch.device(device)),
                page_bytes=far_page_bytes(torch.device(device)))
