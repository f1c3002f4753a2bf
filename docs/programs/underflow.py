"""bash scripts/python.sh docs/programs/underflow.py"""

import torch

gradient, scale = torch.tensor(1e-8), 2.0**16
print("fp16:             ", gradient.half().item())
print("fp16, scaled:     ", (gradient * scale).half().item(), "->", ((gradient * scale).half().float() / scale).item())
print("bf16:             ", gradient.bfloat16().item())
print("fp16 of 70000:    ", torch.tensor(70000.0).half().item(), "  a scale can be too large")
