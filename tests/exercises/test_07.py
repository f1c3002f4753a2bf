"""Grades exercise 07: next uses, victims and loads of traces, and victims inside the chapter's own engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from unittest import mock

import torch
from torch import nn

from tests.chapters.technique import technique
from tests.exercises.exercise import same

NEVER = float("inf")


def test_next_use(exercise):
    trace = [0, 1, 2, 1, 0]
    expected = {(0, 0): 4, (0, 4): 5, (1, 0): 1, (1, 1): 3, (1, 3): 6, (2, 1): 2, (2, 2): 7, (9, 0): NEVER}
    for (chunk, moment), use in expected.items():
        same(f"trace {trace}: next use of chunk {chunk} after moment {moment}", use,
             exercise.module.next_use(trace, chunk, moment))  # fmt: skip


def farthest(trace, moment, resident):
    """The victim with the farthest next use, found by checking every future moment."""
    left = set(resident)
    for chunk in (trace * 3)[moment + 1 :]:
        if len(left) == 1:
            break
        left.discard(chunk)
    return left.pop()


def loads_in_chunks(victim: Callable) -> int:
    """Chunks loaded in the third step. There are six layers, each a chunk of 4096 bytes, and near has room for four."""
    plan, engine = technique("07_patrickstar", "chunk_plan"), technique("07_patrickstar", "own_engine")
    layers = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6)))
    model = engine.ChunkedModel(layers, chunk_elems=32 * 32, near_bytes=4 * 4096)
    optimizer = engine.ChunkedAdamW(model, [{"params": layers.parameters()}], lr=1e-3)
    with mock.patch.object(plan, "victim", victim):
        for _ in range(3):
            optimizer.zero_grad()
            model.backward(model(torch.ones(1, 32, requires_grad=True)).sum())
            optimizer.step()
    return model.data.moved_bytes["far to near"] // 4096


def test_victim(exercise):
    victim = exercise.module.victim
    same("trace [0, 1, 2, 3], at moment 2, near are 0 and 1: who leaves?", 1, victim([0, 1, 2, 3], 2, [0, 1]))
    same("trace [0, 1, 2, 1], at moment 2, near are 0 and 9, which is not in the trace: who leaves?", 9,
         victim([0, 1, 2, 1], 2, [0, 9]))  # fmt: skip
    draw = random.Random(0)
    for _ in range(200):
        num_chunks = draw.randint(3, 6)
        trace = [*range(num_chunks)]  # each of them at least once
        while len(trace) < 2 * num_chunks:
            trace.append(draw.choice([chunk for chunk in range(num_chunks) if chunk != trace[-1]]))
        moment = draw.randrange(len(trace))
        others = [chunk for chunk in range(num_chunks) if chunk != trace[moment]]
        resident = draw.sample(others, draw.randint(1, len(others)))
        same(f"trace {trace}, at moment {moment}, near are {resident}: who leaves?", farthest(trace, moment, resident),
             victim(list(trace), moment, list(resident)))  # fmt: skip
    # Forward loads all six, because AdamW has changed them. Backward loads two: forward has left the other four near.
    what = "chunks.py with your victim, six layers, near room for four: loads of the third step"
    same(what, 6 + 2, loads_in_chunks(victim))


def test_loads(exercise):
    count = exercise.module.count_loads
    same("loads of a step, trace 0 1 2 3 3 2 1 0, room for 2", 4, count([0, 1, 2, 3, 3, 2, 1, 0], 2))
    for num_chunks in (3, 5, 8):
        there_and_back = [*range(num_chunks), *reversed(range(num_chunks))]
        for room in range(1, num_chunks + 2):
            what = f"loads of a step, {num_chunks} chunks there and back, room for {room}"
            same(what, 2 * max(0, num_chunks - room), count(there_and_back, room))
    # counted by hand; LRU would need 6 and 4 loads
    same("loads of a step, trace 0 1 2 0 1 2, room for 2", 3, count([0, 1, 2, 0, 1, 2], 2))
    same("loads of a step, trace 0 3 2 3 0 2, room for 2", 2, count([0, 3, 2, 3, 0, 2], 2))
