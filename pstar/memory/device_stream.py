"""Copies on a stream of a GPU: a thread issues them and goes on; events order them with other work, and tell their times.

    issue     queues a copy on the stream, behind the events of what it must follow; the thread does not wait
    order     queues a wait on the current stream: later kernels run after the copy; the thread does not wait
    wait      the thread sleeps until the copy has ended: for those who use the bytes on the host

So the CPU can issue the kernels of a layer while the layer's parameters are still on their way.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

Record = Callable[[float, float], object]
"""Receives the begin and the end of a copy or of a wait, in seconds of the host's clock."""


class Orderable(Protocol):
    """Work that other work can follow."""

    def order(self) -> None: ...


class DeviceCopy:
    """A copy that was issued to a stream and runs at some later time."""

    def __init__(self, device: torch.device, ended: torch.cuda.Event):
        self._device, self._ended = device, ended

    @property
    def done(self) -> bool:
        """Whether the copy has ended."""
        return self._ended.query()

    def order(self) -> None:
        """Work that is queued on the current stream from now on runs after the copy."""
        torch.cuda.current_stream(self._device).wait_event(self._ended)

    def wait(self) -> None:
        """Sleeps until the copy has ended (the event is a blocking one: a loop would take a core from the host's Adam)."""
        self._ended.synchronize()


class EventTimes:
    """Pairs of timed events on one stream, and the functions that receive their times after both have passed.

    Args:
        device: of the events.
        now: the host's clock, in seconds. The events' times are shown on it: one event is waited for at the start.
    """

    def __init__(self, device: torch.device, now: Callable[[], float]):
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(torch.cuda.current_stream(device))
        self._origin.synchronize()
        self._origin_s = now()
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event, Record]] = deque()

    def add(self, began: torch.cuda.Event, ended: torch.cuda.Event, record: Record) -> None:
        """Both events are recorded already, later ones than those of earlier calls."""
        self._pairs.append((began, ended, record))

    def report(self) -> None:
        """Reports the pairs that have passed; does not wait."""
        while self._pairs and self._pairs[0][1].query():
            began, ended, record = self._pairs.popleft()
            begin = self._origin_s + self._origin.elapsed_time(began) / 1000
            record(begin, begin + began.elapsed_time(ended) / 1000)


class CopyStream:
    """A stream of copies in one direction.

    Args:
        device: the GPU.
        now: the host's clock, in seconds.
    """

    def __init__(self, device: torch.device, now: Callable[[], float]):
        self.device, self.times = device, EventTimes(device, now)
        self._stream = torch.cuda.Stream(device)
        self._last: list[DeviceCopy] = []    # the last copy that was issued; they end in their order
        weakref.finalize(self, _wait_for_each, self._last)    # at the latest when the process ends, before it frees memory

    def given(self) -> torch.cuda.Event:
        """An event behind all work that was queued on the current stream so far: a copy's source is written then, and its
        target no longer read."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def issue(self, given: torch.cuda.Event, before: Sequence[Orderable], copy: Callable[[], object],
              record: Record | None = None) -> DeviceCopy:
        """Queues a copy behind `given` and behind the copies `before`. record: receives its times."""
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True, blocking=True)
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(given)
            for each in before:
                each.order()
            began.record()
            copy()
            ended.record()
        if record is not None:
            self.times.add(began, ended, record)
        self._last[:] = [DeviceCopy(self.device, ended)]
        return self._last[0]


def _wait_for_each(copies: list[DeviceCopy]) -> None:
    for copy in copies:
        copy.wait()
