"""bash scripts/torchrun.sh --standalone --nproc-per-node 4 docs/programs/barrier.py"""

import time

import torch.distributed as dist

dist.init_process_group("gloo")
rank, begin = dist.get_rank(), [time.time()]
dist.broadcast_object_list(begin, 0)  # all ranks measure from the same moment
time.sleep(0.3 * rank)  # work, more of it on later ranks
arrived = time.time() - begin[0]
dist.barrier()
print(f"rank {rank}: arrives after {arrived:.1f} s, goes on after {time.time() - begin[0]:.1f} s")
dist.destroy_process_group()
