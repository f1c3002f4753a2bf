"""bash scripts/torchrun.sh --standalone --nproc-per-node 4 docs/programs/all_gather.py"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.tensor([rank + 1])
pieces = [torch.empty_like(x) for _ in range(4)]
dist.all_gather(pieces, x)
print(f"rank {rank}: {x.tolist()} -> {torch.cat(pieces).tolist()}")
dist.destroy_process_group()
