"""Published configurations of DeepSpeed and PatrickStar: each becomes the keys written by hand and runs, or is refused."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import pstar
from tests import toy
from tests.pstar.deepspeed.published import PUBLISHED

RUN = [name for name, (_, _, means) in PUBLISHED.items() if isinstance(means, dict)]
REFUSED = [name for name in PUBLISHED if name not in RUN]


def here(values: Any, folder: Path) -> Any:
    return json.loads(json.dumps(values).replace("{disk}", str(folder)))


def two_steps(config: Path | dict) -> tuple[pstar.Engine, Any, list[float]]:
    torch.manual_seed(0)
    model, optimizer = pstar.initialize_engine(toy.Toy, 0, config)
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(model.config.gradient_accumulation_steps):
            loss = model(*toy.batch(17 * step + micro))
            model.backward(loss)
            losses.append(loss.item())
        optimizer.step()
    return model, optimizer, losses


@pytest.mark.parametrize("name", RUN)
def test_it_becomes_the_keys_of_pstar_and_trains(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, file, means = PUBLISHED[name]
    path, meant = tmp_path / "ds_config.json", here(means, tmp_path)
    path.write_text(json.dumps(here(file, tmp_path)))
    found = pstar.load_config(path)
    assert asdict(found.for_ranks(1)) == asdict(pstar.load_config(meant))
    model, optimizer, losses = two_steps(path)
    said = capfd.readouterr().err.splitlines()
    assert said == [f"pstar: {note}" for note in found.notes] and said, "one line a fact, once"
    assert all(math.isfinite(loss) for loss in losses) and losses == two_steps(meant)[2]
    assert optimizer.param_groups[0]["weight_decay"] == model.config.optimizer.params.weight_decay
    if "disk_path" in meant:
        assert model.disk.peak_bytes > 0 and model.far.peak_bytes <= model.far.budget_bytes


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_one_line(name: str, tmp_path: Path) -> None:
    _, file, line = PUBLISHED[name]
    (tmp_path / "ds_config.json").write_text(json.dumps(file))
    with pytest.raises(pstar.ConfigError) as error:
        pstar.load_config(tmp_path / "ds_config.json")
    assert str(error.value) == f"{tmp_path / 'ds_config.json'}: {line}"


def test_there_are_ten_and_each_names_its_source() -> None:
    assert len(PUBLISHED) >= 10 and len(REFUSED) >= 3
    assert all(source.startswith("https://github.com/") for source, _, _ in PUBLISHED.values())
