"""Mistake 2: optimizer.step() twice for one batch. A published run did so and called mixed precision three times as fast.

    python chapters/04_apex/mistakes/two_steps_a_batch.py

The loss falls in half as many logged steps, which looks like a speedup. The cure: count optimizer steps, not log lines.
"""

import torch
from torch import nn


def batches_until(limit: float, steps_a_batch: int) -> tuple[int, int]:
    """Returns (batches until the loss is below `limit`, steps that AdamW counted)."""
    torch.manual_seed(0)
    model, ids = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64)), torch.arange(64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in range(1, 10_000):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids), (ids + 1) % 64)
        if loss < limit:
            return batch, int(optimizer.state[model[0].weight]["step"])
        loss.backward()
        for _ in range(steps_a_batch):
            optimizer.step()


for name, steps in (("wrong: two steps a batch", 2), ("right: one step a batch ", 1)):
    batches, counted = batches_until(0.5, steps)
    print(f"{name}   loss 0.5 after {batches} batches, {counted} optimizer steps: {counted / (batches - 1):.1f} a batch")
