"""Updates that begin during backward, on two ranks: the same bits as without them, also with an evaluation before step()."""

from __future__ import annotations

import pytest
import torch

from tests import toy
from tests.pstar.optim.test_speculative import CLIPPING, STEPS, WHOLE, bits, keys_of, scale_of

KINDS = {"group": {}, "chunk": {"communication": "chunk"}, "sharded": {"ownership": "sharded"}}


def case(rank: int, num_ranks: int, keys: dict, clipping: str, num_micros: int, speculates: bool, evaluates: bool):
    """(bits of all losses, norms, parameters and moments; updates begun; undone; groups in the log at evaluations)."""
    keys = keys | {"default_chunk_size": 5_000} | (WHOLE if speculates else {})
    model, optimizer = toy.build(**keys)
    told, early = [], 0
    for number in range(STEPS):
        optimizer.zero_grad()
        for micro in range(num_micros):
            loss = model(*toy.share(number, rank, num_ranks, micro, num_micros))
            model.backward(loss * scale_of(number, clipping))
            told.append(loss.item())
        if evaluates and number in (3, 4):
            early = max(early, len(model._chunks.log)) if speculates else 0
            model.eval()
            with torch.no_grad():
                told.append(model(toy.batch(99)[0]).clone())
            model.train()
        optimizer.step()
        told.append(optimizer.grad_norm)
    speculation = optimizer.speculation
    counts = (speculation.begun, speculation.undone, early) if speculates else ()
    return bits(told, *model.gather_state()), *counts


@pytest.mark.filterwarnings("ignore:.*gradients were not finite")
@pytest.mark.each
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("near", ["min", "40%"])
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("clipping", CLIPPING)
@pytest.mark.parametrize("precision, num_micros", [("fp32", 1), ("bf16", 2), ("fp16", 1)])
def test_two_ranks_give_the_bits_of_two_ranks_without_it(ranks, kind, near, prefetch, clipping, precision, num_micros):
    keys = KINDS[kind] | {"near_budget": near, "prefetch": prefetch} | keys_of(precision, clipping, num_micros)
    expected = ranks(2).run(case, keys, clipping, num_micros, False, False)
    found = ranks(2).run(case, keys, clipping, num_micros, True, False)
    assert [each[0] for each in found] == [each[0] for each in expected]
    assert found[0][1:] == found[1][1:], "both ranks begin and undo the same updates"
    _, begun, undone, _ = found[0]
    assert begun > 0 and (undone > 0) == (clipping != "never")


@pytest.mark.each
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("near", ["min", "40%"])
def test_an_evaluation_before_the_step_sees_the_old_parameters_on_all_ranks(ranks, kind, near):
    """A rank that undid its update while the other did not would gather a mixture."""
    keys = KINDS[kind] | {"near_budget": near, "gradient_clipping": 100.0}
    expected = ranks(2).run(case, keys, "never", 1, False, True)
    found = ranks(2).run(case, keys, "never", 1, True, True)
    assert [each[0] for each in found] == [each[0] for each in expected]
    assert found[0][3] > 0
