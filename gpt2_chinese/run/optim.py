"""AdamW's parameter groups, the learning-rate schedule, clipping, and mixed precision by autocast."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from gpt2_chinese.settings import Settings

LAST_SHARE = 0.01  # the last step uses this share of the peak learning rate


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups for AdamW: matrices and embeddings decay, biases and norms do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def adamw(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """The AdamW of every chapter: betas 0.9 and 0.95, decay for matrices only."""
    groups = weight_decay_groups(model, settings.weight_decay)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), eps=1e-8)


def learning_rate(step: int, settings: Settings) -> float:
    """Learning rate of a step, from 1 on: linear warm-up to the peak, then a cosine down to 1 % at the last step."""
    peak, warmup, last = settings.lr, settings.warmup_steps, settings.max_steps
    if step <= warmup:
        return peak * (step / warmup)
    progress = min(1.0, (step - warmup) / max(1, last - warmup))
    return peak * (LAST_SHARE + (1 - LAST_SHARE) * 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Gives every parameter group the same learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scales all gradients down to a global norm of `max_norm` (0: no clipping); returns the norm before, a scalar."""
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf)


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which matrix products run in bf16 or fp16; for fp32 it does nothing."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if precision == "bf16" else torch.float16)


def grad_scaler(device: torch.device, precision: str) -> torch.amp.GradScaler:
    """Dynamic loss scaling for fp16; in other precisions the scale is 1."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
