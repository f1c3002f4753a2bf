"""Ranks that would not start alike, or without a process group, are told so; ranks with seeds of their own
start with the same model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pstar
from tests import toy


class Mixed(toy.Toy):
    """Parameters in chunks, with PyTorch, and one of each rank; a random buffer and running statistics."""

    def __init__(self, width: int = 8, frozen: bool = False) -> None:
        super().__init__()
        self.extra = nn.Linear(toy.WIDTH, width)
        self.extra.weight.requires_grad_(not frozen)
        self.register_buffer("noise", torch.randn(toy.WIDTH))
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("count", torch.randint(0, 99, ()), persistent=False)
        self.outside = pstar.exclude(nn.Linear(toy.WIDTH, toy.WIDTH))
        with pstar.torch_scope(do_allreduce=False):
            self.own = nn.Linear(toy.WIDTH, toy.WIDTH)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs) + self.noise
        x = self.own(self.outside(x)).tanh() + x
        logits = self.head(self.norm(self.blocks[0](x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + self.extra(x).square().mean()


def different_case(rank: int, num_ranks: int, what: str) -> str:
    keys = {"near_budget": "min", "profile": f"profile{rank}.json"}
    func = Mixed
    if rank == 1 and what == "shape":
        func = lambda: Mixed(width=9)    # noqa: E731
    if rank == 1 and what == "frozen":
        func = lambda: Mixed(frozen=True)    # noqa: E731
    if rank == 1 and what == "key":
        keys |= {"gradient_clipping": 0.5}
    with pytest.raises(pstar.ConfigError) as caught:
        toy.build(func, **keys)
    return str(caught.value)


@pytest.mark.parametrize("what, line", [
    ("shape", "the ranks do not start alike: parameter extra.weight is (8, 48), float32 on rank 0 and (9, 48), float32 on"),
    ("frozen", "parameter extra.weight is (8, 48), float32 on rank 0 and (8, 48), float32, frozen on rank 1"),
    ("key", "gradient_clipping of the configuration is 1.0 on rank 0 and 0.5 on rank 1")])
def test_a_difference_is_named_on_all_ranks(ranks, what, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert all(line in message for message in ranks(2).run(different_case, what))


def seeds_case(rank: int, num_ranks: int, seeds: list[int]) -> tuple[dict, dict, dict, list[float]]:
    """(weights, buffers, parameters with PyTorch, losses) of this rank after two steps on the same rows."""
    config = toy.config(near_budget="min", default_chunk_size=3_000)
    torch.manual_seed(seeds[rank])
    model, optimizer = pstar.initialize_engine(Mixed, 0, config)
    buffers = {name: buffer.clone() for name, buffer in model.module.named_buffers()}
    outside = {name: param.detach().clone() for name, param in model.module.named_parameters()
               if name.startswith(("outside", "own"))}
    weights = [model.gather_state()[0]]
    dist.broadcast_object_list(weights)
    return weights[0], buffers, outside, toy.train(model, optimizer, 2)


def test_with_a_seed_for_each_rank_all_begin_with_the_values_of_rank_0(ranks):
    (weights, buffers, outside, losses), (_, its_buffers, its_outside, its_losses) = ranks(2).run(seeds_case, [3, 4])
    torch.manual_seed(3)
    plain = Mixed()
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffers[name], buffer) and torch.equal(its_buffers[name], buffer), name
    for name in ("outside.weight", "outside.bias"):
        assert torch.equal(outside[name], plain.get_parameter(name)) and torch.equal(outside[name], its_outside[name])
        assert torch.equal(weights[name], outside[name])
    assert not torch.equal(outside["own.weight"], its_outside["own.weight"]), "of each rank, on purpose"
    assert losses != its_losses


def test_with_one_seed_nothing_changes(ranks):
    """Also the parameters of each rank: then they are equal, and so are the losses of two ranks on the same rows."""
    results = ranks(2).run(seeds_case, [3, 3])
    torch.manual_seed(3)
    plain = Mixed()
    for name, param in plain.named_parameters():
        assert torch.equal(results[0][0][name if not name.startswith("own.") else f"{name}@0"], param), name
    assert results[0][3] == results[1][3]


def test_processes_of_a_launcher_without_a_process_group_do_not_start(monkeypatch):
    """Each would train a model of its own."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = "started 2 processes .WORLD_SIZE., but torch.distributed is not initialized: call .* before initialize_engine"
    with pytest.raises(pstar.ConfigError, match=line):
        toy.build()
    monkeypatch.setenv("WORLD_SIZE", "1")
    toy.train(*toy.build(), 1)


@pytest.mark.parametrize("value", ["", "gpu0", "-1"])
def test_a_local_rank_that_no_launcher_sets_is_refused(monkeypatch, value: str):
    monkeypatch.setenv("LOCAL_RANK", value)
    line = f"^the environment has LOCAL_RANK='{value}', .*: unset it, or give local_rank"
    with pytest.raises(pstar.ConfigError, match=line):
        pstar.initialize_engine(toy.Toy)
    pstar.initialize_engine(toy.Toy, 0)


def initialized_late_case(rank: int, num_ranks: int, meeting: str) -> str:
    dist.barrier()    # no rank leaves the group while another one still connects to it
    dist.destroy_process_group()
    model, _ = toy.build()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks)
    with pytest.raises(pstar.StateError) as caught:
        model(*toy.share(0, rank, num_ranks))
    return str(caught.value)


def test_an_engine_older_than_the_process_group_does_not_train(ranks, tmp_path):
    messages = ranks(2).run(initialized_late_case, (tmp_path / "meeting").as_uri())
    assert all("initialized with 2 processes since the engine started: call init_process_group" in line for line in messages)


def test_an_engine_older_than_a_process_group_of_one_trains(tmp_path):
    model, optimizer = toy.build()
    dist.init_process_group("gloo", init_method=(tmp_path / "meeting").as_uri(), rank=0, world_size=1)
    try:
        toy.train(model, optimizer, 1)
    finally:
        dist.destroy_process_group()
