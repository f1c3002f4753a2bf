"""The room that chunks will have in near at the coming stretches of the trace: rule 2 of prefetch.py walks along them."""

from collections import deque

from pstar.chunks.room import NearRoom
from pstar.schedule.schedule import Schedule

INFINITE = float("inf")


class RoomAhead:
    """Adds up the bytes that come to near, less those that leave it, along the coming stretches, as in the last step.

    A gradient that leaves near counts for `num_keys` more stretches: its copy may be under way, and whoever took its room
    would wait for that. Its group's parameters have an equal copy in far, so their room is free at once.

    Args:
        room: near's size.
        schedule: the trace.
        num_keys: for how many stretches a copy to far counts as under way.
    """

    __slots__ = ("_first", "_leaving", "_length", "_num_keys", "_under_way", "bound", "next_end", "promised", "tightest")

    def __init__(self, room: NearRoom, schedule: Schedule, num_keys: int):
        near, self._first, self._num_keys = room.near, schedule.stretch, num_keys
        self._leaving, self._length = schedule.trace.leaving, len(schedule.trace)
        self._under_way = deque((each + 1 + num_keys, num_bytes) for each, num_bytes in schedule.left_before(num_keys))
        self.next_end = self._under_way[0][0] if self._under_way else INFINITE
        """The stretch at which the oldest copy no longer counts as under way: the walk calls end_copy there."""
        self.promised = sum(num_bytes for _, num_bytes in self._under_way)
        """Bytes that come to near between now and the walk's stretch, less those that leave."""
        self.bound = (INFINITE if near.bound_bytes is None else near.bound_bytes) - self.promised
        """The least room of the stretches so far, less what was promised there."""
        self.tightest = INFINITE if near.limit_bytes is None else self._first
        """The stretch that gives `bound`: there cannot be more room before it is over, unless a block leaves near."""

    def end_copy(self) -> None:
        """The oldest copy of a gradient to far no longer counts."""
        self.promised -= self._under_way.popleft()[1]
        self.next_end = self._under_way[0][0] if self._under_way else INFINITE

    def gradient(self, num_bytes: int, room: float, stretch: int, moment: int) -> None:
        """A gradient arrives in a stretch that begins at `moment`, in which chunks have `room` bytes of near.

        num_bytes: of the gradient; 0 if it is near now.
        """
        self.promised += num_bytes
        if room - self.promised < self.bound:    # before the group's parameters leave
            self.bound, self.tightest = room - self.promised, stretch
        left = self._leaving.get(moment if moment < self._length else moment - self._length)
        if left is not None and stretch > self._first:    # in the current stretch it may have left already
            self._under_way.append((stretch + 1 + self._num_keys, left.grad_bytes))
            self.next_end = self._under_way[0][0]
            self.promised -= left.param_bytes
