"""Mistake 3: clipping before Horovod has synchronized. Its thread still averages the same gradients.

    horovodrun --gloo -np 2 -H localhost:2 python chapters/04_apex/mistakes/clip_before_synchronize.py

The norm that the optimizer gets is arbitrary. The cure: synchronize(), clip, then step() inside skip_synchronize().
"""

import horovod.torch as hvd
import torch
from torch import nn

hvd.init()
model = nn.Linear(1024, 1024)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())


def norm_that_the_optimizer_sees(order: str) -> float:
    """The norm of gradients that should have been clipped to 1."""
    optimizer.zero_grad()
    torch.manual_seed(hvd.rank())
    target = (-1.0) ** hvd.rank()  # the ranks' gradients are nearly opposite: the mean of clipped ones is far from 1
    (model(torch.randn(64, 1024)) - target).square().sum().backward()
    for what in order.split():
        optimizer.synchronize() if what == "synchronize" else nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()


for order in ("clip synchronize", "synchronize clip"):
    norms = [norm_that_the_optimizer_sees(order) for _ in range(5)]
    if hvd.rank() == 0:
        name = "wrong" if order.startswith("clip") else "right"
        print(f"{name}: {order.replace(' ', ', then '):<22}   norm", *[f"{norm:.4f}" for norm in norms], flush=True)
