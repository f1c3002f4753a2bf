"""Mistake 4: several backward passes a step without telling Horovod. It averages after the first and refuses the second.

    horovodrun --gloo -np 2 -H localhost:2 python chapters/04_apex/mistakes/accumulate_without_passes.py

The cure: pass backward_passes_per_step to DistributedOptimizer.
"""

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
MICROS = 4
data = torch.randn(hvd.size() * MICROS, 8, 16, generator=torch.Generator().manual_seed(0))  # in the order of ranks


def accumulate(told: int) -> str:
    """How many passes succeeded, and the error of the gradient against one process with the whole batch."""
    torch.manual_seed(0)
    model = nn.Linear(16, 1)
    expected = torch.autograd.grad(model(data).square().mean(), model.weight)[0]
    names = [(f"told {told}: {name}", parameter) for name, parameter in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), names, backward_passes_per_step=told)
    for micro in range(MICROS):
        try:
            (model(data[hvd.rank() * MICROS + micro]).square().mean() / MICROS).backward()
        except AssertionError as error:
            return f"{micro} of {MICROS} passes: {str(error).split('. ')[0]}"
    optimizer.synchronize()
    return f"{MICROS} of {MICROS} passes, gradient {((model.weight.grad - expected).norm() / expected.norm()):.0e} off"


for name, told in (("wrong: not told   ", 1), ("right: told of four", MICROS)):
    said = accumulate(told)
    if hvd.rank() == 0:
        print(f"{name}   {said}", flush=True)
