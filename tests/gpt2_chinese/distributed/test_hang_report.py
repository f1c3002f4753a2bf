"""A job that hangs says who waits for whom: in gloo's collectives and in messages between two ranks."""

from __future__ import annotations

import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from durable import calls, hang_report
from gpt2_chinese.distributed import flight_recorder
from gpt2_chinese.distributed.flight_recorder import FlightRecorder
from gpt2_chinese.errors import LOST_PEER
from tests.hanging import Job, reports
from tests.limits import HANGS_S


def skips_one(rank: int, num_ranks: int, folder: str, is_named: bool) -> list[int]:
    """The last rank leaves out bucket 1, so its bucket 2 is added to the others' bucket 1; then it sleeps."""
    job, skips = Job(rank, num_ranks, folder), rank == num_ranks - 1
    for bucket in (0, 2) if skips else (0, 1, 2):
        if is_named:
            calls.name_next(f"bucket {bucket}")
        work = dist.all_reduce(torch.ones(100), async_op=True)
        if bucket < 2:
            work.wait()
    job.watch()
    if skips:
        job.sleep()
        dist.all_reduce(torch.ones(100))  # now the others can end
    work.wait()
    return job.end()


def asleep(rank: int, num_ranks: int, folder: str) -> list[int]:
    """Rank 1 sleeps; rank 0 waits for a message of it, and the others wait for both in a collective."""
    job = Job(rank, num_ranks, folder)
    dist.barrier()
    value = torch.zeros(3)
    if rank == 1:
        job.watch()
        job.sleep()
        dist.send(value, 0)
    elif rank == 0:
        with calls.message("receive", "gradients of step 7", 1):
            work = dist.irecv(value, 1)
            job.watch()
            work.wait()
    total = dist.all_reduce(value, async_op=True)
    if rank > 1:
        job.watch()
    total.wait()
    return job.end()


def healthy(rank: int, num_ranks: int, folder: str) -> int:
    """Ranks work while the thread looks again and again; returns how often it has looked."""
    looks: list[int] = []

    class Looks(FlightRecorder):
        def is_moving(self) -> bool:
            looks.append(1)
            return super().is_moving()

    store = dist.distributed_c10d._get_default_store()
    with mock.patch.object(hang_report, "LONGEST_PERIOD_S", 0.001):
        watch = hang_report.Watch(store, rank, num_ranks, HANGS_S, Path(folder), pytest.fail, [Looks()])
        more = torch.ones(1)
        while more:
            more.fill_(len(looks) < 20)
            dist.all_reduce(more)
        watch.close()
    return len(looks)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.deep)])
def test_a_rank_that_skips_a_collective_is_named_with_the_operation_and_the_bucket(ranks, tmp_path, num_ranks):
    last = num_ranks - 1
    assert ranks(num_ranks).run(skips_one, str(tmp_path), True) == [[LOST_PEER]] * last + [[1]]
    found = reports(tmp_path)
    for rank in range(num_ranks):
        assert found[rank]["missing"] == [last] and found[rank]["silent"] == []
        line = found[rank]["line"]
        assert "in all_reduce 3 (bucket 2, 100 float) for" in line
        assert f"rank {last} is missing: it is in no collective, its last was all_reduce 2 (bucket 2, 100 float)" in line
        assert line.endswith("their calls differ from number 2 on: all_reduce 2 (bucket 1, 100 float) on rank 0, "
                             f"all_reduce 2 (bucket 2, 100 float) on rank {last}")  # fmt: skip
        assert any(" in skips_one" in frame for frame in found[rank]["stacks"])
        assert any(call["where"].endswith("in skips_one") for call in found[rank]["recent"])
        recorder = pickle.loads((tmp_path / found[rank]["more_files"][0]).read_bytes())
        assert recorder["entries"][-1]["profiling_name"] == "gloo:all_reduce"
    text = "\n".join(hang_report.table(hang_report.read_reports(tmp_path)))
    assert f"missing: rank {last}" in text and "all_reduce 3 (bucket 2, 100 float)" in text and "no collective" in text


@pytest.mark.parametrize("of_gloo_first", [True, False])
def test_the_recorder_that_has_entries_is_saved(monkeypatch, tmp_path: Path, of_gloo_first: bool) -> None:
    """A torch for GPUs has NCCL's recorder, too, empty where all groups are gloo's."""
    dumps = [pickle.dumps({"entries": entries}) for entries in (["a call"], [])]
    monkeypatch.setattr(flight_recorder, "_dumps", lambda with_stacks: dumps if of_gloo_first else dumps[::-1])
    [name] = flight_recorder.save_dump(tmp_path, "hang-rank0")
    assert (tmp_path / name).read_bytes() == dumps[0]


def test_without_its_record_the_bucket_is_not_named(ranks, tmp_path):
    ranks(2).run(skips_one, str(tmp_path), False)
    found = reports(tmp_path)[0]
    assert found["missing"] == [1] and "bucket" not in found["line"] and found["first_difference"] == ""


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.deep)])
def test_a_rank_in_a_sleep_is_named_with_the_message_that_it_does_not_send(ranks, tmp_path, num_ranks):
    assert ranks(num_ranks).run(asleep, str(tmp_path)) == [[1 if rank == 1 else LOST_PEER] for rank in range(num_ranks)]
    for found in reports(tmp_path).values():
        assert found["missing"] == [1]
        assert "rank 0 has been in receive (gradients of step 7) for" in found["line"]
        assert "rank 1 is missing: it is in no collective, its last was barrier" in found["line"]


def test_a_healthy_run_writes_nothing(ranks, tmp_path):
    assert min(ranks(2).run(healthy, str(tmp_path))) >= 20
    assert not list(tmp_path.iterdir())
