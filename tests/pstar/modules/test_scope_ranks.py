"""Parameters outside the chunks on several ranks: averaged as those in chunks are, or each rank's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pstar
from tests import toy
from tests.pstar.modules.test_scope import PRECISIONS, Mixture, scoped
from tests.pstar.test_engine_ranks import global_losses

STEPS = 5


class Routed(Mixture):
    """Rank r uses expert r alone: the other's gradient is missing there, and in the last step nobody uses expert 1."""

    rank, step = 0, 0

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.block(self.embed(inputs))
        x = x + self.experts[0 if self.step == STEPS - 1 else self.rank](x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def case(rank: int, num_ranks: int, model_func, keys: dict):
    model, optimizer = toy.build(model_func, near_budget="min", default_chunk_size=11_000, **keys)
    model.module.rank, losses = rank, []
    for step in range(STEPS):
        model.module.step = step
        losses += toy.train(model, optimizer, 1, rank, num_ranks, first=step)
    return global_losses(losses, num_ranks), repr(optimizer.grad_norm), *model.gather_state()


def routed_scoped() -> Routed:
    return Routed(pstar.torch_scope)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model_funcs", [(Mixture, scoped), (Routed, routed_scoped)], ids=["all", "routed"])
def test_averaged_ones_have_the_bits_of_those_in_chunks(ranks, model_funcs, precision):
    """Two ranks: the mean of two numbers has no order. Also where a rank has no gradient for an expert."""
    plain, kept = (ranks(2).run(case, model_func, PRECISIONS[precision]) for model_func in model_funcs)
    for ours, theirs in zip(kept, plain, strict=True):
        assert ours[:2] == theirs[:2]
    for ours, theirs in zip(kept[0][2:], plain[0][2:], strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    if precision != "fp16":    # where the last step is skipped for all
        missed = 1 if model_funcs[0] is Routed else 0
        assert kept[0][3]["step.experts.1.bias"] == kept[0][3]["step.norm.bias"] - missed


def own_experts() -> Mixture:
    return Mixture(lambda: pstar.torch_scope(do_allreduce=False))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_embeddings_computed_far_have_the_bits_of_those_in_chunks(ranks, precision):
    near = ranks(2).run(plain_case, PRECISIONS[precision] | {"use_cpu_embedding": False})
    far = ranks(2).run(plain_case, PRECISIONS[precision] | {"use_cpu_embedding": True})
    for (losses, weights), (far_losses, far_weights) in zip(near, far, strict=True):
        assert losses == far_losses and weights.keys() == far_weights.keys()
        assert all(torch.equal(weights[name], far_weights[name]) for name in weights)


def plain_case(rank: int, num_ranks: int, keys: dict):
    model, optimizer = toy.build(toy.Untied, **keys)
    return toy.train(model, optimizer, STEPS, rank, num_ranks), model.gather_state()[0]


def local_case(rank: int, num_ranks: int, bad_rank: int | None):
    model, optimizer = toy.build(own_experts, near_budget="min", default_chunk_size=11_000)
    norms, skipped = [], []
    for step in range(STEPS):
        loss = model(*toy.share(step, rank, num_ranks))
        model.backward(loss)
        if rank == bad_rank and step == 2:
            model.module.experts[0].bias.grad[0] = float("inf")    # in no other rank's gradients
        optimizer.step()
        norms.append(optimizer.grad_norm)
        skipped.append(optimizer.skipped)
    state = model.gather_state()
    shared: list = [state]
    torch.distributed.broadcast_object_list(shared, 0)
    again, other = toy.build(own_experts, near_budget="50%")
    again.load_state(*shared[0])
    goes_on = [toy.train(each, adam, 2, rank, num_ranks, first=STEPS) for each, adam in ((model, optimizer), (again, other))]
    return norms, skipped, goes_on, state


def plain_local(num_ranks: int) -> tuple[list[float], list[dict]]:
    """(norms, each rank's weights): all ranks played in one process, experts apart, everything else averaged."""
    models, optimizers, norms = [], [], []
    for _ in range(num_ranks):
        torch.manual_seed(0)
        models.append(Mixture())
        optimizers.append(toy.adamw(models[-1].parameters(), lr=toy.LR, weight_decay=toy.WEIGHT_DECAY))
    for step in range(STEPS):
        for rank, model in enumerate(models):
            model.zero_grad()
            model(*toy.share(step, rank, num_ranks)).backward()
        squares = 0.0
        for rows in zip(*(model.named_parameters() for model in models), strict=True):
            params = [param for _, param in rows]
            if "experts" in rows[0][0]:
                squares += sum(float(param.grad.square().sum()) for param in params)
                continue
            mean = sum(param.grad / num_ranks for param in params)
            squares += float(mean.square().sum())
            for param in params:
                param.grad = mean.clone()
        norms.append(squares**0.5)
        for model, adamw in zip(models, optimizers, strict=True):
            for param in model.parameters():
                param.grad *= min(1.0, toy.CLIP / (norms[-1] + 1e-6))
            adamw.step()
    return norms, [dict(model.named_parameters()) for model in models]


def test_each_rank_has_experts_of_its_own_and_saves_them(ranks):
    results = ranks(2).run(local_case, None)
    norms, weights = plain_local(2)
    for got_norms, skipped, goes_on, _ in results:
        assert got_norms == results[0][0] == pytest.approx(norms, rel=1e-4) and not any(skipped)
        assert goes_on[1] == pytest.approx(goes_on[0], rel=1e-6)
    saved = results[0][3][0]
    for name in weights[0]:
        for rank in range(2) if "experts" in name else [0]:
            key = f"{name}@{rank}" if "experts" in name else name
            torch.testing.assert_close(saved[key], weights[rank][name].detach(), rtol=0, atol=1e-4)
    assert not torch.equal(saved["experts.0.weight@0"], saved["experts.0.weight@1"])
    assert results[0][3][1].keys() >= {"step.experts.0.weight@1", "exp_avg.experts.1.bias@0"}


def test_an_infinity_in_one_ranks_own_expert_makes_all_skip(ranks):
    for _, skipped, _, _ in ranks(2).run(local_case, 1):
        assert skipped == [step == 2 for step in range(STEPS)]
