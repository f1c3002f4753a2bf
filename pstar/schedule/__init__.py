"""Pure numbers: the trace of a step's moments, next uses, and the choice of the block to evict."""
