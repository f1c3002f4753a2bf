"""What follows from a model's shapes and a configuration, before any memory is taken: layout, budgets, bytes a parameter."""

from collections.abc import Callable
from pathlib import Path

import torch

from pstar.budget import Costs, largest_chunk_elems, model_data_bytes, smallest_near_budget
from pstar.config import Config, load_config
from pstar.errors import BudgetError
from pstar.layout import Layout, ModuleSpec, make_layout, search_chunk_size
from pstar.tiers import parse_bytes


class Plan:
    """What follows from a model's shapes and a configuration, before any memory is taken.

    Args:
        module: the model; on the meta device is enough.
        config: a checked configuration.
        num_ranks: p.
        default_near_bytes: the near budget where the configuration says auto; None means all model data.

    Raises ConfigError, and BudgetError when no module-sized working set fits into the near budget.
    """

    def __init__(self, module: torch.nn.Module, config: Config, num_ranks: int, default_near_bytes: int | None = None):
        self.config = config
        names = {id(param): name for name, param in module.named_parameters()}
        specs, placed = [], set()
        uses: dict[str, tuple[str, ...]] = {}
        for module_name, child in module.named_modules():
            own = {names[id(param)]: param.numel() for param in child.parameters(recurse=False)}
            uses[module_name] = tuple(own)
            specs.append(ModuleSpec(module_name, tuple((n, size) for n, size in own.items() if n not in placed)))
            placed |= set(own)
        self.param_dtype = torch.bfloat16 if config.bf16.enabled else torch.float32
        accumulate = config.gradient_accumulation_steps > 1
        self.grad_dtype = torch.float32 if accumulate else self.param_dtype
        self.costs = Costs(self.param_dtype.itemsize, self.grad_dtype.itemsize, 10 if config.bf16.enabled else 8)
        params = sum(size for spec in specs for _, size in spec.parameters)
        self.layout = self._layout(specs, uses, num_ranks, params, default_near_bytes)
        whole = model_data_bytes(self.layout, self.costs)
        least, module_name = smallest_near_budget(self.layout, uses, self.costs)
        near = config.near_budget
        if near == "auto":
            self.near_budget = default_near_bytes or whole
        else:
            self.near_budget = least if near == "min" else parse_bytes(near, whole)
        self.far_budget = None if config.far_budget == "auto" else parse_bytes(config.far_budget, whole)
        if self.near_budget < least:
            raise BudgetError(
                f"near budget {near}: {self.near_budget} bytes, but module '{module_name}' and its gradients need {least}"
                f" (chunks of {self.layout.chunk_elems} elements, {num_ranks} process(es)): "
                f"give at least {least}, that is {-(-100 * least // whole)}% of the model data, or min"
            )

    def _layout(self, specs: list[ModuleSpec], uses: dict[str, tuple[str, ...]], num_ranks: int, params: int,
                default_near_bytes: int | None) -> Layout:
        config = self.config
        if config.default_chunk_size != "auto":
            return make_layout(specs, config.default_chunk_size, num_ranks)
        # At least four groups, so that one can travel while another works, and never more than 64 Mi elements a chunk.
        most = min(max(params // (4 * num_ranks), 1), 64 * 2**20)
        if config.near_budget == "min":
            most = min(most, max(sum(size for _, size in spec.parameters) for spec in specs) // num_ranks)
        else:
            whole = self.costs.total * params
            near = default_near_bytes or whole if config.near_budget == "auto" else parse_bytes(config.near_budget, whole)
            most = min(most, largest_chunk_elems(near, num_ranks, self.costs))
        return make_layout(specs, search_chunk_size(specs, num_ranks, max(most, 1)), num_ranks)


def plan_engine(model_func: Callable[[], torch.nn.Module], config: "dict | str | Path | Config | None" = None,
                num_ranks: int = 1) -> Plan:
    """Checks a configuration against a model before any process is started: builds the model without memory.

    Raises what initialize_engine would raise.
    """
    with torch.device("meta"):
        module = model_func()
    return Plan(module, load_config(config), num_ranks)
