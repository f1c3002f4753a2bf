"""Chapter 02's technique on ranks: every variant and backend follows one process's curve; its test fails without the
collective."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gpt2_chinese.distributed.ranks import Ranks
from gpt2_chinese.distributed.weights_check import check_in_sync
from gpt2_chinese.errors import RunError
from gpt2_chinese.run.run import Run
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
    mean_over_ranks,
    rows,
    technique,
)  # fmt: skip

ddp = technique("02_ddp", "ddp")
ring = technique("02_ddp", "ring")

KINDS = ["naive", "bucket", "ring", "torch"]


def replicate(model, kind: str, bucket_mb: float = 0.002, timeline=None):
    backend = "torch" if kind == "torch" else "own"
    settings = SimpleNamespace(backend=backend, variant=kind, bucket_mb=bucket_mb, timeline=timeline)
    return ddp.replicate(model, dist.group.WORLD, settings)


def train(rank: int, num_ranks: int, kind: str, num_micros: int, timeline=None):
    model, optimizer = build(seed=rank)  # rank 0's weights and buffers must reach the others
    replica = replicate(model, kind, timeline=timeline)
    losses, norms, steps = [], [], []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(step)
        optimizer.zero_grad()
        total = 0.0
        for micro in range(num_micros):
            with replica.no_sync(micro + 1 < num_micros):
                loss = replica(*rows(step, rank, num_ranks, micro, num_micros)) / num_micros
                loss.backward()
            total += loss.item()
        replica.wait()
        norms.append(clip_and_step(model, optimizer))
        losses.append(total)
        check_in_sync(model, Ranks(rank, num_ranks, group=dist.group.WORLD), step, every=1)
    scalars = replica.step_scalars()
    replica.close()
    return {"losses": mean_over_ranks(losses), "norms": norms, "optimizer_steps": len(steps), "scalars": scalars,
            "weights": {n: p.detach() for n, p in model.named_parameters()}}  # fmt: skip


@pytest.mark.each
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_micros", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_law_of_the_curve(ranks, kind, num_micros, num_ranks):
    assert_follows(ranks(num_ranks).run(train, kind, num_micros))


@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_is_reduced_once_a_step(ranks, kind):
    once, four = (ranks(2).run(train, kind, num_micros)[0]["scalars"] for num_micros in (1, 4))
    assert once == four
    assert once["num_reductions"] == {"naive": 5, "bucket": 3, "ring": 3}.get(kind, once["num_reductions"])
    gradients = sum(p.nbytes for p in Small().parameters())
    assert gradients <= once["reduced_bytes"] <= gradients + 5 * 4


def without_collective(rank, num_ranks, kind):
    """The same training, but gradients are not reduced."""
    done = SimpleNamespace(wait=lambda: None)
    real = dist.all_reduce
    small = 10  # losses, hashes and checks are still reduced: they must show the fault

    def silent(tensor, *args, **kwargs):
        return done if tensor.numel() > small and tensor.dtype == torch.float32 else real(tensor, *args, **kwargs)

    def alone(replica, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    with mock.patch.object(dist, "all_reduce", silent), mock.patch.object(ddp, "ring_all_reduce", lambda *_: 0), \
         mock.patch.object(ddp, "_reduce_and_note", alone), mock.patch(f"{__name__}.check_in_sync"):  # fmt: skip
        return train(rank, num_ranks, kind, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_fails_when_gradients_are_not_reduced(ranks, kind):
    results = ranks(2).run(without_collective, kind)
    is_red(lambda: assert_follows(results))


# ---- the ring


def ring_case(rank, num_ranks, size, dtype):
    own = torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)
    expected = own.clone()
    dist.all_reduce(expected)
    sent = ring.ring_all_reduce(own)
    gathered = [torch.empty_like(own) for _ in range(num_ranks)]
    dist.all_gather(gathered, own)
    return own, expected, sent, all(torch.equal(own, other) for other in gathered)


@pytest.mark.each
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 3, 4, 12, 1001])
def test_the_ring_is_the_library_s_all_reduce(ranks, num_ranks, size):
    results = ranks(num_ranks).run(ring_case, size, torch.float32)
    for own, expected, _, same in results:
        torch.testing.assert_close(own, expected)
        assert same, "all ranks must end with the same bits"
    total = sum(sent for _, _, sent, _ in results)
    assert total == pytest.approx(ring.ring_bytes(4 * size, num_ranks) * num_ranks), "each sends 2 (p - 1) / p of it"


@pytest.mark.parametrize("num_ranks", range(1, 10))
def test_the_table_of_turns_sums_every_chunk_once(num_ranks):
    """Without processes: after p - 1 turns each rank has one complete sum, at the end all of them, and no rank twice."""
    turns = ring.ring_turns(num_ranks)
    assert [phase for phase, _ in turns] == ["reduce-scatter"] * (num_ranks - 1) + ["all-gather"] * (num_ranks - 1)
    held = [[[rank] for _ in range(num_ranks)] for rank in range(num_ranks)]
    for number, (phase, sends) in enumerate(turns):
        assert sorted(sends) == list(range(num_ranks)), "in a turn each chunk travels once"
        arrived = [held[rank - 1][sends[rank - 1]] for rank in range(num_ranks)]
        for rank in range(num_ranks):
            chunk = sends[rank - 1]
            held[rank][chunk] = held[rank][chunk] + arrived[rank] if phase == "reduce-scatter" else arrived[rank]
        if number == num_ranks - 2:
            assert all(sorted(own[(rank + 1) % num_ranks]) == list(range(num_ranks)) for rank, own in enumerate(held))
    assert all(sorted(chunk) == list(range(num_ranks)) for own in held for chunk in own)


# ---- what is uneven, unused or out of order


def unused(rank, num_ranks, kind):
    torch.manual_seed(0)
    model = Odd()
    model.uses = rank == 0
    if kind == "torch":
        replica = ddp.TorchReplica(model, dist.group.WORLD, 2000, find_unused_parameters=True)
    else:
        replica = ddp.OwnReplica(model, dist.group.WORLD, kind, 2000)
    for _ in range(2):  # two steps: the second one must begin with reset records
        model.zero_grad()
        replica(*rows(1, rank, num_ranks)).backward()
        replica.wait()
    replica.close()
    return {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.each
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_unused_parameters(ranks, kind, num_ranks):
    for grads in ranks(num_ranks).run(unused, kind):
        assert_unused(grads, num_ranks, user=0)


def uneven(rank, num_ranks, kind, shares):
    torch.manual_seed(0)
    model = Small()
    replica = replicate(model, kind)
    inputs, targets = rows(1)
    first, own = sum(shares[:rank]), shares[rank]
    if own:
        loss = replica(inputs[first : first + own], targets[first : first + own])
        replica.weigh(loss, own).backward()
    else:  # its data have ended
        loss = replica(inputs[:1], targets[:1])
        replica.weigh(loss, 0).backward()
    replica.wait()
    replica.close()
    return [p.grad for p in model.parameters()]


@pytest.mark.each
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shares", [(5, 2, 1), (3, 3, 0)])
def test_an_uneven_last_batch_is_the_mean_over_its_rows(ranks, kind, shares):
    torch.manual_seed(0)
    model = Small()
    inputs, targets = rows(1)
    model(inputs[: sum(shares)], targets[: sum(shares)]).backward()
    for grads in ranks(3).run(uneven, kind, shares):
        torch.testing.assert_close(grads, [p.grad for p in model.parameters()])


def without_data(rank, num_ranks, kind):
    torch.manual_seed(0)
    model = Small()
    replica = replicate(model, kind)
    if rank != 1:
        replica(*rows(1, 0, 2)).backward()
    replica.wait()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("kind", ["naive", "bucket", "ring"])
def test_a_rank_whose_data_have_ended_takes_part_by_waiting(ranks, kind):
    first, second = ranks(2).run(without_data, kind)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def forgets_no_sync(rank, num_ranks):
    model, _ = build(0)
    replica = replicate(model, "bucket")
    for micro in range(2):
        replica(*rows(1, rank, num_ranks, micro, 2)).backward()


def test_a_second_backward_after_a_bucket_left_is_an_error(ranks):
    with pytest.raises(AssertionError, match="outside no_sync"):
        ranks(2).run(forgets_no_sync)


# ---- fp16: the same decision everywhere


def overflow(rank, num_ranks, kind):
    model, optimizer = build(0)
    replica = replicate(model, kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = [p.detach().clone() for p in model.parameters()]
    loss = replica(*rows(1, rank, num_ranks))
    scaler.scale(loss * (float("inf") if rank == 1 else 1.0)).backward()
    replica.wait()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    replica.close()
    return scaler.get_scale(), all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks, kind):
    assert ranks(3).run(overflow, kind) == [(512.0, True)] * 3


# ---- the check of weights


def one_bit(rank, num_ranks, which):
    model, _ = build(0)
    if rank in which:
        model.layers[1].weight.data.view(torch.int32)[3, 3] ^= 1
    try:
        check_in_sync(model, Ranks(rank, num_ranks, group=dist.group.WORLD), step=20, every=10)
    except RunError as error:
        return str(error)


def test_one_flipped_bit_is_found_and_its_rank_named(ranks):
    line = "after step 20 the weights of {} are not those of rank 0, first in layers.1.weight"
    assert ranks(3).run(one_bit, (2,)) == [line.format("rank 2")] * 3
    assert ranks(3).run(one_bit, (1, 2)) == [line.format("ranks 1, 2")] * 3
    assert ranks(3).run(one_bit, ()) == [None] * 3


def logged(rank, num_ranks, step, among):
    """The message of Run.log on a rank when rank 1 holds other weights than rank 0."""
    model, _ = build(rank)
    run = Run.__new__(Run)
    run.settings, run.ranks = SimpleNamespace(check_sync=10), Ranks(rank, num_ranks, group=dist.group.WORLD)
    with mock.patch.object(Run, "_log_row") as row:
        try:
            run.log(step, loss=1.0, lr=0.1, in_sync=model, among=among)
        except RunError as error:
            return row.call_count, str(error)
    return row.call_count, None


def test_a_run_compares_replicas_every_few_steps_after_the_row_is_written(ranks):
    line = "after step 20 the weights of rank 1 are not those of rank 0, first in embed.weight"
    assert ranks(2).run(logged, 20, None) == [(1, line), (0, line)]
    assert ranks(2).run(logged, 21, None) == [(1, None), (0, None)]
    assert ranks(2).run(logged, 20, Ranks()) == [(1, None), (0, None)], "each rank holds a part of its own"


# ---- overlap


class Slow(torch.autograd.Function):
    """Backward takes long enough to tell communication during it from communication after it."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.02)
        return grad


class SlowBackward(Small):
    def forward(self, inputs, targets):
        x = Slow.apply(self.embed(inputs))  # the layers' gradients are ready 20 ms before the embedding's
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return torch.nn.functional.cross_entropy(x.flatten(0, 1), targets.flatten() % 16)


def overlap(rank, num_ranks, kind, path):
    torch.manual_seed(0)
    model = SlowBackward()
    replica = replicate(model, kind, timeline=path)
    for step in range(4):
        model.zero_grad()
        replica(*rows(step, rank, num_ranks)).backward()
        replica.wait()
    events = replica.timeline.seconds()
    replica.close()
    return events


@pytest.mark.parametrize("kind", KINDS)
def test_communication_starts_before_backward_ends(ranks, kind, tmp_path):
    path = tmp_path / "new" / "trace.json"
    for events in ranks(2).run(overlap, kind, str(path)):
        for step in (2, 3):  # torch cuts its buckets anew after its first step
            own = [event for event in events if event["step"] == step]
            backward = next(event for event in own if event["name"] == "backward")
            sent = [event for event in own if event["lane"] == "communication"]
            starts_early = min(event["begin"] for event in sent) < backward["end"] - 0.01
            assert starts_early == (kind in ("bucket", "torch")), (kind, own)
    trace = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in trace} == {0, 1}
    assert {"forward", "backward", "bucket 0"} <= {event["name"] for event in trace if event["ph"] == "X"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in trace if event["ph"] == "X")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
