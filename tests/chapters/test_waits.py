"""How often a chapter waits for its device, counted on a made-up one: each wait would empty a GPU's queue of kernels.

The bits of the results are held by the chapters' own tests.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.chapters.technique import technique
from tests.elsewhere import Elsewhere, elsewhere


@pytest.fixture
def waits():
    """A function: the transfers that the host has waited for since the test began, (to the host, from the host)."""
    before = Elsewhere.to_host, Elsewhere.from_host
    return lambda: (Elsewhere.to_host - before[0], Elsewhere.from_host - before[1])


def with_gradients(*sizes: int | None) -> list[Any]:
    """Parameters of 4 elements on the made-up device; None: without a gradient."""
    made = []
    for size in sizes:
        parameter = elsewhere(torch.zeros(4))
        made.append(parameter)
        parameter.grad = None if size is None else elsewhere(torch.full((4,), float(size)))
    return made


def test_chapter_02_fills_a_bucket_without_a_transfer(waits) -> None:
    bucket = technique("02_ddp", "ddp").Bucket(0, with_gradients(2, None, 6))
    flat = bucket.fill(2)
    assert waits() == (0, 0)
    assert flat.tolist() == [1.0] * 4 + [0.0] * 4 + [3.0] * 4 + [0.5, 0.0, 0.5]


def test_chapter_05_draws_a_seed_without_asking_the_device(waits) -> None:
    """The layer's activations are on the device; the seed comes from the host's state, and that state comes back."""
    first, last = torch.nn.Identity(), torch.nn.Identity()
    technique("05_model_parallel", "tensor_dropout").different_dropout(first, last, 0.1, SimpleNamespace(rank=1))
    torch.manual_seed(3)
    drawn = []
    for _ in range(2):
        activations = first(elsewhere(torch.zeros(2)))
        drawn.append(torch.rand(1).item())
        last(activations)
        torch.manual_seed(3)
    assert drawn[0] == drawn[1] and waits() == (0, 0)
    seed = int(torch.randint(2**62, ()))
    after = torch.rand(1).item()
    torch.manual_seed(3)
    last(first(elsewhere(torch.zeros(2))))
    assert torch.rand(1).item() == after, "after the layer the state is the common one"
    torch.manual_seed(seed + 2)
    assert torch.rand(1).item() == drawn[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chapter_06_copies_to_and_from_the_host_without_waiting_for_each(waits, dtype: torch.dtype) -> None:
    host = technique("06_zero", "zero.offload").Host(torch.device("xpu", 0))
    tensors = [elsewhere(torch.full((8,), float(number)).to(dtype)) for number in range(5)]
    out = [host.out(tensor) for tensor in tensors]
    assert waits() == (0, 0) and not any(isinstance(copy, Elsewhere) for copy in out)
    host.arrive()
    for copy, tensor in zip(out, tensors, strict=True):
        host.back(copy.float() + 1, tensor)
    assert waits() == (0, 0)
    assert [tensor.tolist()[0] for tensor in tensors] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert host.end_step() == {"to_host_bytes": 40 * dtype.itemsize, "to_device_bytes": 40 * dtype.itemsize}


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_chapter_06_looks_for_overflows_once_a_step(waits, bad: float | None) -> None:
    reported = []
    module = technique("06_zero", "zero.loss_scaler")
    scaler = module.LossScaler("8", lambda value: reported.append(value) or value, lambda: None)
    parameters = with_gradients(8, 16, None, 24)
    if bad is not None:
        parameters[1].grad[2] = bad
    scaler.unscale_(SimpleNamespace(param_groups=[{"params": parameters[:2]}, {"params": parameters[2:]}]))
    assert waits() == (1, 0) and reported == [float(bad is not None)]
    assert parameters[0].grad.tolist() == [1.0] * 4
    scaler.unscale_(SimpleNamespace(param_groups=[{"params": []}]))
    assert reported[1:] == [0.0], "a rank may have no gradient"
