"""Numbers: which parameter lies where in which chunk, and what fits into a budget. No tensors."""
