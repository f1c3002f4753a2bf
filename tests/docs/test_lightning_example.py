"""The block of the engine's page that trains with Lightning gives the bits of the same Trainer on plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pstar
from pstar.numerics.grad_norm import clip_grad_norm_
from tests import toy
from tests.docs.pages import example
from tests.docs.test_patrickstar_example import MyModel
from tests.docs.two_processes import assert_two_processes_follow_one

NUM_BATCHES, EPOCHS = 5, 3    # odd: the last update of each epoch has one micro-step


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The package, whose Trainer prints nothing and computes on the CPU."""
    import lightning
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer
    monkeypatch.setattr(lightning, "Trainer", lambda **settings: trainer(**settings, **quiet))
    return lightning


def plain_module(lightning: Any, losses: list[float]) -> Any:
    """The same on plain PyTorch, with the engine's formula of AdamW and its order of clipping's sum."""

    class Plain(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = MyModel()

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            loss = self.model(batch)
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return toy.adamw(self.model.parameters(), lr=1e-3, weight_decay=0.01)

        def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
            clip_grad_norm_(list(self.model.parameters()), 1.0)

    return Plain()


@pytest.mark.filterwarnings("ignore")    # Lightning's: few workers of the dataloader, functions of torch that will go
def test_the_block_gives_the_bits_of_plain_pytorch(lightning: Any, tmp_path: Path) -> None:
    code = example("lightning")
    dataloader = torch.utils.data.DataLoader(torch.randint(0, 50, (4 * NUM_BATCHES, 9)), batch_size=4)
    found: dict[str, list[float]] = {"plain": [], "chunks": []}

    torch.manual_seed(0)
    plain = plain_module(lightning, found["plain"])
    trainer = lightning.Trainer(max_epochs=EPOCHS, devices=1, accumulate_grad_batches=2, enable_checkpointing=False)
    trainer.fit(plain, dataloader)

    code = code.replace("        return loss\n", "        losses.append(loss.item())\n        return loss\n")
    names = {"lightning": lightning, "pstar": pstar, "MyModel": MyModel, "dataloader": dataloader, "losses": found["chunks"]}
    torch.manual_seed(0)
    exec(compile(code, "page", "exec"), names)

    assert len(found["plain"]) == NUM_BATCHES * EPOCHS and found["chunks"] == found["plain"]
    weights = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == plain.model.state_dict().keys()
    assert all(torch.equal(weights[name], param) for name, param in plain.model.named_parameters())


PROGRAM = """
import json, os
import lightning, torch
import torch.distributed as dist
import pstar
from tests.docs.test_patrickstar_example import MyModel
torch.manual_seed(0)
rows, sampler, losses = torch.randint(0, 50, (40, 9)), None, []
if "RANK" in os.environ:
    dist.init_process_group()
    sampler = torch.utils.data.DistributedSampler(rows, shuffle=False)
dataloader = torch.utils.data.DataLoader(rows, batch_size={batch}, sampler=sampler)
torch.manual_seed(0)
{block}
if dist.is_initialized():
    total = torch.tensor(losses)
    dist.all_reduce(total)
    losses = (total / dist.get_world_size()).tolist()
if os.environ.get("RANK", "0") == "0":
    print("losses", json.dumps(losses))
"""


@pytest.mark.deep
def test_two_processes_follow_one_at_the_same_global_batch(tmp_path: Path) -> None:
    quiet = 'devices=1, accelerator="cpu", logger=False, enable_progress_bar=False'
    block = example("lightning").replace("devices=1", quiet).replace('self.log("loss", loss)', "losses.append(loss.item())")
    assert_two_processes_follow_one(*(PROGRAM.format(block=block, batch=batch) for batch in (4, 8)), tmp_path)
