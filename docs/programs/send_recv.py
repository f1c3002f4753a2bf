"""bash scripts/torchrun.sh --standalone --nproc-per-node 4 docs/programs/send_recv.py"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.tensor([1, 2, 3, 4]) if rank == 0 else torch.zeros(4, dtype=torch.int64)
before = x.tolist()
if rank > 0:
    dist.recv(x, src=rank - 1)
if rank < 3:
    dist.send(x, dst=rank + 1)
print(f"rank {rank}: {before} -> {x.tolist()}")
dist.barrier()  # no rank leaves while another one still connects to it
dist.destroy_process_group()
