"""torchrun --standalone --nproc-per-node 4 docs/programs/barrier.py"""

import time

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()  # the clocks of all ranks begin together
begin = time.perf_counter()
time.sleep(0.3 * rank)  # work, more of it on later ranks
arrived = time.perf_counter() - begin
dist.barrier()
print(f"rank {rank}: arrives after {arrived:.1f} s, goes on after {time.perf_counter() - begin:.1f} s")
dist.destroy_process_group()
