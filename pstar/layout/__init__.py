"""Pure numbers: each parameter's place in the chunks, and what fits into a budget. No tensors."""
