"""PatrickStar: chunk-based training of models larger than the accelerator's memory (Fang et al., TPDS 2022).

    model, optimizer = pstar.initialize_engine(model_func, config=config)
    for batch in data:
        optimizer.zero_grad()
        loss = model(batch)
        model.backward(loss)
        optimizer.step()
"""

from pstar.config import Config, load_config
from pstar.engine import Engine, initialize_engine
from pstar.errors import ArgumentError, BudgetError, CheckpointError, ConfigError, PstarError, StateError
from pstar.modules.scope import exclude, torch_scope
from pstar.modules.tiled_linear import TiledLinear, join_tiles, tile_linears
from pstar.modules.tiled_loss import tiled_loss
from pstar.optim.hybrid_adam import HybridAdam
from pstar.optim.lr_schedule import DeepSpeedLR
from pstar.planner.plan import Plan, plan_engine

__all__ = ["ArgumentError", "BudgetError", "CheckpointError", "Config", "ConfigError", "DeepSpeedLR", "Engine",
           "HybridAdam", "Plan", "PstarError", "StateError", "TiledLinear", "exclude", "initialize_engine", "join_tiles",
           "load_config", "plan_engine", "tile_linears", "tiled_loss", "torch_scope"]
