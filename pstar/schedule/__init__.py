"""Numbers: the trace of a step's moments, next uses, and which block is evicted."""
