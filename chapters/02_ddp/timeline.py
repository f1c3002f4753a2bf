"""Records when computation and communication run in a few steps; writes a Chrome trace and a picture.

Open the trace at ui.perfetto.dev or chrome://tracing: a process is a rank, its two rows are computation and communication.
On a GPU the times are the device's, from CUDA events. On a CPU they come from the clock, which all processes of a machine
share.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SKIPPED, KEPT = 1, 3  # steps: the first one warms up; three show the pattern
COLOURS = {"forward": "#9ecae1", "backward": "#3182bd", "communication": "#e6550d"}


class Timeline:
    """Records events, and writes them after `kept` steps.

    Args:
        path: of the trace; the picture has the same path with the suffix .png.
        group: the ranks whose events rank 0 collects; None is one process.
        skipped, kept: number of steps to skip first, and to record then.
    """

    def __init__(self, path: str | Path, group: Any = None, skipped: int = SKIPPED, kept: int = KEPT) -> None:
        self.path, self.skipped, self.kept = Path(path), skipped, kept
        self.alone = group is None
        self.group = None if group is None or group is dist.group.WORLD else group  # see Replica.group
        self.cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        self.side = torch.cuda.Stream() if self.cuda else None
        self.step, self._backward = 0, None
        self.events: list[dict[str, Any]] = []  # name, lane, step, begin, end, and bytes where known
        self.zero = self._now()

    @classmethod
    def of(cls, path: str, group: Any) -> Timeline:
        """Makes the folder of `path`, then the timeline.

        Raises:
            OSError: the folder cannot be made.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return cls(path, group)

    @property
    def recording(self) -> bool:
        """True in the steps that are recorded."""
        return self.skipped <= self.step < self.skipped + self.kept

    def _now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _begin(self, name: str, lane: str, **more: Any) -> dict[str, Any]:
        event = {"name": name, "lane": lane, "step": self.step, "begin": self._now(), "end": None, **more}
        if self.recording:
            self.events.append(event)
        return event

    @contextlib.contextmanager
    def span(self, name: str, lane: str) -> Iterator[None]:
        """Records the block inside `with` as an event."""
        event = self._begin(name, lane)
        yield
        event["end"] = self._now()

    def backward_of(self, loss: Tensor) -> None:
        """Records the backward of `loss`, from its start to the last gradient that becomes ready."""

        def begin(_: Tensor) -> None:
            self._backward = self._begin("backward", "compute")

        if loss.requires_grad:
            loss.register_hook(begin)

    def gradient_is_ready(self) -> None:
        """Moves the end of the recorded backward to now."""
        if self._backward is not None:
            self._backward["end"] = self._now()

    def until(self, work: Any, name: str, num_bytes: int) -> None:
        """Records a collective from now, when it has been started, until it is done."""
        event = self._begin(name, "communication", bytes=num_bytes)
        if self.cuda:  # a separate stream waits, so neither the host nor the computing stream does
            with torch.cuda.stream(self.side):
                work.wait()
                event["end"] = self._now()
        else:
            work.get_future().add_done_callback(lambda _: event.update(end=self._now()))

    def end_step(self) -> None:
        """Called after the last wait of a step. After the last recorded step all ranks call write() together."""
        self._backward = None
        self.step += 1
        if self.step == self.skipped + self.kept:
            self.write()

    def seconds(self) -> list[dict[str, Any]]:
        """This rank's complete events, with begin and end in seconds, in order of begin."""
        if self.cuda:
            torch.cuda.synchronize()
        events = [event for event in self.events if event["end"] is not None]
        for event in events:
            for key in ("begin", "end"):
                if self.cuda and not isinstance(event[key], float):
                    event[key] = self.zero.elapsed_time(event[key]) / 1e3
        return sorted(events, key=lambda event: event["begin"])

    def write(self) -> None:
        """Rank 0 writes the trace and the picture with the events of all ranks; all ranks call it together."""
        ranks = [self.seconds()]
        if not self.alone:
            ranks = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(ranks, self.seconds(), group=self.group)
            if dist.get_rank(self.group) != 0:
                return
        start = min(event["begin"] for events in ranks for event in events)
        for event in (event for events in ranks for event in events):
            event["begin"], event["end"] = event["begin"] - start, event["end"] - start
        self.path.write_text(json.dumps(chrome_trace(ranks)) + "\n", encoding="utf-8")
        try:
            draw(ranks, self.path.with_suffix(".png"))
        except ImportError:
            print(f"no picture for {self.path}: matplotlib is not installed (pip install matplotlib)", flush=True)


def chrome_trace(ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The events of all ranks in the Trace Event Format: microseconds, "X" for complete events, "M" for names."""
    lanes = {"compute": 0, "communication": 1}
    trace: list[dict[str, Any]] = []
    for rank, events in enumerate(ranks):
        trace.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        trace += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}}
            for lane, number in lanes.items()
        ]
        for event in events:
            args = {key: value for key, value in event.items() if key in ("step", "bytes")}
            span = {"ts": event["begin"] * 1e6, "dur": (event["end"] - event["begin"]) * 1e6}
            place = {"pid": rank, "tid": lanes[event["lane"]]}
            trace.append({"ph": "X", "name": event["name"], "cat": event["lane"], **place, **span, "args": args})
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


def draw(ranks: list[list[dict[str, Any]]], path: Path) -> None:
    """The last recorded step of every rank, computation above communication.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    step = max(event["step"] for event in ranks[0])
    figure = Figure(figsize=(10, 0.8 + 1.1 * len(ranks)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shown = [[event for event in events if event["step"] == step] for events in ranks]
    zero = min(event["begin"] for events in shown for event in events)
    rows = []
    for rank, events in enumerate(shown):
        for lane in ("compute", "communication"):
            rows.append(f"rank {rank}: {lane}")
            for event in (event for event in events if event["lane"] == lane):
                colour = COLOURS.get(event["name"], COLOURS["communication"])
                begin, length = 1e3 * (event["begin"] - zero), 1e3 * (event["end"] - event["begin"])
                # collectives overlap: three heights within the row keep them apart
                low, high = len(rows) - 1.4, 0.8
                if lane == "communication":
                    low, high = low + 0.27 * (int(event["name"].split()[-1]) % 3), 0.25
                axes.broken_barh([(begin, length)], (low, high), facecolors=colour, edgecolor="white", linewidth=0.4)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel(f"ms in step {step + 1}: forward (light), backward (dark), all-reduces (orange)")
    figure.savefig(path, dpi=120)
