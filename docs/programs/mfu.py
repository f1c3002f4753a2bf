"""bash scripts/python.sh docs/programs/mfu.py"""

import time

import torch

from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from gpt2_chinese.run.flops import flops_per_token, matmul_flops_per_s

config, ids = ModelConfig(vocab_size=4096), torch.randint(4096, (24, 129))  # ModelConfig's default is tiny
model, peak = GPT2LMHeadModel(config), matmul_flops_per_s(torch.device("cpu"), "fp32")
seconds = float("inf")
for _ in range(5):  # the fastest counts: the first one also allocates its memory
    begin = time.perf_counter()
    model(ids[:, :-1], ids[:, 1:]).backward()
    seconds = min(seconds, time.perf_counter() - begin)
flops = 24 * 128 * flops_per_token(config, 128)
print(f"{flops / 1e9:.1f} GFLOP in {seconds:.2f} s is {flops / seconds / 1e9:.0f} GFLOP/s")
print(f"a matrix product reaches {peak / 1e9:.0f} GFLOP/s, so MFU is {flops / seconds / peak:.0%}")
