"""The peak of bytes that are not model data (activations): counted to the byte, against numbers computed by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pstar.memory.activation_peak import AllocatorPeak, LiveBytes
from pstar.memory.tier import NEAR, Tier
from tests import toy
from tests.pstar.chunks import test_activations as acts

N = 1000
BYTES = 4 * N


def is_chunk_of(model):
    return lambda address: address in model.near._taken or address in model.far._taken


def test_tensors_that_come_and_go():
    with LiveBytes() as live:
        a = torch.zeros(N)
        b = a + 1
        assert (live.now, live.peak) == (2 * BYTES, 2 * BYTES)
        view = b.view(10, -1)[3:]
        del a, b
        assert (live.now, live.peak) == (BYTES, 2 * BYTES), "a view holds its whole storage"
        assert live.take_peak() == 2 * BYTES and live.peak == BYTES
        total = view.sum()
        assert live.now == BYTES + 4
        view.add_(1)
        total.resize_(5)
        assert (live.now, live.peak) == (BYTES + 20, BYTES + 20)
        kept = torch.tensor([1.0, 2.0])
        assert live.now == BYTES + 28
    del view, kept
    assert live.now == 20, "what ends after it was left is still noticed"
    del total
    assert live.now == 0 and live.peak == BYTES + 28


def test_saved_tensors_are_released_during_backward():
    x = torch.linspace(0, 1, N).requires_grad_()
    with LiveBytes() as live:
        loss = x.exp().tanh().sum()
        # exp and tanh save their results, sum nothing.
        assert (live.now, live.take_peak()) == (2 * BYTES + 4, 2 * BYTES + 4)
        seen = []
        loss.grad_fn.next_functions[0][0].next_functions[0][0].register_prehook(lambda grads: seen.append(live.now))
        loss.backward()
        # At tanh: the loss, its gradient 1, both results, and the gradient that is made.
        assert live.take_peak() == 4 + 4 + 3 * BYTES
        # Before exp: tanh's result is gone, its gradient is there; backward() holds the 1 to the end.
        assert seen == [4 + 4 + 2 * BYTES]
        assert live.now == 4 + BYTES, "the loss and x.grad"


def three(x: torch.Tensor) -> torch.Tensor:
    return x.exp().tanh().exp()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_holds_its_result_in_forward_and_makes_the_rest_in_backward(use_reentrant):
    x = torch.linspace(0, 1, N).requires_grad_()
    with LiveBytes() as live:
        y = checkpoint(three, x, use_reentrant=use_reentrant, preserve_rng_state=False)
        assert live.now == BYTES, "plain: 3, for each operation saves its result"
        grad = torch.ones(N)
        live.take_peak()
        y.backward(grad)
        # y, grad, three results again, and the gradient at the last of them; that result is then done, and the next gradient
        # takes its place. The reentrant variant holds it until all of its backward is over.
        assert live.peak == (7 if use_reentrant else 6) * BYTES
        del y, grad
    assert live.now == BYTES, "x.grad"
    expected = torch.autograd.grad(three(x).sum(), x)[0]
    assert torch.equal(x.grad, expected)


def test_chunk_buffers_are_taken_out_again():
    tier = Tier(NEAR, torch.device("cpu"))
    with LiveBytes(lambda address: address in tier._taken) as live:
        small = torch.zeros(N)
        assert live.peak == BYTES
        buffer = tier.allocate(3 * N, torch.float32, "param")     # made by torch.empty: an operation that is seen
        assert (live.now, live.peak) == (BYTES, BYTES)
        more = small + 1
        assert buffer.nbytes == 3 * BYTES and (live.now, live.peak) == (2 * BYTES, 2 * BYTES)
        tier.release(buffer)
        del more, small, buffer
        assert live.now == 0


@acts.VARIANTS
def test_of_an_engine_a_step_is_counted_and_no_number_changes(use_reentrant):
    expected, _ = acts.plain(use_reentrant, 1)
    after_forward = {}
    for offload in (False, True):
        model, optimizer = acts.build(use_reentrant, near_budget="min", offload_activations=offload)
        losses = []
        for step in range(acts.STEPS):
            torch.manual_seed(step)
            optimizer.zero_grad()
            with LiveBytes(is_chunk_of(model)) as live:
                loss = model(acts.tokens(10 * step))
                after_forward[offload] = live.now
                losses.append(loss.item())
                model.backward(loss)
                del loss
                num_params = len(list(model.module.parameters()))
                assert live.now <= 64 + 8 * num_params, "a few scalars of the engine's, and each gradient's norm in float64"
                optimizer.step()
            if use_reentrant is not None:
                assert live.peak >= 4 * acts.HIDDEN_BYTES * 2, "in backward a block makes its 4 times wider results again"
        assert losses == expected
    if use_reentrant is not None:
        assert after_forward[False] - after_forward[True] == (acts.BLOCKS + 1) * acts.HIDDEN_BYTES
        assert after_forward[True] < acts.LEAST_BYTES, "the loss, the random states of the checkpoints"
    else:
        # Of each block: its input, and four times as wide the input of GELU, dropout's factors and dropout's result.
        of_block = acts.HIDDEN_BYTES * (1 + 4 + 4 + 4)
        assert after_forward[False] - after_forward[True] == acts.BLOCKS * of_block + acts.HIDDEN_BYTES


def test_compiled_modules_stay_compiled():
    """With aot_eager, whose graphs run operation by operation, so that they are seen as well."""
    def model_func() -> toy.Toy:
        model = toy.Toy()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model

    losses, _, _ = toy.oracle(3)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, optimizer = toy.build(model_func, near_budget="min", default_chunk_size=5_000)
    got = []
    for step in range(3):
        optimizer.zero_grad()
        with LiveBytes(is_chunk_of(model)) as live:
            loss = model(*toy.batch(step))
            assert live.now > 3 * toy.BATCH * toy.LENGTH * 4 * toy.WIDTH * 4, "one wide result a block at least"
            model.backward(loss)
        got.append(loss.item())
        optimizer.step()
    assert got == losses and torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.gpu
def test_the_allocators_peak_counts_neither_chunks_nor_what_was_there_before():
    device = torch.accelerator.current_accelerator()
    _others, chunk = torch.zeros(1 << 18, device=device), torch.zeros(1 << 20, device=device)
    with AllocatorPeak(device, lambda: chunk.nbytes) as live:
        a = torch.zeros(1 << 20, device=device)
        del a
        assert (live.take_peak(), live.peak, live.now) == (4 << 20, 0, 0)
