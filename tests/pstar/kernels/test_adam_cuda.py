"""The CUDA kernels on a GPU: the CPU's bits, on any stream, without waiting. Skipped where there is no GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import pstar
from pstar.kernels import adam_steps, cuda, norm_blocks, squared_norms
from tests import toy
from tests.pstar.kernels.test_adam import BF16, FP16, FP32, LAYOUTS, WITH_L2, arrays, assert_same_bits, make

pytestmark = pytest.mark.gpu


def to_cuda(update):
    fields = {field.name: getattr(update, field.name) for field in dataclasses.fields(update)}
    moved = {name: value.cuda() for name, value in fields.items() if isinstance(value, torch.Tensor)}
    if update.copy16 is update.grad:
        moved["copy16"] = moved["grad"]
    if update.scales is not None:
        moved["scales"] = tuple(scale.cuda() for scale in update.scales)
    return dataclasses.replace(update, **moved)


def to_cpu(update):
    found = {name: getattr(update, name).cpu() for name in ("param", "exp_avg", "exp_avg_sq")}
    found |= {name: getattr(update, name).cpu() for name in ("low", "copy16") if getattr(update, name) is not None}
    if update.scales is not None:
        found["scales"] = tuple(scale.cpu() for scale in update.scales)
    return dataclasses.replace(update, **found)


def test_the_library_is_there():
    assert cuda.library() is not None, "NVRTC comes with torch's CUDA build"


@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("grad_dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bits_as_the_cpu(layout, grad_dtype, bits):
    if layout == "shared slot" and grad_dtype == FP32:
        pytest.skip("an fp32 gradient has a slot of its own")
    sizes = ((1, 0, True), (17, 0, True), (4_101, 0, False), (5_000, 3, False), (1_000_003, 0, False))
    sizes += ((10, 0, False),) * 40    # more runs than one launch takes
    for fields in ({}, {"options": WITH_L2, "grad_scale": 0.7}):
        here = [make(layout, grad_dtype, numel, bits, odd, shift) for numel, shift, odd in sizes]
        here = [dataclasses.replace(update, **fields) for update in here]
        there = [to_cuda(update) for update in here]
        adam_steps(here)
        adam_steps(there)
        for one, other in zip(there, here, strict=True):
            assert_same_bits(to_cpu(one), other)


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_the_same_norms_as_the_cpu(dtype):
    grads = [torch.randn(numel).to(dtype) for numel in (0, 1, 300, 8_193, 3_000_017)]
    assert torch.equal(squared_norms([grad.cuda() for grad in grads]).cpu(), squared_norms(grads))
    for grad in grads:
        assert torch.equal(norm_blocks(grad.cuda()).cpu(), norm_blocks(grad))
    mixed = [grads[1].cuda(), grads[2].float().cuda(), grads[3].half().cuda()]
    assert torch.equal(squared_norms(mixed).cpu(), squared_norms([grad.cpu() for grad in mixed]))


def test_clipping_and_overflow_are_decided_on_the_device():
    """Under torch's check that nothing waits for the device."""
    update = to_cuda(make("fp32", FP32, 100_000))
    expected = to_cuda(make("fp32", FP32, 100_000))
    factor = (1.0 / squared_norms([expected.grad]).sqrt()).clamp(max=1.0).float()
    adam_steps([dataclasses.replace(expected, grad_scale=float(factor))])
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm = squared_norms([update.grad]).sqrt()
        overflow = (~norm.isfinite()).float()
        adam_steps([dataclasses.replace(update, grad_scale=(1.0 / norm).clamp(max=1.0).float(), skip=overflow)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_bits(to_cpu(update), to_cpu(expected))
    update.grad[77] = torch.inf
    before = [tensor.clone() for tensor in arrays(update)]
    adam_steps([dataclasses.replace(update, skip=(~squared_norms([update.grad]).isfinite()).float())])
    assert all(torch.equal(one, other) for one, other in zip(arrays(update), before, strict=True))


def test_the_current_stream_is_used():
    stream, update = torch.cuda.Stream(), to_cuda(make("fp32", FP32, 10_000_000))
    expected = make("fp32", FP32, 10_000_000)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        update.grad.mul_(2)
        adam_steps([update])
    stream.synchronize()
    expected.grad.mul_(2)
    adam_steps([expected])
    assert_same_bits(to_cpu(update), expected)


def test_one_optimizer_over_parameters_of_both_kinds():
    torch.manual_seed(0)
    here = [torch.nn.Parameter(torch.randn(1_000)) for _ in range(4)]
    devices = ("cpu", "cuda", "cpu", "cuda")
    mixed = [torch.nn.Parameter(param.detach().clone().to(device)) for param, device in zip(here, devices, strict=True)]
    one, other = pstar.HybridAdam(here, lr=toy.LR), pstar.HybridAdam(mixed, lr=toy.LR)
    for _ in range(3):
        for first, second in zip(here, mixed, strict=True):
            first.grad = torch.randn(1_000)
            second.grad = first.grad.to(second.device)
        one.step()
        other.step()
    assert all(torch.equal(first, second.cpu()) for first, second in zip(here, mixed, strict=True))
