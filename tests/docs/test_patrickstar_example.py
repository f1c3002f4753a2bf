"""The example of PatrickStar's README on the engine's page runs; both languages show the same example."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import pstar
from tests.docs.pages import example


class MyModel(nn.Module):
    """Replaces the reader's model. It takes any arguments in place of the dots, and one batch."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 50))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        logits = self.layers(self.embed(data[:, :-1]))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), data[:, 1:].flatten())


def run(code: str, monitor: bool = True) -> dict:
    torch.manual_seed(0)
    data = torch.randint(0, 50, (4, 9))
    names = {"args": SimpleNamespace(with_async_mem_monitor=monitor), "MyModel": MyModel, "dataloader": [data] * 30,
             "losses": []}
    code = code.replace("    optimizer.step()\n", "    optimizer.step()\n    losses.append(loss.item())\n")
    exec(compile(code, "page", "exec"), names)
    return names


@pytest.mark.parametrize("entry", ["from pstar.runtime import initialize_engine", "from pstar import initialize_engine"])
def test_the_published_example_runs_and_learns(entry: str) -> None:
    code = example("from-patrickstar")
    assert "from pstar.runtime import initialize_engine\n" in code
    names = run(code.replace("from pstar.runtime import initialize_engine", entry))
    losses, optimizer = names["losses"], names["optimizer"]
    assert len(losses) == 30 and losses[-1] < losses[0] - 0.5
    assert optimizer.loss_scale == 2.0**8 and optimizer.skipped_steps == 0
    assert names["model"].layout.chunk_elems < 64 * 2**20, "a chunk larger than the model is the model's size"
    assert next(iter(optimizer.param_groups)).keys() == {"params", "lr", "betas", "eps", "weight_decay"}


def test_its_keys_have_the_meaning_of_the_reference() -> None:
    near = {"near_budget": "1GiB"}
    hybrid, host = (pstar.plan_engine(MyModel, near | {"optimizer": {"params": {"use_hybrid_adam": value}}})
                    for value in (True, False))
    assert hybrid.near_state_groups and not host.near_state_groups
    model, _ = pstar.initialize_engine(MyModel, 0, {"use_cpu_embedding": True})
    assert "embed.weight" not in model.layout.slots
    with pytest.raises(pstar.ConfigError, match="did you mean 'client.mem_tracer.use_async_mem_monitor'"):
        pstar.load_config({"client": {"mem_tracer": {"use_async_monitor": True}}})
