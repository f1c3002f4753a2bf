"""Ranks of a pool that hang on purpose, until all have reported it."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist

from durable import hang_report
from gpt2_chinese.distributed import torchrun
from tests.limits import HANGS_S


class Job:
    """One rank of a job. Its `watch` begins when every rank is where it will hang, so nothing depends on a rank's speed.

    Attributes:
        ended: the statuses with which launch() would have ended this rank.
    """

    def __init__(self, rank: int, num_ranks: int, folder: str) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.settings: Any = SimpleNamespace(hang_after=0.4, output_dir=folder)
        self.store = dist.distributed_c10d._get_default_store()
        self.ended: list[int] = []
        self.reported = threading.Event()
        self.recorder = torchrun.flight_recorder.FlightRecorder()

    def watch(self) -> None:
        """Call it where this rank hangs. Waits for all ranks, whatever their speed, then begins to watch."""
        self.store.set(f"hangs {self.rank}", "1")
        self.store.wait([f"hangs {rank}" for rank in range(self.num_ranks)])
        for replaced in (
            mock.patch.object(hang_report, "ANSWER_S", HANGS_S),
            mock.patch.object(os, "_exit", self._exit),
            mock.patch.object(hang_report, "_has_ended", lambda pid: True),  # the ranks of a pool go on
            mock.patch.object(torchrun.flight_recorder, "FlightRecorder", lambda: self.recorder),
        ):
            replaced.start()
        self._watch = torchrun._watch(self.settings, self.store, self.rank, self.num_ranks)

    def _exit(self, status: int) -> None:
        self.ended.append(status)
        self.reported.set()

    def sleep(self) -> None:
        """Sleeps until this rank has reported."""
        assert self.reported.wait(HANGS_S)

    def end(self) -> list[int]:
        """Ends the thread; returns the statuses."""
        self.sleep()
        self._watch.close()
        mock.patch.stopall()
        return self.ended


def reports(folder: Path) -> dict[int, dict[str, Any]]:
    """The files of all ranks."""
    found = [json.loads(path.read_text()) for path in folder.glob("hang-rank*.json")]
    return {report["rank"]: report for report in found}
