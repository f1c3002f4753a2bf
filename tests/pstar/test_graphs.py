"""Random modules that own, borrow, reuse, skip and nest: four steps of each are plain PyTorch's, at any budget."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from pstar.numerics.grad_norm import clip_grad_norm_
from tests import toy
from tests.borrowers import WIDTH, rows

STEPS = 4

# What a node does with h: a number says which of all modules, or parameters, it does it with.
ACTIONS = st.one_of(
    st.tuples(st.just("call"), st.integers(0, 9)),           # a module, perhaps one that others call too
    st.tuples(st.just("weight"), st.integers(0, 9)),         # the weight of whatever module
    st.tuples(st.just("bias"), st.integers(0, 9)),
    st.tuples(st.just("slice"), st.integers(0, 9)),          # a view that later nodes add
    st.tuples(st.just("own"), st.just(0)),                   # its own scale
    st.tuples(st.just("norm"), st.integers(0, 9)),           # a number that is logged, no gradient
    st.tuples(st.just("child"), st.integers(0, 9)),          # a node inside it
    st.tuples(st.just("checkpoint"), st.integers(0, 9)),     # the same, computed again in backward
    st.tuples(st.just("now and then"), st.integers(0, 9)),   # a module that every second step leaves out
    st.tuples(st.just("penalty"), st.just(0)),               # over all of its parameters
)
NODES = st.lists(st.lists(ACTIONS, min_size=1, max_size=5), min_size=1, max_size=5)


class Node(nn.Module):
    """Does its actions one after the other. `all_layers` belong to the root, and are no children of this node."""

    def __init__(self, actions: list[tuple[str, int]], all_layers: list[nn.Linear], inner: list[Node]) -> None:
        super().__init__()
        self.actions, self.borrowed = actions, [all_layers]
        self.inner = nn.ModuleList(inner)
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        layers, kept = self.borrowed[0], None
        for what, number in self.actions:
            layer = layers[number % len(layers)]
            child = self.inner[number % len(self.inner)] if self.inner else None
            if what == "call":
                h = layer(h)
            elif what == "weight":
                h = F.linear(h, layer.weight)
            elif what == "bias":
                h = h + layer.bias
            elif what == "slice":
                kept = layer.weight[number % 8]
            elif what == "own":
                h = h * self.scale
            elif what == "norm":
                h = h / (1 + float(layer.weight.detach().norm()))
            elif what == "child" and child is not None:
                h = child(h)
            elif what == "checkpoint" and child is not None:
                h = torch.utils.checkpoint.checkpoint(child, h, use_reentrant=False)
            elif what == "now and then" and rows_of_step(self) % 2:
                h = layer(h)
            elif what == "penalty":
                h = h + 0.01 * sum(param.square().sum() for param in self.parameters())
            h = torch.tanh(h if kept is None else h + kept)
        return h


def rows_of_step(node: Node) -> int:
    """The number of the step, which the loop sets."""
    return int(node.steps)


class Graph(nn.Module):
    def __init__(self, nodes: list[list[tuple[str, int]]], num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        made: list[Node] = []
        for actions in nodes:    # every second node nests the one before it
            inner = [made.pop()] if made and len(actions) % 2 else []
            made.append(Node(actions, list(self.layers), inner))
        self.nodes = nn.ModuleList(made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for node in self.nodes:
            x = node(x) + x
        return (x @ self.layers[0].weight.T).square().mean()


def train(graph: nn.Module, call, backward, optimizer) -> list[float]:
    losses = []
    for step in range(STEPS):
        for child in graph.modules():
            if isinstance(child, Node):
                child.steps.fill_(step)
        optimizer.zero_grad()
        loss = call(rows(step))
        backward(loss)
        if isinstance(optimizer, type(toy.adamw([torch.zeros(1)]))):
            clip_grad_norm_([param for param in graph.parameters() if param.grad is not None], toy.CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


def check(nodes: list, num_layers: int, near: str, chunk: int, prefetch: int) -> None:
    def model_func() -> Graph:
        return Graph(nodes, num_layers)

    torch.manual_seed(0)
    plain = model_func()
    expected = train(plain, plain, torch.Tensor.backward,
                     toy.adamw(plain.parameters(), lr=toy.LR, weight_decay=toy.WEIGHT_DECAY))
    model, optimizer = toy.build(model_func, near_budget=near, default_chunk_size=chunk, prefetch=prefetch)
    assert train(model.module, model, model.backward, optimizer) == expected
    state, _ = model.gather_state()
    for name, value in plain.named_parameters():
        assert torch.equal(state[name], value), name
    assert not any(model._chunks.parameters.uses.values())


arguments = given(nodes=NODES, num_layers=st.integers(1, 5), near=st.sampled_from(["min", "60%", "80%", "auto"]),
                  chunk=st.sampled_from([100, 300, 600]), prefetch=st.sampled_from([0, 2]))
calm = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


# A layer of the root is called from inside two nodes: more is in use at once than the names of modules tell.
NESTED = [[("norm", 6), ("now and then", 7), ("checkpoint", 6), ("now and then", 0)], [("checkpoint", 5)],
          [("weight", 0), ("norm", 1)], [("checkpoint", 1), ("slice", 2)]]


@settings(max_examples=25, **calm)
@example(nodes=NESTED, num_layers=4, near="min", chunk=100, prefetch=2)
@arguments
def test_random_graphs_train_as_in_plain_pytorch(nodes, num_layers, near, chunk, prefetch):
    check(nodes, num_layers, near, chunk, prefetch)


@pytest.mark.deep
@settings(max_examples=300, **calm)
@arguments
def test_three_hundred_random_graphs(nodes, num_layers, near, chunk, prefetch):
    check(nodes, num_layers, near, chunk, prefetch)
