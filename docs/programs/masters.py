"""bash scripts/python.sh docs/programs/masters.py"""

import torch

weight, master = torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1.0)
for _ in range(1000):
    weight += 1e-3  # the next bf16 after 1.0 is 1.0078: every addition is rounded away
    master += 1e-3
print("bf16 alone:                   ", weight.item())
print("fp32 master, seen as bf16:    ", master.bfloat16().item())
