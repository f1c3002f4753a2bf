"""basics/profiling.md: the program profiles both variants, its traces hold the collectives, the snippet's names exist."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from docs.generate.recorded.measured import environment
from gpt2_chinese.model.config import ModelConfig
from gpt2_chinese.model.gpt2 import GPT2LMHeadModel
from tests.docs.pages import LANGUAGES, ROOT
from tests.limits import HANGS_S

VARIANTS, STEPS, RANKS = ("naive", "overlap"), 3, 2
ROWS = ("matrix products", "wait for all-reduce", "the rest")
Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the program prints, and the folder of its traces."""
    folder = tmp_path_factory.mktemp("profiled")
    command = ["bash", str(ROOT / "scripts/torchrun.sh"), "--standalone", "--nproc-per-node", str(RANKS),
               str(ROOT / "docs/programs/profile_ddp.py")]  # fmt: skip
    variables = environment(OMP_NUM_THREADS="1", PYTHON=sys.executable)
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=HANGS_S)
    assert not done.returncode, done.stderr
    return done.stdout, folder / "runs/profile_ddp"


def shares(said: str) -> dict[tuple[str, str], int]:
    """(variant, row) -> per cent, of what the program prints."""
    return {(variant, what.strip()): int(share)
            for variant, what, share in re.findall(r"^(\w+) +(\S.*?) +[\d.]+ ms +(\d+)%$", said, re.MULTILINE)}  # fmt: skip


def problems(events: Events, overlap: bool) -> list[str]:
    """What a trace of STEPS steps lacks, by the order of its events; their durations do not matter."""
    begin = {name: sorted(one["ts"] for one in events if one.get("name") == name and one.get("ph") == "X")
             for name in ("step", "c10d::allreduce_", "gloo:all_reduce", "wait for all-reduce")}  # fmt: skip
    num_tensors = sum(1 for _ in GPT2LMHeadModel(ModelConfig(vocab_size=4096)).parameters())
    found = [f"{len(begin[name])} of {name}" for name, each in
             (("step", 1), ("wait for all-reduce", 1), ("c10d::allreduce_", num_tensors), ("gloo:all_reduce", num_tensors))
             if len(begin[name]) != STEPS * each]  # fmt: skip
    backward = sorted(one["ts"] for one in events if str(one.get("name", "")).startswith("autograd::engine"))
    for first, last in zip(begin["step"], [*begin["step"][1:], float("inf")], strict=True):
        sent = [time for time in begin["c10d::allreduce_"] if first <= time < last]
        computed = [time for time in backward if first <= time < last]
        if not sent or not computed or (min(sent) < max(computed)) != overlap:
            found.append("the first message is on the wrong side of the end of backward")
    return found


def test_both_variants_have_all_rows_and_the_shares_add_up(ran: tuple[str, Path]) -> None:
    found = shares(ran[0])
    assert list(found) == [(variant, row) for variant in VARIANTS for row in ROWS]
    for variant in VARIANTS:
        assert abs(sum(found[variant, row] for row in ROWS) - 100) <= 2, "three rounded shares"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_trace_holds_the_collectives_in_the_order_of_its_variant(ran: tuple[str, Path], variant: str, rank: int) -> None:
    events = json.loads((ran[1] / f"{variant}_rank{rank}.json").read_text())["traceEvents"]
    assert not problems(events, variant == "overlap")
    assert problems(events, variant != "overlap"), "the order tells the variants apart"
    without = [one for one in events if one.get("name") != "gloo:all_reduce"]
    assert problems(without, variant == "overlap") == ["0 of gloo:all_reduce"]


def test_a_missing_row_is_seen(ran: tuple[str, Path]) -> None:
    assert ("naive", "wait for all-reduce") not in shares(ran[0].replace("wait for all-reduce", "wait", 1))


def test_the_snapshot_of_the_page_uses_names_that_torch_has() -> None:
    for language in LANGUAGES:
        page = (ROOT / f"docs/{language}/basics/profiling.md").read_text(encoding="utf-8")
        (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        compile(snippet, "snippet", "exec")
        called = re.findall(r"torch\.cuda\.memory\.(\w+)", snippet)
        assert called == ["_record_memory_history", "_dump_snapshot", "_record_memory_history"]
        assert all(callable(getattr(torch.cuda.memory, name)) for name in called)
        parameters = inspect.signature(torch.cuda.memory._dump_snapshot).parameters
        assert next(iter(parameters)) == "filename" and "max_entries=" in snippet
    assert not hasattr(torch.cuda.memory, "_record_history")
