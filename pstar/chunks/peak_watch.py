"""The peaks of what else lies near, moment by moment, while a step is recorded: started, asked, agreed about, stopped."""

from pstar.comm.collectives import Collectives
from pstar.memory.activation_peak import CudaPeak, LiveBytes
from pstar.memory.tier import Tier
from pstar.profile.recording import Profile


class PeakWatch:
    """Measures bytes that are not model data (activation_peak.py); the schedule asks it at each moment that it records.

    Args:
        near, far: the tiers, whose buffers are not counted.
        collectives: ranks agree about peaks.
        profile: is told what is measured, or known.
    """

    def __init__(self, near: Tier, far: Tier, collectives: Collectives, profile: Profile | None):
        self.near, self.far, self.collectives, self.profile = near, far, collectives, profile
        self._live: CudaPeak | LiveBytes | None = None

    @property
    def runs(self) -> bool:
        return self._live is not None

    def start(self) -> None:
        """Begins to measure, where it does not yet."""
        if self._live is None:
            near, far = self.near, self.far
            if near.device.type == "cuda":
                self._live = CudaPeak(near.device, lambda: near.reserved_bytes)
            else:
                self._live = LiveBytes(lambda address: near.holds(address) or far.holds(address))
            self._live.__enter__()

    def stop(self) -> None:
        """Ends measuring, where it goes on."""
        if self._live is not None:
            self._live.__exit__(None, None, None)
            self._live = None

    def take_peak(self) -> int:
        """The most bytes since it was asked last; 0 where nothing is measured."""
        return self._live.take_peak() if self._live is not None else 0

    def agree(self, peaks: list[int]) -> list[int]:
        """Makes of this rank's peaks those of all ranks, which must decide alike."""
        every = self.collectives.from_all(peaks)
        if len({len(each) for each in every}) == 1:
            return [max(each) for each in zip(*every, strict=True)]
        return [max(map(max, every))] * len(peaks)    # ranks with other modules: the same bound at every moment

    def report(self, peak: int | None) -> None:
        """Writes into the profile what else is near at this moment: the peak that is known, or what is measured now."""
        if self.profile is not None and (peak is not None or self._live is not None):
            self.profile.non_model(self._live.now if peak is None else peak)
