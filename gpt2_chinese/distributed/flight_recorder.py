"""The collectives of torch's process groups, from torch's flight recorder, for the report of a hang.

The recorder keeps the last collectives of gloo and NCCL: number, sizes, whether it has ended, and the stack that called it.
torch always records; reading it takes some milliseconds, so it is read only if no collective was begun for --hang-after.
"""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from durable.calls import NUM_CALLS, Call, name_of
from durable.files import replacing
from durable.hang_report import is_foreign, line_of

SIZE_VARIABLE, SIZE = "TORCH_FR_BUFFER_SIZE", "512"
UNEQUAL = ("alltoall", "all_to_all", "scatter")  # their ranks may send different sizes


def choose_size() -> None:
    """Makes torch keep SIZE collectives, unless the user says another number; before the first process group."""
    os.environ.setdefault(SIZE_VARIABLE, os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", SIZE))


class FlightRecorder:
    """A source of `durable.calls`: what this process has recorded since this object was made."""

    def __init__(self) -> None:
        self._since_ns = time.time_ns()
        self._marks: tuple[Any, ...] = ()

    def is_moving(self) -> bool:
        """True if a collective was begun since the last look."""
        before, self._marks = self._marks, tuple(
            (name, group._get_sequence_number_for_group()) for group, name in _groups().items()
        )
        return before != self._marks

    def waiting(self) -> list[Call]:
        """The collectives that have not ended. Without stacks: torch would import modules for them, perhaps while the main
        thread imports the same."""
        return [call for call, ended in self._calls(with_stacks=False) if not ended]

    def recent(self) -> list[Call]:
        """The last collectives, oldest first."""
        return [call for call, _ in self._calls(with_stacks=True)[-4 * NUM_CALLS :]]

    def _calls(self, with_stacks: bool) -> list[tuple[Call, bool]]:
        """The recorded collectives, oldest first, and whether each has ended."""
        recorded = [entry for dump in _dumps(with_stacks) for entry in pickle.loads(dump).get("entries", [])]
        members = {name: tuple(sorted(dist.get_process_group_ranks(group))) for group, name in _groups().items()}
        found, before_ns = [], self._since_ns
        for entry in sorted(recorded, key=lambda entry: entry["time_created_ns"]):
            if entry["time_created_ns"] < self._since_ns or entry["is_p2p"] or entry["process_group"][0] not in members:
                continue
            operation, sizes = entry["profiling_name"].rpartition(":")[2], _sizes(entry)
            named = name_of(entry["time_created_ns"], before_ns)
            group = entry["process_group"][0]
            what = ", ".join(filter(None, (named, "" if operation in UNEQUAL else sizes)))
            call = Call(operation, what, group, members[group], entry["collective_seq_id"],
                        entry["time_created_ns"] / 1e9, where=_where(entry.get("frames", [])))  # fmt: skip
            found.append((call, entry["retired"] or entry["state"] == "completed"))
            before_ns = entry["time_created_ns"]
        return found


def save_dump(folder: Path, begin: str) -> list[str]:
    """Writes the recorder's own file, which `torchfrtrace --prefix flight-recorder-rank FOLDER` reads."""
    path = folder / begin.replace("hang", "flight-recorder")
    # A torch for GPUs has a recorder of NCCL also where all groups are gloo's: that one is empty.
    dumps = sorted(_dumps(with_stacks=True), key=lambda dump: bool(pickle.loads(dump).get("entries")))
    if not dumps:
        return []
    with replacing(path) as staging:
        staging.write_bytes(dumps[-1])
    return [path.name]


def _dumps(with_stacks: bool) -> list[bytes]:
    """What gloo has recorded, and in a torch for GPUs, what NCCL has; pickles that this process makes."""
    functions = (getattr(torch._C._distributed_c10d, name, None) for name in ("_dump_fr_trace", "_dump_nccl_trace"))
    return [dump(includeCollectives=True, includeStackTraces=with_stacks, onlyActive=False) for dump in functions if dump]


def _groups() -> dict[Any, str]:
    """The process groups of this rank, and their names, which are the same on all ranks of a group."""
    return dict(dist.distributed_c10d._world.pg_names)


def _sizes(entry: dict[str, Any]) -> str:
    """The inputs of a collective, as "65540 float"."""
    shapes, types = entry["input_sizes"], entry["input_dtypes"]
    pairs = zip(shapes, types, strict=False)
    return ", ".join(f"{'x'.join(map(str, shape or [1]))} {kind.lower()}" for shape, kind in pairs)


def _where(frames: list[dict[str, Any]]) -> str:
    """The innermost line that is not torch's own."""
    own = (frame for frame in frames if not is_foreign(frame["filename"]))
    return next((line_of(frame["filename"], frame["line"], frame["name"]) for frame in own), "")
