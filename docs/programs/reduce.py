"""bash scripts/torchrun.sh --standalone --nproc-per-node 4 docs/programs/reduce.py"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.tensor([1, 2, 3, 4]) * 10**rank
before = x.tolist()
dist.reduce(x, dst=0)
print(f"rank {rank}: {before} -> {x.tolist() if rank == 0 else 'undefined'}")
dist.barrier()  # no rank leaves while another one still connects to it
dist.destroy_process_group()
