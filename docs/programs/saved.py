"""bash scripts/python.sh docs/programs/saved.py"""

import torch

from gpt2_chinese.model.config import PRESETS
from gpt2_chinese.model.gpt2 import Block

block, x = Block(PRESETS["tiny"]), torch.randn(24, 128, 128, requires_grad=True)  # (B, T, C)
weights = {parameter.data_ptr() for parameter in block.parameters()}
kept = {}  # address -> bytes, so that views of one memory count once
with torch.autograd.graph.saved_tensors_hooks(
    lambda t: kept.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t, lambda t: t
):
    y = block(x)
num_bytes = sum(size for address, size in kept.items() if address not in weights)
print(f"{num_bytes:,} bytes kept for backward, {num_bytes / x.numel():.1f} per token and channel")
