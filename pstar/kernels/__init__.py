"""Adam on flat arrays. Knows no chunks."""

from pstar.kernels.adam import adam_step, join_master, split_master

__all__ = ["adam_step", "join_master", "split_master"]
