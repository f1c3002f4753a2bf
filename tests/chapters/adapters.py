"""A small base model, its data, and 30 steps of training, for the tests of chapter 08's methods."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from tests.chapters.technique import technique

CHAPTER = "08_param_efficient"
STEPS = 30
# n_inner is not 4 * n_embd, so that no formula fits by chance
CONFIG = ModelConfig(n_layer=2, n_embd=24, n_head=4, n_positions=24, vocab_size=53, n_inner=80)
MODULES = ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj")
# all that train.py can ask for, by a short name
CASES: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "rank": 4, "alpha": 16.0},
    "lora-alpha": {"method": "lora", "rank": 3, "alpha": 2.5},
    "rslora": {"method": "lora", "rank": 4, "alpha": 6.0, "rslora": True},
    "lora-modules": {"method": "lora", "rank": 2, "alpha": 4.0, "modules": MODULES},
    "lora-one": {"method": "lora", "rank": 2, "alpha": 4.0, "modules": ("attn.c_proj",)},
    "dora": {"method": "dora", "rank": 4, "alpha": 8.0, "modules": ("c_attn", "mlp.c_proj")},
    "ia3": {"method": "ia3"},
    "ia3-modules": {"method": "ia3", "modules": MODULES},
    "prefix": {"method": "prefix", "num_virtual_tokens": 5},
    "prompt": {"method": "prompt", "num_virtual_tokens": 5},
    "adapter": {"method": "adapter", "bottleneck": 6},
    "bitfit": {"method": "bitfit"},
}
IN_PEFT = tuple(name for name, case in CASES.items() if case["method"] not in ("adapter", "bitfit"))
MERGED = tuple(name for name, case in CASES.items() if case["method"] in ("lora", "dora", "ia3"))


def spec(name: str) -> Any:
    """The MethodSpec of a case."""
    return technique(CHAPTER, "methods.spec").MethodSpec(**CASES[name])


def effective(spec: Any) -> tuple[Any, ...]:
    """What a spec makes of a model: equal for specs that differ in numbers that their method ignores."""
    low_rank = (spec.rank, spec.scaling, spec.dropout) if spec.method in ("lora", "dora") else ()
    bottleneck = spec.bottleneck if spec.method == "adapter" else None
    return (spec.method, spec.targets, spec.virtual_tokens, bottleneck, *low_rank)


@functools.cache
def _base_state(config_key: tuple[tuple[str, Any], ...]) -> dict[str, Tensor]:
    torch.manual_seed(11)
    model = GPT2LMHeadModel(ModelConfig(**dict(config_key)))
    with torch.no_grad():
        for parameter in model.parameters():  # biases and layer norms, too: a wrong formula must show
            parameter += 0.1 * torch.randn_like(parameter)
    return model.state_dict()


def base(**changes: Any) -> GPT2LMHeadModel:
    """A new base model; the same weights at each call. `changes` are fields of the configuration."""
    fields = {"n_layer": 2, "n_embd": 24, "n_head": 4, "n_positions": 24, "vocab_size": 53, "n_inner": 80} | changes
    model = GPT2LMHeadModel(ModelConfig(**fields))
    model.load_state_dict(_base_state(tuple(sorted(fields.items()))))
    return model


def adapted(name: str, seed: int = 3, **changes: Any) -> GPT2LMHeadModel:
    """A base with a case's method applied; the seed decides the adapter's first numbers."""
    model = base(**changes)
    torch.manual_seed(seed)
    technique(CHAPTER, "methods.apply").apply_method(model, spec(name))
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets), each (6, 10) int64. Three batches come again and again, so that there is something to learn."""
    ids = torch.randint(0, 53, (6, 11), generator=torch.Generator().manual_seed(step % 3))
    return ids[:, :-1], ids[:, 1:]


def train(model: nn.Module, steps: int = STEPS) -> list[float]:
    """Trains what requires grad by AdamW; the loss of each step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@functools.cache
def _trained_state(name: str) -> tuple[list[float], dict[str, Tensor]]:
    model = adapted(name)
    return train(model), {key: value.clone() for key, value in model.state_dict().items()}


def trained(name: str) -> tuple[GPT2LMHeadModel, list[float]]:
    """A case's model after 30 steps, new at each call and in evaluation mode, and the losses of the steps."""
    losses, state = _trained_state(name)
    model = adapted(name)
    model.load_state_dict(state)
    return model.eval(), losses


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    """(6, 10, V): of the first batch."""
    return model(batch(0)[0])
