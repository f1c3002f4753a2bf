"""Grades exercise 02: buckets, and the ring on real processes."""

from __future__ import annotations

import torch
from torch import nn

from tests.exercises.exercise import check, on_ranks, same
from tests.exercises.forbidden import only_point_to_point


def test_buckets(exercise):
    sizes = [3, 1, 1, 2, 6, 1]  # elements; a float has 4 bytes
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    number = {parameter: place for place, parameter in enumerate(parameters)}
    expected = {8: [[5], [4], [3], [2, 1], [0]], 12: [[5], [4], [3, 2], [1], [0]], 0: [[5], [4], [3], [2], [1], [0]],
                400: [[5, 4, 3, 2, 1, 0]]}  # fmt: skip
    for bucket_bytes, numbers in expected.items():
        buckets = exercise.module.cut_into_buckets(parameters, bucket_bytes)
        same(f"parameters 0 to 5 of {sizes} floats, in buckets of at most {bucket_bytes} bytes", numbers,
             [[number[parameter] for parameter in bucket] for bucket in buckets])  # fmt: skip


def values(rank, size):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def reduce(rank, num_ranks, exercise, size):
    flat = values(rank, size)
    with only_point_to_point():
        sent = exercise.module.ring_all_reduce(flat)
    return flat, sent


def test_ring(exercise, ranks):
    for num_ranks in (1, 2, 3, 4):
        for size in (num_ranks, 4 * num_ranks + 1, 1, 100_000):  # 1: some chunks are empty; 100 000: a send blocks
            what = f"ring of {num_ranks} ranks, {size} elements"
            results = on_ranks(ranks, num_ranks, reduce, exercise, size)
            expected = torch.stack([values(rank, size) for rank in range(num_ranks)]).sum(0)
            chunks = [part.nbytes for part in expected.tensor_split(num_ranks)]
            for rank, (flat, sent) in enumerate(results):
                same(f"{what}: the sum on rank {rank}", expected, flat, 1e-6)
                check(torch.equal(flat, results[0][0]), f"{what}: rank {rank} has other bits than rank 0")
                # each round sends all chunks but one: the first skips chunk rank + 1, the second chunk rank + 2
                bytes_sent = 2 * sum(chunks) - chunks[(rank + 1) % num_ranks] - chunks[(rank + 2) % num_ranks]
                same(f"{what}: bytes that rank {rank} says it has sent", bytes_sent, sent)
