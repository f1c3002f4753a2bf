"""bash scripts/torchrun.sh --standalone --nproc-per-node 4 docs/programs/scatter.py"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
whole = torch.tensor([1, 2, 3, 4]) if rank == 0 else None
x = torch.empty(1, dtype=torch.int64)
dist.scatter(x, list(whole.split(1)) if rank == 0 else None, src=0)
print(f"rank {rank}: {whole.tolist() if rank == 0 else []} -> {x.tolist()}")
dist.barrier()  # no rank leaves while another one still connects to it
dist.destroy_process_group()
