"""Mixed precision by torch itself: autocast casts by operation (level O1), GradScaler scales the loss."""

from __future__ import annotations

from typing import Any

import torch
from casts import HALF, within
from loss_scaler import FIRST_SCALE
from torch import nn


def initialize(model: nn.Module, settings: Any) -> tuple[nn.Module, TorchScaler]:
    """The same as amp.initialize, for levels O0 and O1."""
    device = next(model.parameters()).device
    if settings.opt_level == "O1":
        model.forward = within(lambda: torch.autocast(device.type, HALF[settings.half]), model.forward)
    return model, TorchScaler(settings, device)


class TorchScaler(torch.amp.GradScaler):
    """torch's GradScaler, which also counts the steps that it skips."""

    def __init__(self, settings: Any, device: torch.device) -> None:
        enabled = settings.loss_scale == "dynamic"
        super().__init__(device.type, init_scale=FIRST_SCALE, growth_interval=settings.scale_window, enabled=enabled)
        self.num_skipped = 0

    def update(self, new_scale: Any = None) -> None:
        before = self.get_scale()
        super().update(new_scale)
        self.num_skipped += self.get_scale() < before

    def write_back(self) -> None:
        """Does nothing: autocast needs no masters."""

    def metrics(self) -> dict[str, float]:
        """The same as LossScaler.metrics."""
        return {"loss_scale": self.get_scale(), "skipped_steps": self.num_skipped}
