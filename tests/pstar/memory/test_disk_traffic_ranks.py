"""What each of two ranks reads from disk and writes to it, against the fewest bytes that must move."""

import pytest
import torch

from pstar.memory.tier import DISK
from pstar.planner.disk_traffic import disk_traffic
from pstar.schedule.least import Use, least_read_bytes, least_written_bytes
from tests.cover import quick_only
from tests.pstar.memory.test_disk_traffic import PARAM, PLAN_ERROR, STEPS, WIDTH, Layers

STATES = ("exp_avg", "exp_avg_sq")


def case(rank: int, num_ranks: int, folder: str, keys: dict) -> tuple[list[float], dict[str, int], float, int, dict]:
    """(losses, bytes moved in the last step, least bytes read, least bytes written, what the plan says)."""
    import pstar

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = {"default_chunk_size": WIDTH**2, "near_budget": 20 * PARAM} | keys
    if "far_budget" in keys:
        config["disk_path"] = folder
    model, optimizer = pstar.initialize_engine(lambda: Layers(52, False), 0, config, device="cpu")
    losses = []
    for step in range(STEPS):
        loss = model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)))
        model.backward(loss)
        losses.append(float(loss.detach()))
        optimizer.step()
    if model.disk is None:
        return losses, {}, 0.0, 0, {}
    uses, group_of = [], {unit.spec.index: unit.spec.group for unit in model._chunks.units.records}
    for kind, index in model.schedule.trace.accesses:
        if kind in ("gathered", "grad_full"):    # near holds whole groups, far this rank's pieces
            uses.append(Use(frozenset({({"gathered": "param", "grad_full": "grad"}[kind], group_of[index])})))
        elif kind == "adam":
            uses.append(Use(frozenset((each, index) for each in ("param", "grad", *STATES)), frozenset({("grad", index)})))
    sizes = dict.fromkeys(frozenset().union(*(use.needs for use in uses)), PARAM)
    room = model.far.budget_bytes - (len(STATES) * PARAM if model.config.prefetch else 0)    # read ahead
    assert any(list(block.copies) == [DISK] for block in model._store.blocks.values())
    planned = disk_traffic(model.layout, [], model.costs, model.near.budget_bytes, model.far.budget_bytes,
                           prefetch=model.config.prefetch)
    least = least_read_bytes(uses, sizes, room), least_written_bytes(uses, sizes, room)
    return losses, dict(model.ledger.step_bytes), *least, planned


KEYS = [{"far_budget": 39 * PARAM}, {"far_budget": 52 * PARAM, "ownership": "sharded"},
        {"far_budget": 39 * PARAM, "prefetch": 0}]


@pytest.mark.parametrize("keys", quick_only(KEYS, *KEYS[:2]), ids=str)
def test_each_rank_moves_little_more_than_the_bytes_that_must_move(ranks, tmp_path, keys):
    """At most 1.05 of them; and the losses are the same, bit for bit, as without a disk."""
    plain = ranks(2).run(case, str(tmp_path), {name: value for name, value in keys.items() if name != "far_budget"})
    found = ranks(2).run(case, str(tmp_path), keys)
    for (losses, moved, least_read, least_written, planned), (expected, *_) in zip(found, plain, strict=True):
        assert losses == expected
        assert least_read and moved["disk to far"] <= 1.05 * least_read, (moved, least_read)
        assert moved["far to disk"] <= 1.05 * least_written, (moved, least_written)
        assert {way: moved[way] for way in planned} == pytest.approx(planned, rel=PLAN_ERROR)
