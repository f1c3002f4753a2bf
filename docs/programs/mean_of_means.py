"""bash scripts/python.sh docs/programs/mean_of_means.py"""

import torch

losses = torch.tensor([2.0, 4.0, 6.0, 8.0])  # of four tokens
rank0, rank1 = losses[:3], losses[3:]  # unequal shares, from padding, a last batch or ignored targets
print("one process:           ", losses.mean().item())
print("mean of the two means: ", (rank0.mean() + rank1.mean()).item() / 2)
print("sums over counts:      ", (rank0.sum() + rank1.sum()).item() / (len(rank0) + len(rank1)))
