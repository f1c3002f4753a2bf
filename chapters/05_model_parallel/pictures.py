"""Records when each rank ran each F and B in a few steps; writes a Chrome trace and a picture.

Open the trace at ui.perfetto.dev or chrome://tracing. All processes of a machine share the clock. On a GPU recorded steps
synchronize with the device before and after each event, to time the computation itself; the other steps do not.
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

SKIPPED, KEPT = 1, 3  # steps: the first one warms up; three show the pattern
COLOURS = {"F": "#9ecae1", "B": "#3182bd"}


class Timeline:
    """Records events.

    Args:
        path: of the trace; the picture has the same path with the suffix .png. None: record only to measure the bubble.
        device: the rank's device.
    """

    def __init__(self, path: str | None, device: torch.device) -> None:
        self.path, self.device = Path(path) if path else None, device
        self.step = 0
        self.events: list[dict[str, Any]] = []  # kind F or B, micro, chunk, step, begin and end in seconds

    @property
    def recording(self) -> bool:
        """True in the steps that are recorded; on a GPU only if --timeline names a file, because recording synchronizes."""
        asked = self.path is not None or self.device.type != "cuda"
        return asked and SKIPPED <= self.step < SKIPPED + KEPT

    @contextlib.contextmanager
    def span(self, kind: str, micro: int, chunk: int) -> Iterator[None]:
        """Records the block inside `with` as an event."""
        if not self.recording:
            yield
            return
        begin = self._now()
        yield
        event = {"kind": kind, "micro": micro, "chunk": chunk, "step": self.step, "begin": begin, "end": self._now()}
        self.events.append(event)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def end_step(self) -> None:
        """Called after the last computation of a step."""
        self.step += 1

    def gather(self, group: Any) -> list[list[dict[str, Any]]]:
        """The events of all ranks of a group, by rank; all its ranks call it together."""
        if group is None:
            return [self.events]
        ranks: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(ranks, self.events, group=group)
        return ranks


def measured_bubble(ranks: list[list[dict[str, Any]]]) -> float | None:
    """Fraction of time that ranks wait, from a step's first begin to its last end, over all recorded steps."""
    busy = span = 0.0
    for step in {event["step"] for events in ranks for event in events}:
        own = [event for events in ranks for event in events if event["step"] == step]
        busy += sum(event["end"] - event["begin"] for event in own)
        span += len(ranks) * (max(event["end"] for event in own) - min(event["begin"] for event in own))
    return 1 - busy / span if span else None


def write(ranks: list[list[dict[str, Any]]], path: Path) -> None:
    """Writes the trace, and next to it the picture if matplotlib is installed.

    Raises:
        OSError: the file or its folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    zero = min((event["begin"] for events in ranks for event in events), default=0.0)
    trace: list[dict[str, Any]] = []
    for rank, events in enumerate(ranks):
        trace.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} of the pipeline"}})
        for event in events:
            times = {"ts": (event["begin"] - zero) * 1e6, "dur": (event["end"] - event["begin"]) * 1e6}
            args = {key: event[key] for key in ("step", "micro", "chunk")}
            place = {"cat": event["kind"], "pid": rank, "tid": 0}
            trace.append({"ph": "X", "name": name_of(event), **place, **times, "args": args})
    path.write_text(json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}) + "\n", encoding="utf-8")
    try:
        draw(ranks, path.with_suffix(".png"))
    except ImportError:
        print(f"no picture for {path}: matplotlib is not installed (pip install matplotlib)", flush=True)


def name_of(event: dict[str, Any]) -> str:
    """F3 is micro-batch 3 forward, F3' in the rank's second stage."""
    return f"{event['kind']}{event['micro']}" + "'" * event["chunk"]


def draw(ranks: list[list[dict[str, Any]]], path: Path) -> None:
    """The last recorded step of every rank: forward light, backward dark.

    Raises:
        ImportError: matplotlib is missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    step = max((event["step"] for events in ranks for event in events), default=0)
    shown = [[event for event in events if event["step"] == step] for events in ranks]
    zero = min((event["begin"] for events in shown for event in events), default=0.0)
    figure = Figure(figsize=(10, 1.0 + 0.6 * len(ranks)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for rank, events in enumerate(shown):
        for event in events:
            begin, length = 1e3 * (event["begin"] - zero), 1e3 * (event["end"] - event["begin"])
            axes.broken_barh([(begin, length)], (rank - 0.4, 0.8), facecolors=COLOURS[event["kind"]], edgecolor="white")
            axes.text(begin + length / 2, rank, name_of(event), ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
    axes.invert_yaxis()
    axes.set_xlabel(f"ms in step {step + 1}: forward (light), backward (dark), waiting (white)")
    figure.savefig(path, dpi=120)
