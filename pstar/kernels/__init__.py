"""Adam on flat arrays, compiled for CPU and CUDA, and with torch operations where nothing is compiled. Knows no chunks."""

from pstar.kernels.adam import join_master, split_master
from pstar.kernels.front import adam_step, adam_steps, squared_norms
from pstar.kernels.update import QUANT_BLOCK, AdamUpdate

__all__ = ["QUANT_BLOCK", "AdamUpdate", "adam_step", "adam_steps", "join_master", "split_master", "squared_norms"]
