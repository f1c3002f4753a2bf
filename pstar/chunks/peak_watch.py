"""The peak of activations in near at each moment of a recorded step: starts and stops the measurement, compares ranks."""

from collections.abc import Iterable

import torch

from pstar.comm.collectives import Collectives
from pstar.memory.accelerator import is_accelerator
from pstar.memory.activation_peak import AllocatorPeak, LiveBytes
from pstar.memory.tier import Tier
from pstar.profile.recording import Profile


class PeakWatch:
    """Measures bytes that are not model data (activation_peak.py); the schedule calls take_peak at each recorded moment.

    Args:
        near, far: the tiers, whose buffers are not counted.
        collectives: exchange the peaks of all ranks.
        profile: records the bytes of activations.
    """

    def __init__(self, near: Tier, far: Tier, collectives: Collectives, profile: Profile | None):
        self.near, self.far, self.collectives, self.profile = near, far, collectives, profile
        self._live: AllocatorPeak | LiveBytes | None = None

    @property
    def runs(self) -> bool:
        return self._live is not None

    def start(self) -> None:
        """Begins to measure; no effect if it runs already."""
        if self._live is None:
            near, far = self.near, self.far
            if is_accelerator(near.device):
                self._live = AllocatorPeak(near.device, lambda: near.reserved_bytes)
            else:
                self._live = LiveBytes(lambda address: near.holds(address) or far.holds(address))
            self._live.__enter__()

    def stop(self) -> None:
        """Stops measuring; no effect if it does not run."""
        if self._live is not None:
            self._live.__exit__(None, None, None)
            self._live = None

    def take_peak(self) -> int:
        """The peak in bytes since the last call; 0 if nothing is measured."""
        return self._live.take_peak() if self._live is not None else 0

    def count(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Counts tensors of a compiled block, which LiveBytes cannot see; an allocator counts them itself."""
        if isinstance(self._live, LiveBytes):
            self._live.count(tensors)

    def agree(self, peaks: list[int]) -> list[int]:
        """The maximum over all ranks of each peak: all ranks must make the same decisions."""
        every = self.collectives.from_all(peaks)
        if len({len(each) for each in every}) == 1:
            return [max(each) for each in zip(*every, strict=True)]
        return [max(map(max, every))] * len(peaks)    # ranks ran different modules: one peak for all moments

    def report(self, peak: int | None) -> None:
        """Writes the bytes of activations at this moment into the profile: the known peak, or the bytes measured now."""
        if self.profile is not None and (peak is not None or self._live is not None):
            self.profile.non_model(self._live.now if peak is None else peak)
