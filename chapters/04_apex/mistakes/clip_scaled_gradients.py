"""Mistake 1: clipping gradients while they are still multiplied by the loss scale.

    python chapters/04_apex/mistakes/clip_scaled_gradients.py

A limit of 1 then acts like 1/65536, so the weights hardly change. The cure: unscale first, then clip.
"""

import torch
from torch import nn

SCALE = 65536.0


def train(order: str) -> float:
    """The loss after 200 steps of training a model to predict n + 1 from n."""
    torch.manual_seed(0)
    model, ids = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64)), torch.arange(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(200):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids), (ids + 1) % 64)
        (loss * SCALE).backward()
        for what in order.split():
            if what == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            else:
                for parameter in model.parameters():
                    parameter.grad /= SCALE
        optimizer.step()
    return loss.item()


print(f"wrong: clip, then unscale   loss {train('clip unscale'):.4f}")
print(f"right: unscale, then clip   loss {train('unscale clip'):.4f}")
