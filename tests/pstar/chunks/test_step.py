"""The record of a unit and its legal changes, pins that give themselves back, and the way of one parameter in a step."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from pstar.chunks.unit import LEGAL, Bytes, Grads, Units
from pstar.errors import StateError
from pstar.layout.layout import ModuleSpec, make_layout
from pstar.memory.block_store import BlockStore
from pstar.memory.tier import FAR, NEAR, Ledger, Tier
from pstar.memory.under_way import UnderWay
from pstar.schedule.schedule import Schedule
from tests import toy

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


def units(num_ranks: int = 1, communication: str = "group") -> Units:
    layout = make_layout([ModuleSpec("a", (("a.weight", 30),)), ModuleSpec("b", (("b.weight", 30),))], 32, num_ranks)
    return Units(layout, communication, num_ranks)


# ---- the record of a unit


@pytest.mark.parametrize("kind", [Bytes, Grads])
def test_only_changes_of_the_table_are_made(kind) -> None:
    unit = units().records[-1]
    for before in kind:
        for after in kind:
            setattr(unit, kind.__name__.lower(), before)
            if (before, after) in LEGAL:
                unit.move(after)
                assert getattr(unit, kind.__name__.lower()) is after
                continue
            with pytest.raises(StateError, match=rf"unit {unit.spec.index} of group {unit.spec.group} cannot go from "
                                                 rf"{before.name} \(.*\) to {after.name} \("):
                unit.move(after)
            assert getattr(unit, kind.__name__.lower()) is before, "what is refused changes nothing"


def test_every_state_is_reached_and_left() -> None:
    for kind in (Bytes, Grads):
        assert {before for before, _ in LEGAL if isinstance(before, kind)} == set(kind)
        assert {after for _, after in LEGAL if isinstance(after, kind)} == set(kind)


def test_forgotten_gradients_leave_a_record_as_it_was_made() -> None:
    unit, fresh = units().records[0], units().records[0]
    unit.move(Grads.ARRIVING)
    unit.num_trainable = 1
    for names in (unit.arrived, unit.summed, unit.leaving):
        names.add("a.weight")
    unit.forget_grads()
    unit.forget_grads()
    for name in ("grads", "arrived", "summed", "leaving", "num_trainable"):
        assert getattr(unit, name) == getattr(fresh, name)


def test_a_block_is_used_under_the_keys_that_touch_it() -> None:
    one, two = units(1), units(2)
    assert one.of_block(("param", 1)) == [("adam", 1), ("param", 1)] and one.of_block(("exp_avg", 1)) == [("adam", 1)]
    assert one.of_block(("grad", 1)) == [("adam", 1), ("grad", 1), ("micro_grad", 1)]    # micro-steps are summed in it
    assert two.of_block(("grad", 0)) == [("adam", 0)]
    assert two.of_block(("param", 0)) == [("adam", 0), ("gathered", 0)]
    assert two.of_block(("gathered", 0)) == [("gathered", 0)]


@pytest.mark.parametrize("num_ranks, communication", [(1, "group"), (2, "group"), (2, "chunk"), (3, "chunk")])
def test_modules_use_the_parameters_of_a_blocks_group_by_the_keys_of_its_units(num_ranks: int, communication: str) -> None:
    """With communication "chunk" a group has several units, numbered on over all groups."""
    every = units(num_ranks, communication)
    for group, records in every.of_group.items():
        keys = [unit.key for unit in records]
        for kind in ("param", "grad", "exp_avg"):
            assert every.of_modules((kind, group)) == keys
        for unit in records:
            for kind in ("gathered", "grad_full", "micro_grad"):
                assert every.of_modules((kind, unit.spec.index)) == keys
    assert len(every.records) > len(every.of_group) or communication == "group"


# ---- what is under way


def test_collectives_under_way_are_finished_once_gathers_first() -> None:
    under_way, finished = UnderWay(), []

    class Pending:
        def __init__(self, name: str, among: list, finishes_all: bool = False) -> None:
            self.name, self.among, self.finishes_all = name, among, finishes_all
            among.append(self)

        def finish(self) -> None:
            self.among.remove(self)
            finished.append(self.name)
            if self.finishes_all:    # it needs room itself
                under_way.finish_pending()

    for name, among in (("r1", under_way.reductions), ("g1", under_way.gathers)):
        Pending(name, among, finishes_all=True)
    Pending("r2", under_way.reductions)
    assert under_way.finish_pending() and finished == ["g1", "r1", "r2"]
    assert not under_way.finish_pending()


# ---- pins


def test_pins_are_given_back_at_the_end_of_a_with_also_by_an_error() -> None:
    store = BlockStore(Tier(NEAR, CPU, 100), Tier(FAR, CPU), Ledger(), Schedule("lru"))
    keys = [("param", index) for index in range(2)]
    for key in keys:
        store.create(key, 10, torch.float32, NEAR)
    with pytest.raises(KeyError), store.pinned(keys[0]), store.reading(keys):
        assert [store.blocks[key].pins for key in keys] == [2, 1]
        assert not store._evictable(NEAR)
        raise KeyError
    with pytest.raises(StateError, match="there is no block"):
        store.work("x", [keys[0], ("param", 7)], NEAR, lambda buffers: lambda: None, background=False)
    assert [store.blocks[key].pins for key in keys] == [0, 0]
    assert [block.key for block in store._evictable(NEAR)] == keys
    handle = store.pin(keys[1])
    assert [block.key for block in store._evictable(NEAR)] == keys[:1]
    handle.unpin()
    with pytest.raises(StateError, match="unpinned more often"):
        handle.unpin()


# ---- the way of one parameter, as the pages tell it


def told(language: str) -> list[str]:
    """The functions that the page names, one a line."""
    text = (ROOT / "docs" / language / "engine" / "design.md").read_text(encoding="utf-8")
    section = text.partition("{ #way }")[2].partition("\n## ")[0]
    return re.findall(r"^\d+\. `([\w.]+)`", section, re.MULTILINE)


def test_the_way_of_one_parameter_is_told_in_the_order_of_the_calls() -> None:
    """A traced step with so little room that parameters leave in forward: functions are first called in the page's order."""
    names = told("en")
    assert names == told("zh") and 10 <= len(names) <= 15
    model, optimizer = toy.build(near_memory="1500KiB", near_budget="min", default_chunk_size=5_000)
    toy.train(model, optimizer, 2)
    first: dict[str, int] = {}

    def watch(frame, event: str, _: object) -> None:
        if event == "call" and "/pstar/" in frame.f_code.co_filename:
            first.setdefault(frame.f_code.co_qualname, len(first))

    sys.setprofile(watch)
    try:
        toy.train(model, optimizer, 1, first=2)
    finally:
        sys.setprofile(None)
    seen = [first.get(name) for name in names]
    assert None not in seen and seen == sorted(seen), list(zip(names, seen, strict=True))
