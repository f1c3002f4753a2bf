"""A job that hangs says who waits for whom: in gloo's collectives and in messages between two ranks."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from durable import calls, hang_report
from gpt2_chinese.distributed.flight_recorder import FlightRecorder, save_dump
from tests.limits import HANGS_S

AFTER_S = 0.4


class Job:
    """One rank of a job that hangs until all ranks have reported."""

    def __init__(self, rank: int, num_ranks: int, folder: str, after_s: float = AFTER_S) -> None:
        self.reported, self.end, store = threading.Event(), None, dist.distributed_c10d._get_default_store()
        self.watch = hang_report.Watch(
            store, rank, num_ranks, after_s, Path(folder), self._end, [FlightRecorder()], save_more=save_dump
        )

    def _end(self, missing: bool, silent: list[int]) -> None:
        self.end = missing, silent
        self.reported.set()

    def sleep(self) -> None:
        """Sleeps until this rank has reported."""
        assert self.reported.wait(HANGS_S)


def report(folder: str, rank: int) -> dict:
    """The file of a rank."""
    return json.loads((Path(folder) / f"hang-rank{rank}.json").read_text())


def skips_one(rank: int, num_ranks: int, folder: str, is_named: bool):
    """The last rank leaves out bucket 1. Returns what `Watch` told its `end`."""
    job = Job(rank, num_ranks, folder)
    skips = rank == num_ranks - 1
    for bucket in (0, 2) if skips else (0, 1, 2):
        if is_named:
            calls.name_next(f"bucket {bucket}")
        dist.all_reduce(torch.ones(100))
    if skips:
        job.sleep()
        dist.all_reduce(torch.ones(100))    # the others can end
    assert job.reported.wait(HANGS_S)
    job.watch.close()
    return job.end


def asleep(rank: int, num_ranks: int, folder: str):
    """Rank 1 sleeps and makes no collective; rank 0 waits for it in a message, and the others in a collective."""
    job = Job(rank, num_ranks, folder)
    dist.barrier()
    value = torch.zeros(3)
    if rank == 1:
        job.sleep()
        dist.send(value, 0)
    elif rank == 0:
        with calls.message("receive", "gradients of step 7", 1):
            dist.recv(value, 1)
    dist.all_reduce(value)
    assert job.reported.wait(HANGS_S)
    job.watch.close()
    return job.end


def healthy(rank: int, num_ranks: int, folder: str):
    """Many looks of the thread while ranks work; returns how many."""
    looks = []

    class Looks:
        def is_moving(self) -> bool:
            return bool(looks.append(1))

        def waiting(self) -> list:
            return []

        recent = waiting

    seen = Looks()
    calls.register(seen)
    before, hang_report.LONGEST_PERIOD_S = hang_report.LONGEST_PERIOD_S, 0.001
    job = Job(rank, num_ranks, folder, HANGS_S)
    hang_report.LONGEST_PERIOD_S = before
    while dist.all_reduce(enough := torch.tensor(float(len(looks) < 20))) or enough:
        pass
    job.watch.close()
    return len(looks), job.end


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.deep)])
def test_a_rank_that_skips_a_collective_is_named_with_the_operation_and_the_bucket(ranks, tmp_path, num_ranks):
    last = num_ranks - 1
    ends = ranks(num_ranks).run(skips_one, str(tmp_path), True)
    assert ends == [(False, [])] * last + [(True, [])]
    for rank in range(num_ranks):
        found = report(tmp_path, rank)
        assert found["missing"] == [last] and found["silent"] == []
        assert "rank 0 has been in all_reduce 3 (bucket 2, 100 float) for" in found["line"]
        where = "it is in no collective, its last was all_reduce 2 (bucket 2, 100 float)"
        assert f"rank {last} is missing: {where}" in found["line"]
        assert found["first_difference"] == ("their calls differ from number 2 on: all_reduce 2 (bucket 1, 100 float) on "
                                             f"rank 0, all_reduce 2 (bucket 2, 100 float) on rank {last}")  # fmt: skip
        assert any(" in skips_one" in line for line in found["stacks"])
        assert (tmp_path / found["more_files"][0]).stat().st_size > 1000
    assert report(tmp_path, last)["at"].endswith("in sleep") and report(tmp_path, 0)["at"].endswith("in skips_one")
    text = "\n".join(hang_report.table(hang_report.read_reports(tmp_path)))
    assert f"missing: rank {last}" in text and "all_reduce 3 (bucket 2, 100 float)" in text and "no collective" in text


def test_without_its_record_the_bucket_is_not_named(ranks, tmp_path):
    ranks(2).run(skips_one, str(tmp_path), False)
    found = report(tmp_path, 0)
    assert found["missing"] == [1] and "bucket" not in found["line"] and found["first_difference"] == ""


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.deep)])
def test_a_rank_in_a_sleep_is_named_with_the_message_that_it_does_not_send(ranks, tmp_path, num_ranks):
    ends = ranks(num_ranks).run(asleep, str(tmp_path))
    assert [missing for missing, _ in ends] == [rank == 1 for rank in range(num_ranks)]
    line = report(tmp_path, num_ranks - 1)["line"]
    assert "rank 0 has been in receive (gradients of step 7) for" in line
    assert "rank 1 is missing: it is in no collective, its last was barrier" in line and "in sleep" in line


def test_a_healthy_run_writes_nothing(ranks, tmp_path):
    for looks, end in ranks(2).run(healthy, str(tmp_path)):
        assert looks >= 20 and end is None
    assert not list(tmp_path.iterdir())
