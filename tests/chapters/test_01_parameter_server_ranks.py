"""Chapter 01's technique on ranks: the synchronous mode follows one process's curve, the asynchronous mode keeps the
bound on staleness."""

from __future__ import annotations

from concurrent.futures import wait
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gpt2_chinese.distributed.ranks import Ranks
from gpt2_chinese.distributed.weights_check import check_in_sync
from tests.chapters.technique import (
    STEPS,
    Odd,
    Small,
    assert_follows,
    assert_unused,
    build,
    clip_and_step,
    is_red,
    learning_rate,
    oracle,
    rows,
    technique,
)  # fmt: skip
from tests.limits import timeout_s, wait_until

server_module = technique("01_parameter_server", "server")


def wait_for_overtaking(taken, server, num_steps):
    """Rank 1 waits until the server has taken all steps that it may take without this rank's gradients.

    taken: a file that grows by a byte with each of the server's steps.
    """
    most = min(server.version + server.bound, num_steps - 1)  # at the last step all meet
    wait_until(lambda: taken.exists() and taken.stat().st_size >= most, f"step {most} of the server")


def train(rank, num_ranks, bound, num_micros=1, num_steps=STEPS, taken=None):
    model, optimizer = build(seed=rank)  # the server's weights and buffers must reach the workers
    server = server_module.ParameterServer(model, rank, num_ranks, dist.group.WORLD, bound)
    losses, norms, steps, staleness, took_part, scalars = [], [], [], [], 0, []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for step in range(1, num_steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(min(step, STEPS))
        optimizer.zero_grad()
        total = torch.zeros(())
        batches = (rows(step, rank, num_ranks, micro, num_micros) for micro in range(num_micros))
        for inputs, targets in server.work(step, batches):
            loss = server(inputs, targets) / num_micros
            loss.backward()
            total += loss.detach()
            took_part += 1
        if taken and rank == 1 and step > server.version:
            wait_for_overtaking(taken, server, num_steps)
        if taken and server.is_server:
            wait([server._workers.arriving[2]])  # rank 2 is as fast as the server
        server.push(step, total, meet=step == num_steps)
        if server.is_server:
            norms.append(clip_and_step(model, optimizer))
            staleness.append(list(server.staleness))
            losses.append(server.loss)
        server.pull()
        scalars.append(server.step_scalars())
        if bound is None:
            check_in_sync(model, Ranks(rank, num_ranks, group=dist.group.WORLD), step, every=1)
        if taken and server.is_server:
            with taken.open("ab") as file:
                file.write(b".")
    everyone = [losses]
    dist.broadcast_object_list(everyone, 0)
    return {"losses": everyone[0], "norms": norms, "optimizer_steps": len(steps), "staleness": staleness,
            "took_part": took_part, "scalars": scalars, "moments": len(optimizer.state),
            "weights": {n: p.detach() for n, p in model.named_parameters()}}  # fmt: skip


@pytest.mark.each
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_micros", [1, 4])
@pytest.mark.parametrize("bound", [None, 0])
def test_the_law_of_the_curve(ranks, bound, num_micros, num_ranks):
    """Synchronous, and asynchronous with staleness 0, which is the same."""
    results = ranks(num_ranks).run(train, bound, num_micros)
    assert_follows(results)
    assert [result["optimizer_steps"] for result in results] == [STEPS] + [0] * (num_ranks - 1)
    assert [result["moments"] > 0 for result in results] == [True] + [False] * (num_ranks - 1), "only the server steps"


def nothing_arrives(rank, num_ranks):
    """Workers push zeros, as if the server ignored their gradients."""
    pack = server_module.Messages.pack_gradients

    def zeros(messages, loss, version):
        message = pack(messages, loss, version)
        if rank > 0:
            message[: messages.num_gradients] = 0
        return message

    with mock.patch.object(server_module.Messages, "pack_gradients", zeros):
        return train(rank, num_ranks, None)


def test_the_oracle_fails_when_workers_push_zeros(ranks):
    results = ranks(2).run(nothing_arrives)
    is_red(lambda: assert_follows(results))


def weights_stay_where_they_are(rank, num_ranks):
    """Workers push, but discard the pulled weights and keep those of the start."""
    pull = server_module.ParameterServer.pull

    def forgetful(server, scaler=None):
        before = server.messages.pack_weights(server.version, 1.0)
        pull(server, scaler)
        if not server.is_server and server.version > 0:
            server.messages.unpack_weights(before)

    with mock.patch.object(server_module.ParameterServer, "pull", forgetful), mock.patch(f"{__name__}.check_in_sync"):
        return train(rank, num_ranks, None)


def test_the_oracle_fails_when_workers_ignore_pulled_weights(ranks):
    results = ranks(2).run(weights_stay_where_they_are)
    is_red(lambda: assert_follows(results))
    losses = oracle()["losses"]
    assert results[0]["losses"][0] == pytest.approx(losses[0], rel=1e-5)
    assert results[0]["losses"][-1] != pytest.approx(losses[-1], rel=1e-3), "the curve itself is another"


def test_bytes_through_the_server_are_the_formula_s(ranks):
    gradients = sum(p.nbytes for p in Small().parameters())
    for num_ranks in (2, 4):
        scalars = ranks(num_ranks).run(train, None)[0]["scalars"][1:]  # the first row also counts the first pull
        assert all(row["server_bytes"] == row["formula_bytes"] for row in scalars)
        assert scalars[0]["formula_bytes"] == pytest.approx(2 * (num_ranks - 1) * gradients, rel=0.01)


@pytest.mark.parametrize("bound", [1, 3])
def test_asynchronous_a_slow_worker_is_overtaken_within_the_bound(ranks, bound, tmp_path):
    num_steps = 16
    results = ranks(3).run(train, bound, 1, num_steps, tmp_path / "taken")
    server, slow, fast = results
    assert server["optimizer_steps"] == num_steps
    worst = max(max(each) for each in server["staleness"])
    assert worst == bound, "the slowest worker reaches the bound and does not exceed it"
    assert fast["took_part"] == num_steps and slow["took_part"] == num_steps // (bound + 1)
    assert all(loss == loss for loss in server["losses"])
    for result in results[1:]:  # all met at the last step
        for name, weight in server["weights"].items():
            assert torch.equal(weight, result["weights"][name])


def unused(rank, num_ranks):
    torch.manual_seed(0)
    model = Odd()
    model.uses = rank == 1
    server = server_module.ParameterServer(model, rank, num_ranks, dist.group.WORLD)
    for inputs, targets in server.work(1, [rows(1, rank, num_ranks)]):
        loss = server(inputs, targets)
        loss.backward()
    server.push(1, loss)
    server.pull()
    return {n: p.grad for n, p in model.named_parameters()}


def test_unused_parameters(ranks):
    assert_unused(ranks(2).run(unused)[0], num_ranks=2, user=1)


def overflow(rank, num_ranks):
    model, optimizer = build(0)
    server = server_module.ParameterServer(model, rank, num_ranks, dist.group.WORLD)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = [p.detach().clone() for p in model.parameters()]
    for inputs, targets in server.work(1, [rows(1, rank, num_ranks)]):
        loss = server(inputs, targets)
        scaler.scale(loss * (float("inf") if rank == 1 else 1.0)).backward()
    server.push(1, loss)
    if server.is_server:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    server.pull(scaler)
    return scaler.get_scale(), all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_an_overflow_on_a_worker_skips_the_step_and_the_scale_reaches_all(ranks):
    assert ranks(3).run(overflow) == [(512.0, True)] * 3


def timeout_case(rank, num_ranks):
    """As on GPUs, whose group is NCCL's."""
    with mock.patch.object(dist, "get_backend", lambda group: "nccl"):
        server = server_module.ParameterServer(Small(), rank, num_ranks, dist.group.WORLD, timeout=timedelta(seconds=1234))
    dist.barrier()    # a rank that ends its group would end the connections of one that still pulls
    return timeout_s(server.group)


def test_the_server_s_own_group_waits_as_long_as_the_run_says(ranks):
    assert ranks(2).run(timeout_case) == [1234] * 2
