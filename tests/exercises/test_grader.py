"""The graders reject typical wrong answers of students with the right message. Also tests the rules of selection."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.exercises.conftest import grading, in_time
from tests.exercises.exercise import ROOT, Exercise, holes, load, path_of
from tests.exercises.say import short
from tests.exercises.solutions import SOLUTIONS

NUMBERS = sorted(SOLUTIONS)

# The right part that two wrong answers of chapter 03 share.
MICRO = """
def micro(model, batch, num):
    loss = model(*batch) / num
    loss.backward()
    return loss.detach()
"""

# (chapter, test, the mistake, the answer, words in the student's report)
WRONG = [
    ("00", "test_loss", "in 16 bit", """
def next_token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
""", ("type of the loss of float16 logits", "expected   torch.float32", "actual     torch.float16")),
    ("00", "test_learning_rate", "starts at 0", """
def learning_rate(step, settings):
    return settings.lr * (step - 1) / settings.warmup_steps
""", ("learning rate of step 1", "expected   0.5")),
    ("00", "test_accumulate", "sum for mean", """
def accumulate(model, micro_batches):
    total = 0.0
    for inputs, targets in micro_batches:
        loss = model(inputs, targets)
        loss.backward()
        total += loss.detach()
    return total / len(micro_batches)
""", ("3 micro-batches against the whole batch", "elements differ, the first at")),
    ("01", "test_mean", "overflows", """
def mean_of(vectors):
    return sum(vectors) / len(vectors)
""", ("whose sum overflows", "actual     [inf]")),
    ("01", "test_wait", "one too stale", """
def must_wait(step, works_on, bound):
    return bound is None or step - 1 - works_on > bound
""", ("bound 0: must it wait?", "expected   True", "actual     False")),
    ("01", "test_step", "weights do not come down", """
def synchronous_step(model, optimizer, rank, num_ranks):
    for parameter in model.parameters():
        if rank:
            dist.send(parameter.grad, 0)
        else:
            for worker in range(1, num_ranks):
                other = torch.empty_like(parameter)
                dist.recv(other, worker)
                parameter.grad += other
            parameter.grad /= num_ranks
    if rank == 0:
        optimizer.step()
""", ("2 ranks: embed.weight on rank 1 after step 1, against one process",)),
    ("02", "test_buckets", "in the order of forward", """
def cut_into_buckets(parameters, bucket_bytes):
    return [[parameter] for parameter in parameters]
""", ("in buckets of at most 8 bytes", "expected   [[5], [4], [3], [2, 1], [0]]")),
    ("02", "test_ring", "a collective", """
def ring_all_reduce(flat, group=None):
    dist.all_reduce(flat)
    return 0
""", ("rank 0: Wrong: dist.all_reduce is what this exercise is about", "line 10, in ring_all_reduce")),
    ("02", "test_ring", "all receive first", """
def ring_all_reduce(flat, group=None):
    rank, p = dist.get_rank(), dist.get_world_size()
    if p > 1:
        dist.recv(torch.empty_like(flat), (rank - 1) % p)
        dist.send(flat, (rank + 1) % p)
    return 0
""", ("waits for a message that does not come: who sends it", "line 12, in ring_all_reduce:   dist.recv(")),
    ("03", "test_broadcast", "state of a fresh one", """
def broadcast(hvd, model, optimizer):
    hvd.broadcast_parameters(dict(model.named_parameters()), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
""", ("a fresh optimizer: weight 0 on rank 0",)),
    ("03", "test_step", "clips too early", """
def train_step(model, optimizer, micro_batches, max_norm):
    optimizer.zero_grad()
    loss = sum(micro(model, each, len(micro_batches)) for each in micro_batches)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return loss, norm

""" + MICRO, ("step 1, rank 0: norm before clipping, against one process",)),
    ("03", "test_step", "averages twice", """
def train_step(model, optimizer, micro_batches, max_norm):
    optimizer.zero_grad()
    loss = sum(micro(model, each, len(micro_batches)) for each in micro_batches)
    optimizer.synchronize()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return loss, norm

""" + MICRO, ("averages over the ranks in 6 steps", "expected   6", "actual     12")),
    ("04", "test_overflow_on_one_rank", "asks nobody", """
class LossScaler:
    def __init__(self, window, largest_of_all):
        self.value = 2.0**16

    def unscale_(self, optimizer):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.overflow = not all(gradient.div_(self.value).isfinite().all() for gradient in gradients)

    def step(self, optimizer):
        if not self.overflow:
            optimizer.step()

    def update(self):
        self.value *= 0.5 if self.overflow else 1.0
""", ("did rank 0 step?", "expected   [False, True]", "actual     [True, True]")),
    ("04", "test_order", "clips scaled gradients", """
def finish_step(scaler, optimizer, model, max_norm):
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return norm
""", ("true gradients [3, 4]: the norm before clipping", "expected   5", "actual     327680")),
    ("05", "test_pipeline", "gpipe", """
def one_f_one_b(rank, num_ranks, num_micros):
    return [(kind, micro) for kind in "FB" for micro in range(num_micros)]
""", ("order of rank 0 of 2, 3 micro-batches", "expected   F0 F1 B0 F2 B1 B2", "actual     F0 F1 F2 B0 B1 B2")),
    ("05", "test_tensor_functions", "sums both ways", """
class CopyToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class SumOfAll(CopyToAll):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x
""", ("SumOfAll's gradient of x, where that of the sum is 5", "expected   [5.0,", "actual     [10.0,")),
    ("06", "test_pieces", "whole parameters", """
def pieces_of(sizes, rank, num_ranks):
    return [(name, 0, size) for n, (name, size) in enumerate(sizes.items()) if n % num_ranks == rank]
""", ("pieces of rank 0 of 3",)),
    ("06", "test_step", "nothing is sharded", """
class ShardedOptimizer:
    def __init__(self, model, make_optimizer):
        self.model, self.optimizer = model, make_optimizer(list(model.parameters()))

    def step(self):
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad.div_(dist.get_world_size()))
        self.optimizer.step()
        self.optimizer.zero_grad()
""", ("elements of optimizer state on rank 0",)),
    ("07", "test_next_use", "not a cycle", """
def next_use(accesses, chunk, moment):
    return next((m for m in range(moment + 1, len(accesses)) if accesses[m] == chunk), float("inf"))
""", ("next use of chunk 0 after moment 4", "expected   5", "actual     inf")),
    ("07", "test_victim", "the least recently used", """
def victim(accesses, moment, resident):
    past = (list(accesses) * 2)[moment::-1]
    return max(resident, key=lambda chunk: past.index(chunk) if chunk in past else len(past))
""", ("who leaves?",)),
    ("08", "test_lora", "both begin as zeros", """
class LoraLinear(nn.Module):
    def __init__(self, weight, bias, rank, alpha):
        super().__init__()
        self.weight, self.bias, self.scale = weight, bias, alpha / rank
        self.a, self.b = (nn.Parameter(torch.zeros(*s)) for s in ((rank, len(weight)), (len(bias), rank)))

    def forward(self, x):
        return x @ self.weight + self.bias + x @ self.a.T @ self.b.T * self.scale
""", ("the first gradient of A and B", "actual     all 0")),
    ("08", "test_lora", "alpha is not divided by the rank", """
class LoraLinear(nn.Module):
    def __init__(self, weight, bias, rank, alpha):
        super().__init__()
        self.weight, self.bias, self.scale = weight, bias, alpha
        self.a, self.b = nn.Parameter(torch.randn(rank, len(weight))), nn.Parameter(torch.zeros(len(bias), rank))

    def forward(self, x):
        return x @ self.weight + self.bias + x @ self.a.T @ self.b.T * self.scale
""", ("output with A and B by hand, rank 2, alpha 3",)),
    ("08", "test_blocks", "one scale for all", """
def quantize(values, book, block):
    scale = values.abs().max()
    codes = ((values / scale)[:, None] - book).abs().argmin(-1).to(torch.uint8)
    return codes, scale.expand(-(-len(values) // block))
""", ("largest magnitudes of", "expected   [2.0, 0.03]", "actual     [2.0, 2.0]")),
]  # fmt: skip

HEAD = """import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


"""


@pytest.mark.parametrize("number, test, why, text, said", WRONG, ids=[f"{row[0]} {row[1][5:]} {row[2]}" for row in WRONG])
def test_a_wrong_answer_is_found_and_named(number, test, why, text, said, ranks, tmp_path):
    file = tmp_path / "exercise.py"
    file.write_text(HEAD + text.strip() + "\n")
    judge = getattr(importlib.import_module(f"tests.exercises.test_{number}"), test)
    wanted = {"ranks": ranks} if "ranks" in judge.__code__.co_varnames[: judge.__code__.co_argcount] else {}
    waits = "receive first" in why
    with pytest.raises(Exception) as caught:  # noqa: B017  (any exception: the report must explain it)
        judge(Exercise(number, str(file), 4.0 if waits else 60.0), **wanted)
    read = short(caught.value, file)
    for words in said:
        assert words in read
    assert len(read.splitlines()) <= 6, read


def test_a_slip_is_named_with_its_line(tmp_path):
    file = tmp_path / "exercise.py"
    file.write_text(HEAD + "def next_use(accesses, chunk, moment):\n    return accesses.find(chunk)\n")
    with pytest.raises(AttributeError) as caught:
        Exercise("07", str(file)).module.next_use([1], 1, 0)
    assert short(caught.value, file).splitlines()[1].endswith("line 10, in next_use:   return accesses.find(chunk)")
    file = tmp_path / "broken.py"
    file.write_text("def next_use(:\n")
    with pytest.raises(SyntaxError) as caught:
        load("07", str(file))
    assert short(caught.value, file) == "broken.py, line 1: invalid syntax"


# ---- every exercise is complete


@pytest.mark.parametrize("number", NUMBERS)
def test_every_hole_has_a_solution_and_every_exercise_its_words(number):
    path = path_of(number)
    assert holes(path) <= set(vars(load(number, "solved"))), "a hole that the chapter's own code does not fill"
    command = f"bash {path.parent.relative_to(ROOT)}/exercise.sh"
    text, readme = path.read_text(encoding="utf-8"), (path.parent / "README.md").read_text(encoding="utf-8")
    assert command in text and "When you have tried: " in text and command in readme
    assert f"tests/exercises/test_{number}.py " in path.with_name("exercise.sh").read_text()


def test_every_chapter_has_an_exercise():
    assert [path_of(f"{n:02}").parent.name[:2] for n in range(9)] == NUMBERS


# ---- which tests run


@pytest.mark.parametrize("arguments, judged", [
    ("tests/exercises", True),
    ("tests/exercises/", True),
    ("tests/exercises/test_02.py", True),
    ("tests/exercises/test_02.py::test_ring", True),
    ("tests/pstar tests/exercises", True),
    ("tests", False),
    ("tests/pstar", False),
    ("tests/exercises/test_grader.py", False),
])  # fmt: skip
def test_a_students_files_are_judged_where_the_folder_is_named(arguments, judged):
    config = SimpleNamespace(args=arguments.split(), invocation_params=SimpleNamespace(dir=ROOT), getoption=lambda *_: False)
    assert grading(config) is judged
    config.getoption = lambda *_: True  # --solved
    assert grading(config) is False


def test_a_loop_without_end_is_ended_and_named(tmp_path):
    file = tmp_path / "exercise.py"
    file.write_text("def next_token_loss():\n    while True:\n        pass\n")
    with pytest.raises(TimeoutError) as caught, in_time(0.2):
        load("00", str(file)).next_token_loss()
    said = short(caught.value, file)
    assert said.startswith("TimeoutError: no answer in 0.2 s: it hangs\n") and "exercise.py, line " in said


def test_a_number_names_one_chapter():
    """-k matches parts of file, function and parameter names, so no function may have a number in its name."""
    files = sorted(Path(__file__).parent.glob("test_[0-9]*.py"))
    assert [path.name for path in files] == [f"test_{number}.py" for number in NUMBERS]
    for path in files:
        tests = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        assert not [name for name in tests if name.startswith("test_") and any(c.isdigit() for c in name)]


def test_a_student_reads_a_few_lines():
    if written := set(vars(load("07", "solved"))) - holes(path_of("07")):
        pytest.skip(f"not as shipped: {', '.join(sorted(written))} is written")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-m", "pytest", str(Path("tests", "exercises")), "-k", "07"], cwd=ROOT, env=env,
                         capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 1 and "3 failed" in run.stdout and "passed" not in run.stdout
    assert "victim is yours to write: the farthest next use leaves" in run.stdout and "Traceback" not in run.stdout
    assert len(run.stdout.splitlines()) < 40
