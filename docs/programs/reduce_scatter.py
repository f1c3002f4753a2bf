"""bash scripts/torchrun.sh --standalone --nproc-per-node 4 docs/programs/reduce_scatter.py"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.tensor([1, 2, 3, 4]) * 10**rank
piece = torch.empty(1, dtype=torch.int64)
dist.reduce_scatter(piece, list(x.split(1)))
print(f"rank {rank}: {x.tolist()} -> {piece.tolist()}")
dist.destroy_process_group()
