"""bash scripts/torchrun.sh --standalone --nproc-per-node 4 docs/programs/hello.py"""

import os

import torch.distributed as dist

told = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
dist.init_process_group("gloo")  # the rendezvous: returns when all ranks have joined
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, told {told}")
dist.barrier()  # no rank leaves while another one still connects to it
dist.destroy_process_group()
