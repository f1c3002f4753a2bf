"""The block of the engine's page that trains LoRA on a frozen 4-bit base runs; both languages show the same one."""

from __future__ import annotations

import torch
from torch import nn

import pstar
from tests.docs.pages import example
from tests.docs.test_patrickstar_example import MyModel


def test_the_block_runs_and_learns_and_says_what_is_in_codes(capsys) -> None:
    code = example("qlora")
    torch.manual_seed(0)
    data = torch.randint(0, 50, (4, 9))
    names = {"pstar": pstar, "torch": torch, "nn": nn, "MyModel": MyModel, "dataloader": [data] * 30, "losses": []}
    code = code.replace("    optimizer.step()\n", "    optimizer.step()\n    losses.append(loss.item())\n")
    exec(compile(code, "page", "exec"), names)
    assert len(names["losses"]) == 30 and names["losses"][-1] < names["losses"][0]
    assert "matrices in 4-bit codes except near (34 bytes for 64 weights)" in capsys.readouterr().out
    coded = {slot.name for group in names["model"].layout.groups if group.coded for slot in group.slots}
    assert coded == {"embed.weight", "layers.0.base.weight", "layers.2.base.weight"}
