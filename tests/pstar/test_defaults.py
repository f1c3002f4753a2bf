"""torch's default dtype and default device are the program's: the engine's own tensors follow neither.

The program sets them after the engine has started, since a model takes its dtype from them. A tensor for which the engine
names no device is on the meta device then, and has no values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import pstar
from tests import toy

STEPS = 4
CONFIGS = {
    "near": {"near_budget": "100%"},
    "far": {"near_budget": "min"},
    "disk": {"near_budget": "min", "far_budget": "60%", "disk_path": "disk"},
    "bf16": {"near_budget": "min", "bf16": {"enabled": True}},
    "fp16": {"near_budget": "min", "fp16": {"enabled": True}},
    "8-bit moments": {"near_budget": "min", "optimizer": {"type": "AdamW", "params": {"lr": toy.LR, "state_bits": 8}}},
    "memory": {"near_memory": "8MiB", "near_budget": "auto"},
    "speculative": {"near_budget": "min", "speculative_update": True},
    "overlap": {"near_budget": "60%", "overlap_update": True},
    "stream": {"near_budget": "60%", "far_states": "stream", "near_states": "fill"},
    "embedding": {"near_budget": "min", "use_cpu_embedding": True},
}
DEFAULTS: dict[str, Callable[[], None]] = {
    "bfloat16": lambda: torch.set_default_dtype(torch.bfloat16),
    "float64": lambda: torch.set_default_dtype(torch.float64),
    "meta": lambda: torch.set_default_device("meta"),
}


@contextmanager
def defaults(kind: str | None) -> Iterator[None]:
    try:
        if kind is not None:
            DEFAULTS[kind]()
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def state(model: pstar.Engine) -> dict[str, torch.Tensor]:
    return {name: value for tensors in model.gather_state() for name, value in tensors.items()}


def run(folder: Path, keys: dict, kind: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of training, of a resumed checkpoint and of an evaluation; the weights and moments at the end."""
    keys = keys | ({"disk_path": str(folder)} if "disk_path" in keys else {})
    model, optimizer = toy.build(toy.Untied, default_chunk_size=5_000, **keys)
    batches = [toy.batch(step) for step in range(2 * STEPS + 1)]
    losses = []
    with defaults(kind):
        for number, batch in enumerate(batches[:-1]):
            if number == STEPS:
                model.save_checkpoint(folder / "checkpoint")
                model.load_checkpoint(folder / "checkpoint")
                model.load_state(*model.gather_state())
                model.export_weights(folder / "weights.safetensors")
                model.import_weights(folder / "weights.safetensors")
            optimizer.zero_grad()
            loss = model(*batch)
            model.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            losses.append(model.eval()(*batches[-1]).item())
        return losses, state(model)


@pytest.mark.parametrize("keys", CONFIGS.values(), ids=CONFIGS)
def test_no_default_changes_a_number(keys: dict, tmp_path: Path) -> None:
    expected, tensors = run(tmp_path / "usual", keys, None)
    for kind in DEFAULTS:
        losses, found = run(tmp_path / kind, keys, kind)
        assert losses == expected, kind
        for name, value in tensors.items():
            assert torch.equal(found[name], value) and found[name].dtype is value.dtype, (kind, name)
