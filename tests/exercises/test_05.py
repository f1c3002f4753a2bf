"""Grades exercise 05: orders by a simulation of all ranks, and split layers on real processes against whole ones."""

from __future__ import annotations

import torch
from torch import nn

from tests.chapters.technique import technique
from tests.exercises.exercise import Wrong, check, on_ranks, same

schedules = technique("05_model_parallel", "schedules")


def text(order):
    return " ".join(f"{kind}{micro}" for kind, micro in order)


def test_pipeline(exercise):
    one_f_one_b = exercise.module.one_f_one_b
    by_hand = {(0, 2, 3): "F0 F1 B0 F2 B1 B2", (1, 2, 3): "F0 B0 F1 B1 F2 B2", (0, 1, 2): "F0 B0 F1 B1",
               (0, 4, 2): "F0 F1 B0 B1", (1, 3, 4): "F0 F1 B0 F2 B1 F3 B2 B3"}  # fmt: skip
    for (rank, p, m), expected in by_hand.items():
        same(f"order of rank {rank} of {p}, {m} micro-batches", expected, text(one_f_one_b(rank, p, m)))
    for p, m in ((2, 2), (3, 7), (4, 4), (4, 9)):
        found = [[schedules.Work(kind, rank, micro) for kind, micro in one_f_one_b(rank, p, m)] for rank in range(p)]
        what = f"{p} ranks, {m} micro-batches"
        for rank, works in enumerate(found):
            each = [(kind, micro) for micro in range(m) for kind in "FB"]
            same(f"{what}: what rank {rank} computes, sorted", sorted(each), sorted((w.kind, w.micro) for w in works))
            same(f"{what}: most micro-batches alive on rank {rank}", min(p - rank, m), schedules.peak_live(works))
        try:
            events = schedules.simulate(found)
        except ValueError as error:
            raise Wrong(f"{what}: {error}") from None
        same(f"{what}: the bubble", (p - 1) / (m + p - 1), schedules.bubble(events, p), 1e-9)


class Whole(nn.Module):
    """x W + b with the weight (in, out), as in GPT-2's layers."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(num_in, num_out)), nn.Parameter(torch.randn(num_out))

    def forward(self, x):
        return x @ self.weight + self.bias


def functions(rank, num_ranks, exercise):
    x = torch.full((1, 2, 3), float(rank + 1), requires_grad=True)
    copied = exercise.module.CopyToAll.apply(x)
    (copied_grad,) = torch.autograd.grad(copied, x, torch.full_like(copied, rank + 1.0))
    total = exercise.module.SumOfAll.apply(x)
    (total_grad,) = torch.autograd.grad(total, x, torch.full_like(total, 5.0))
    return copied.detach(), copied_grad, total.detach(), total_grad, x.detach()


def test_tensor_functions(exercise, ranks):
    for rank, actual in enumerate(on_ranks(ranks, 2, functions, exercise)):
        where = f"2 ranks that hold 1 and 2; on rank {rank}"
        names = {"CopyToAll(x)": rank + 1.0, "CopyToAll's gradient of x, where the ranks' gradients are 1 and 2": 3.0,
                 "SumOfAll(x)": 3.0, "SumOfAll's gradient of x, where that of the sum is 5": 5.0,
                 "x itself, after both": rank + 1.0}  # fmt: skip
        for (what, expected), tensor in zip(names.items(), actual, strict=True):
            same(f"{where}: {what}", torch.full((1, 2, 3), expected), tensor)


def whole_layers():
    torch.manual_seed(0)
    return Whole(6, 8), Whole(8, 6), torch.randn(2, 3, 6, requires_grad=True)


def layers(rank, num_ranks, exercise):
    first, second, x = whole_layers()
    column = exercise.module.ColumnParallelLinear(first, rank, num_ranks)
    row = exercise.module.RowParallelLinear(second, rank, num_ranks)
    y = row(torch.tanh(column(x)))
    y.square().sum().backward()
    found = {"the output": y, "the gradient of the input": x.grad}
    for name, layer in (("column", column), ("row", row)):
        for kind in ("weight", "bias"):
            parameter = getattr(layer, kind)
            check(isinstance(parameter, nn.Parameter), f"{name}.{kind}", "an nn.Parameter", type(parameter))
            check(parameter.grad is not None, f"{name}.{kind}.grad: backward does not reach it", "a tensor", None)
            found |= {f"{name}.{kind}": parameter, f"the gradient of {name}.{kind}": parameter.grad}
    return {what: tensor.detach() for what, tensor in found.items()}


def test_tensor_layers(exercise, ranks):
    first, second, x = whole_layers()
    y = second(torch.tanh(first(x)))
    y.square().sum().backward()
    for num_ranks in (2, 4):
        for rank, actual in enumerate(on_ranks(ranks, num_ranks, layers, exercise)):
            expected = {"the output": y, "the gradient of the input": x.grad}
            cuts = {"column.weight": (first.weight, 1), "column.bias": (first.bias, 0), "row.weight": (second.weight, 0)}
            for name, (whole, dim) in cuts.items():
                expected[name] = whole.detach().chunk(num_ranks, dim)[rank]
                expected[f"the gradient of {name}"] = whole.grad.chunk(num_ranks, dim)[rank]
            expected |= {"row.bias": second.bias, "the gradient of row.bias": second.bias.grad}
            for what, tensor in expected.items():
                same(f"{num_ranks} ranks: {what}, on rank {rank}, against the whole layers", tensor, actual[what], 1e-5)
