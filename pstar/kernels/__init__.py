"""Adam on flat arrays: compiled for CPU and CUDA, and with torch operations as a fallback; codes of moments and of frozen
weights. Knows no chunks."""

from pstar.kernels.adam import NORM_BLOCK, join_master, split_master, sum_blocks
from pstar.kernels.block_codes import CODE_BLOCK, BlockCodes
from pstar.kernels.front import adam_step, adam_steps, norm_blocks, prepare, squared_norms, store_squared
from pstar.kernels.quantize import code_tables, decode, encode
from pstar.kernels.update import QUANT_BLOCK, AdamOptions, AdamUpdate

__all__ = ["CODE_BLOCK", "NORM_BLOCK", "QUANT_BLOCK", "AdamOptions", "AdamUpdate", "BlockCodes", "adam_step", "adam_steps",
           "code_tables", "decode", "encode", "join_master", "norm_blocks", "prepare", "split_master", "squared_norms",
           "store_squared", "sum_blocks"]
