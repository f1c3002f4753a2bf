"""DeepSpeed's learning rate schedules as a torch scheduler."""

from typing import Any

import torch

from pstar.chunks.interrupts import whole
from pstar.config import Config
from pstar.deepspeed.schedules import betas, check, learning_rate


class DeepSpeedLR(torch.optim.lr_scheduler.LRScheduler):
    """A schedule of DeepSpeed for any torch optimizer, by its name and parameters in DeepSpeed's JSON.

    An engine whose configuration has the key scheduler makes one, model.lr_scheduler, and steps it after every update that
    is not skipped. With another optimizer call step() after optimizer.step(), as for any torch scheduler.

    Args:
        optimizer: WarmupCosineLR, and WarmupLR without warmup_max_lr, scale its learning rate.
        kind: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest.
        params: DeepSpeed's names; defaults are DeepSpeed's.

    Raises ConfigError for an unknown kind, an unknown parameter and a value that cannot be used.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, kind: str, params: dict[str, Any]):
        self.kind, self.params = kind, check(kind, params)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        """The rates of the groups for the next update; sets the betas too if the schedule changes them."""
        pair = betas(self.kind, self.params, self.last_epoch)
        if pair is not None:
            for group in self.optimizer.param_groups:
                group["betas"] = pair
        return [learning_rate(self.kind, self.params, self.last_epoch, base) for base in self.base_lrs]

    def go_to(self, updates: int) -> None:
        """Continues after so many updates, as after loading a checkpoint."""
        self.last_epoch = updates
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def follow_schedule(optimizer: torch.optim.Optimizer, config: Config) -> DeepSpeedLR | None:
    """Makes the configured schedule and has the engine's optimizer step it after each update that is not skipped, as
    DeepSpeed's engine does. None without a schedule."""
    if config.scheduler.type is None:
        return None
    scheduler = DeepSpeedLR(optimizer, config.scheduler.type, config.scheduler.params)

    @whole
    def follow(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not optimizer.skipped:
            scheduler.step()

    optimizer.register_step_post_hook(follow)
    return scheduler
