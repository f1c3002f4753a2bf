"""bash scripts/python.sh docs/programs/order.py"""

import torch

one, big = torch.tensor(1.0), torch.tensor(1e8)
print("(1 + 1e8) - 1e8 =", ((one + big) - big).item(), "   1 + (1e8 - 1e8) =", (one + (big - big)).item())

torch.manual_seed(42)
gradients = torch.randn(24, 1000)  # of 24 sequences; the gradient of a step is their sum
alone = sum(gradients)
for num_ranks in (2, 4):
    total = sum(sum(share) for share in gradients.chunk(num_ranks))  # each rank sums its share, then the sums are added
    equal, apart = (total == alone).float().mean(), (total - alone).norm() / alone.norm()
    print(f"{num_ranks} ranks: {equal:.0%} of the 1000 numbers equal bit for bit, relative difference {apart:.0e}")
