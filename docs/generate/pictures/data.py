"""Data for the pictures, computed by the repository's code so that no picture goes stale: buckets, schedules, evictions."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

from docs.generate.recorded.measured import REPO


@cache
def tiny() -> Any:
    from gpt2_chinese.model.config import PRESETS
    from gpt2_chinese.vocabulary.profiles import vocabulary_size

    return replace(PRESETS["tiny"], vocab_size=vocabulary_size(REPO / "cache/vocab.txt"))


@cache
def model() -> Any:
    from gpt2_chinese.model.gpt2 import GPT2LMHeadModel

    return GPT2LMHeadModel(tiny())


@cache
def buckets() -> list[list[int]]:
    """Numels in each bucket of chapter 02 at its default size, from the chapter's function."""
    folder = REPO / "chapters/02_ddp"
    text = (folder / "ddp.py").read_text(encoding="utf-8")
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    source = next(ast.get_source_segment(text, node) for node in functions if node.name == "cut_into_buckets")
    names: dict[str, Any] = {}
    exec(compile(f"from __future__ import annotations\n{source}", "ddp.py", "exec"), names)
    settings = (folder / "ddp_settings.py").read_text(encoding="utf-8")
    mib = float(re.search(r"bucket_mb: float = flag\(([\d.]+)", settings).group(1))
    buckets = names["cut_into_buckets"](list(model().parameters()), int(mib * 2**20))
    return [[parameter.numel() for parameter in bucket] for bucket in buckets]


@cache
def schedules() -> ModuleType:
    spec = importlib.util.spec_from_file_location("schedules_of_05", REPO / "chapters/05_model_parallel/schedules.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def chapter_module(chapter: str, name: str) -> ModuleType:
    """A module of a chapter's folder, which is first in the path only while it is imported."""
    folder = str(REPO / "chapters" / chapter)
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


@cache
def trained_by_lora() -> int:
    """Parameters that chapter 08 trains in tiny with its default flags."""
    spec = chapter_module("08_param_efficient", "methods.spec").MethodSpec()
    return chapter_module("08_param_efficient", "methods.counts").trained_row(tiny(), spec).count


@cache
def groups() -> int:
    """Number of chunk groups that the engine plans for tiny on two ranks."""
    from pstar import plan_engine

    return len(plan_engine(model, {"near_budget": "25%"}, 2).layout.groups)


def slots_of(order: Sequence[int], room: int) -> tuple[list[list[int | None]], set[int]]:
    """The chunk in each slot at each moment of a repeating step, and the moments at which a chunk is loaded."""
    from pstar.schedule.schedule import Trace

    trace, slots = Trace(order), [None] * room
    for _ in range(3):  # the first rounds fill the slots; then the pattern repeats
        history, loads = [], set()
        for moment, chunk in enumerate(order):
            if chunk not in slots:
                free = slots.index(None) if None in slots else max(
                    range(room), key=lambda slot: trace.next_use(slots[slot], moment))  # noqa: B023  # fmt: skip
                slots[free] = chunk
                loads.add(moment)
            history.append(list(slots))
    return history, loads
