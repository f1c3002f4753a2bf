"""bash scripts/torchrun.sh --standalone --nproc-per-node 4 docs/programs/gather.py"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.tensor([rank + 1])
pieces = [torch.empty_like(x) for _ in range(4)] if rank == 0 else None
dist.gather(x, pieces, dst=0)
print(f"rank {rank}: {x.tolist()} -> {torch.cat(pieces).tolist() if rank == 0 else []}")
dist.barrier()  # no rank leaves while another one still connects to it
dist.destroy_process_group()
