"""bash scripts/torchrun.sh --standalone --nproc-per-node 4 docs/programs/all_reduce.py"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.tensor([1, 2, 3, 4]) * 10**rank
before = x.tolist()
dist.all_reduce(x)
print(f"rank {rank}: {before} -> {x.tolist()}")
dist.destroy_process_group()
