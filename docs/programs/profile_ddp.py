"""bash scripts/torchrun.sh --standalone --nproc-per-node 2 docs/programs/profile_ddp.py"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel

PRODUCTS, WAIT = ("aten::mm", "aten::addmm", "aten::bmm"), "wait for all-reduce"
dist.init_process_group("gloo")
rank, folder, under_way = dist.get_rank(), Path("runs/profile_ddp"), []
folder.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)  # the same weights on both ranks
model = GPT2LMHeadModel(ModelConfig(vocab_size=4096))  # ModelConfig's default is tiny
ids = torch.randint(4096, (4, 129))


def send(parameter):
    under_way.append(dist.all_reduce(parameter.grad, async_op=True))


def step(overlap):
    model(ids[:, :-1], ids[:, 1:]).backward()
    if not overlap:  # every gradient leaves after backward
        for parameter in model.parameters():
            send(parameter)
    with record_function(WAIT):
        while under_way:
            under_way.pop().wait()
    model.zero_grad()


for variant in ("naive", "overlap"):
    if variant == "overlap":  # a gradient leaves as soon as backward has computed it
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(send)
    step(variant == "overlap")  # warms up
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            with record_function("step"):
                step(variant == "overlap")
    profiler.export_chrome_trace(f"{folder}/{variant}_rank{rank}.json")
    times = {event.key: event for event in profiler.key_averages()}
    whole, wait = times["step"].cpu_time_total, times[WAIT].cpu_time_total
    products = sum(times[name].self_cpu_time_total for name in PRODUCTS if name in times)
    if rank == 0:
        for what, part in {"matrix products": products, WAIT: wait, "the rest": whole - products - wait}.items():
            print(f"{variant:<10}{what:<24}{part / 3000:6.1f} ms {part / whole:4.0%}")  # of one step
dist.destroy_process_group()
