"""The harness must go red: each way in which a rank can go wrong happens here, and must be noticed and named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankFailure, RankPool, run_ranks
from tests.limits import wait_until

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as pool:
        yield pool


def add_up(rank, num_ranks, scale):
    total = torch.full((3,), scale * (rank + 1))
    dist.all_reduce(total)
    return total


def assert_recovers(pool):
    assert [total.tolist() for total in pool.run(add_up, 2.0)] == [[6.0] * 3] * 2


def alive(pid):
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")  # a dead process that nobody has reaped yet (state Z) is gone for us
        return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until_gone(pids):
    wait_until(lambda: not any(map(alive, pids)), f"the end of {pids}")


# ---- what works


def test_results_come_back_by_rank(pool):
    assert_recovers(pool)


def whoami(rank, num_ranks):
    return rank, num_ranks, os.getpid(), dist.get_world_size(), dist.get_backend(), torch.get_num_threads()


def test_the_same_processes_serve_many_cases(pool):
    first, second = pool.run(whoami), pool.run(whoami)
    assert first == second
    assert [result[:2] for result in first] == [(0, 2), (1, 2)]
    assert {result[3:] for result in first} == {(2, "gloo", 1)}


def test_run_ranks_alone_and_with_three():
    assert [total.tolist() for total in run_ranks(add_up, 1, 5.0)] == [[5.0] * 3]
    assert [total.tolist() for total in run_ranks(add_up, 3, 1.0)] == [[6.0] * 3] * 3


def draw(rank, num_ranks):
    return torch.rand(2)


def test_cases_start_from_the_same_seed(pool):
    results = [*pool.run(draw), *pool.run(draw)]
    assert all(torch.equal(result, results[0]) for result in results)


def big_result(rank, num_ranks, size):
    return torch.full((size,), float(rank))


def test_a_result_larger_than_a_pipe_holds(pool):
    results = pool.run(big_result, 3_000_000)
    assert [float(result.sum()) for result in results] == [0.0, 3_000_000.0]


def print_and_return(rank, num_ranks):
    print("hello from", rank)


def test_output_of_the_ranks_is_passed_on(pool, capsys):
    pool.run(print_and_return)
    assert capsys.readouterr().out == "[rank 0] hello from 0\n[rank 1] hello from 1\n"
    pool.run(add_up, 1.0)
    assert capsys.readouterr().out == ""


# ---- one rank raises


def raise_on(rank, num_ranks, guilty):
    print("about to fail")
    if rank == guilty:
        raise ValueError(f"chunk {rank} is not here")


def test_a_raising_rank_fails_with_its_traceback(pool):
    with pytest.raises(RankFailure) as caught:
        pool.run(raise_on, 1)
    text = str(caught.value)
    assert "rank 1 raised ValueError: chunk 1 is not here" in text
    assert 'raise ValueError(f"chunk {rank} is not here")' in text  # the traceback shows the line
    assert "about to fail" in text
    assert_recovers(pool)


def raise_before_collective(rank, num_ranks):
    if rank == 1:
        raise ValueError("the cause")
    add_up(rank, num_ranks, 1.0)


def test_the_cause_comes_before_its_consequence(pool):
    with pytest.raises(RankFailure) as caught:
        pool.run(raise_before_collective, timeout=600)
    first, second = str(caught.value).splitlines()[1:3]
    assert first == "  rank 1 raised ValueError: the cause"
    assert second.startswith("  rank 0 had not finished"), "nobody waits for rank 0, which waits 300 s for rank 1"
    assert_recovers(pool)


def leave(rank, num_ranks, how):
    if rank == 0:
        {"sys.exit": sys.exit, "os._exit": os._exit}[how](0)


@pytest.mark.parametrize("how, said", [("sys.exit", "raised SystemExit"), ("os._exit", "exited with status 0 without")])
def test_a_rank_that_leaves_without_a_result_is_red(pool, how, said):
    with pytest.raises(RankFailure, match=f"rank 0 {said}"):
        pool.run(leave, how)
    assert_recovers(pool)


def return_a_lambda(rank, num_ranks):
    return lambda: rank


def test_a_result_that_cannot_travel_is_red(pool):
    with pytest.raises(RankFailure, match="rank 0 raised TypeError: the result of the case cannot be pickled"):
        pool.run(return_a_lambda)


def test_a_case_that_cannot_travel_is_refused(pool):
    with pytest.raises(TypeError, match="top-level function"):
        pool.run(lambda rank, num_ranks: None)
    assert_recovers(pool)


def leave_a_mark(rank, num_ranks, folder, word):
    with open(f"{folder}/{rank}", "a") as file:
        file.write(word)
    return word


def test_a_case_that_runs_once_runs_again_only_with_other_arguments(pool, tmp_path):
    answers = [pool.run_once(leave_a_mark, str(tmp_path), word) for word in ("a", "a", "b", "a")]
    assert answers == [["a", "a"], ["a", "a"], ["b", "b"], ["a", "a"]]
    assert [(tmp_path / name).read_text() for name in "01"] == ["ab", "ab"]


# ---- one rank dies


def kill_oneself(rank, num_ranks):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    add_up(rank, num_ranks, 1.0)


def test_a_killed_rank_is_noticed_at_once_and_named_first(pool):
    with pytest.raises(RankFailure) as caught:
        pool.run(kill_oneself, timeout=600)
    assert "Timed out" not in str(caught.value), "rank 0 did not wait for as long as a collective may"
    assert str(caught.value).splitlines()[1] == "  rank 1 was killed by SIGKILL without a result"
    assert_recovers(pool)


def test_a_rank_that_died_between_two_cases_is_named(pool):
    assert_recovers(pool)
    os.kill(pool.pids[0], signal.SIGKILL)
    wait_until_gone(pool.pids[:1])
    with pytest.raises(RankFailure, match="rank 0 was killed by SIGKILL"):
        pool.run(add_up, 1.0)
    assert_recovers(pool)


# ---- one rank hangs


def hang_on(rank, num_ranks, guilty):
    if rank == guilty:
        wait_for_godot()


def wait_for_godot():
    time.sleep(1000)


def test_a_hanging_rank_ends_in_time_and_shows_where(pool):
    with pytest.raises(RankFailure) as caught:
        pool.run(hang_on, 0, timeout=2)
    assert "rank 0 had not finished when the case was stopped after" in str(caught.value)
    assert "in wait_for_godot" in str(caught.value)
    assert_recovers(pool)


# ---- the ranks disagree about collectives


def miss_one_collective(rank, num_ranks):
    total = torch.ones(2)
    if rank == 0:  # the classic: a collective under an `if`
        dist.all_reduce(total)
    return total


def miss_the_last_collective_of_two(rank, num_ranks):
    add_up(rank, num_ranks, 1.0)
    if rank == 1:
        dist.broadcast(torch.ones(2), src=1)  # the sender does not wait, so only the harness can notice


@pytest.mark.parametrize("case", [miss_one_collective, miss_the_last_collective_of_two])
def test_a_removed_collective_is_red(pool, case):
    with pytest.raises(RankFailure) as caught:
        pool.run(case, timeout=4)
    assert "did not make the same collective calls" in str(caught.value)
    if case is miss_one_collective:
        assert "dist.all_reduce(total)" in str(caught.value)  # the line at which rank 0 waited
    assert_recovers(pool)


def forget_the_sum(rank, num_ranks):
    return torch.full((2,), float(rank))  # where is the all-reduce?


def test_ranks_that_disagree_are_seen_by_comparing_results(pool):
    zero, one = pool.run(forget_the_sum)
    assert not torch.equal(zero, one)


def send_and_nobody_receives(rank, num_ranks):
    if rank == 0:
        dist.isend(torch.full((1,), 13.0), dst=1)


def receive_once(rank, num_ranks):
    value = torch.full((1,), 7.0)
    if rank == 0:
        dist.send(value, dst=1)
    else:
        value.zero_()
        dist.recv(value, src=0)
    return float(value)


def test_a_forgotten_message_does_not_reach_the_next_case(pool):
    pool.run(send_and_nobody_receives)
    assert pool.run(receive_once) == [7.0, 7.0]


def destroy_the_group(rank, num_ranks):
    dist.destroy_process_group()


def test_the_group_belongs_to_the_harness(pool):
    with pytest.raises(RankFailure, match="destroyed the default process group"):
        pool.run(destroy_the_group)


# ---- nothing is left behind


def start_a_child(rank, num_ranks, folder, then_hang):
    child = subprocess.Popen(["sleep", "1000"])
    Path(folder, str(rank)).write_text(f"{os.getpid()} {child.pid}")
    if then_hang:
        time.sleep(1000)


def started_in(folder):
    return [int(pid) for file in folder.iterdir() for pid in file.read_text().split()]


def test_ranks_and_their_children_are_gone_after_close(tmp_path):
    with RankPool(2) as pool:
        pool.run(start_a_child, tmp_path, False)
        pids = started_in(tmp_path)
        assert len(pids) == 4 and all(alive(pid) for pid in pids)
        folder = pool._folder
    wait_until_gone(pids)
    assert not folder.exists()


def test_ranks_and_their_children_are_gone_after_a_hang(tmp_path):
    with RankPool(2) as pool:
        with pytest.raises(RankFailure):
            pool.run(start_a_child, tmp_path, True, timeout=3)
        pids = started_in(tmp_path)
        assert len(pids) == 4
        wait_until_gone(pids)
        assert pool.pids == []


KILLED_TEST_RUN = """
from tests.harness import RankPool
from tests.harness.test_harness import hang_on, whoami
if __name__ == "__main__":
    pool = RankPool(2)
    print(*[result[2] for result in pool.run(whoami)], flush=True)
    pool.run(hang_on, 0, timeout=1000)
"""


def test_ranks_are_gone_when_the_test_run_is_killed(tmp_path):
    program = tmp_path / "killed.py"
    program.write_text(KILLED_TEST_RUN)
    run = subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(REPO)}
    )
    pids = [int(word) for word in run.stdout.readline().split()]
    assert len(pids) == 2
    run.kill()
    run.wait()
    run.stdout.close()
    wait_until_gone(pids)
