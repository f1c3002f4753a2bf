"""bash scripts/torchrun.sh --standalone --nproc-per-node 4 docs/programs/all_to_all.py"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.tensor([1, 2, 3, 4]) * 10**rank
y = torch.empty_like(x)
dist.all_to_all_single(y, x)
print(f"rank {rank}: {x.tolist()} -> {y.tolist()}")
dist.destroy_process_group()
