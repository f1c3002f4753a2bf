"""The page "Which technique?": its calculator answers as `pstar plan --layouts` does, in a real browser."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from pstar.planner.gpt_shape import MODELS, GptShape
from pstar.planner.gpus import GIB, GPUS, cluster_of
from pstar.planner.layout_memory import LayoutJob
from pstar.planner.layouts import PARTS, TECHNIQUES, plan_layouts
from pstar.planner.layouts_command import as_json
from tests.docs.browser import Browser
from tests.docs.test_tools import TOOLS, in_the_browser, needs_browser, same

NUM_CASES = 50


def random_case(chance: random.Random) -> tuple[list[Any], GptShape, LayoutJob]:
    """Arguments of cluster_of, and a job; most of them fit somehow."""
    nodes, heads = chance.choice([1, 1, 1, 2, 3, 4]), chance.choice([4, 8, 12, 16, 25])
    own = [chance.choice(list(GPUS)), nodes * chance.choice([1, 2, 4, 6, 8]), nodes,
           chance.choice([64, 240, 1000]) * GIB, 200.0, chance.choice([0.5, 0.37]), chance.choice([None, 80.5]),
           chance.choice([None, 12.3]), chance.choice([None, 1.25, 44.4])]  # fmt: skip
    positions = chance.choice([1024, 2048, 8192])
    shape = GptShape(chance.choice([4, 7, 12, 24, 36, 96]), heads * chance.choice([64, 128]), heads,
                     chance.choice([3980, 21128, 50257]), positions)
    precision = chance.choice(["fp32", "bf16", "fp16"])
    return own, shape, LayoutJob(shape, chance.choice([512, 1000, 1024]), chance.choice([7, 8, 48, 64]), precision)


def in_js(job: LayoutJob) -> dict[str, Any]:
    shape = job.shape
    return {"n_layer": shape.layers, "n_embd": shape.hidden, "n_head": shape.heads, "n_positions": shape.positions,
            "vocab_size": shape.vocab, "seq_len": job.seq_len, "batch": job.batch, "precision": job.precision}  # fmt: skip


def first_difference(ours: Any, theirs: Any, where: str = "") -> str:
    """The place of the first value that differs, '' if none does."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return f"{where}: {sorted(ours.keys() ^ theirs.keys())}"
        return next((found for key in ours if (found := first_difference(ours[key], theirs[key], f"{where}.{key}"))), "")
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return f"{where}: {len(ours)} and {len(theirs)} items"
        pairs = enumerate(zip(ours, theirs, strict=True))
        return next((found for n, pair in pairs if (found := first_difference(*pair, f"{where}[{n}]"))), "")
    return "" if same(ours, theirs) else f"{where}: {ours!r} and {theirs!r}"


def page_and_terminal_agree(folder: Path, tools: Path = TOOLS, number: int = NUM_CASES) -> list[dict[str, Any]]:
    """Asserts it for random cases, the table of GPUs and the lists; returns Python's answers."""
    chance = random.Random(11)
    cases = [random_case(chance) for _ in range(number)]
    expected = [as_json(plan_layouts(cluster_of(*own), job)) for own, _, job in cases]
    questions = [{"name": "layouts_answer", "arguments": [own, in_js(job)]} for own, _, job in cases]
    *answers, gpus, techniques, parts = in_the_browser(folder, [*questions, *(
        {"name": name, "arguments": []} for name in ("GPUS", "TECHNIQUES", "PARTS"))], tools)  # fmt: skip
    for (own, _, job), ours, theirs in zip(cases, expected, answers, strict=True):
        assert not first_difference(json.loads(json.dumps(ours)), theirs), (own, job, first_difference(ours, theirs))
    table = {name: {key: value for key, value in vars(gpu).items() if key != "source"} for name, gpu in GPUS.items()}
    assert gpus == table and techniques == list(TECHNIQUES) and parts == list(PARTS)
    return expected


@needs_browser
def test_page_and_terminal_agree_in_50_cases(tmp_path: Path) -> None:
    expected = page_and_terminal_agree(tmp_path)
    best = {answer["rows"][0]["technique"] for answer in expected if answer["rows"]}
    reasons = {refusal["reason"] for answer in expected for refusal in answer["refusals"]}
    assert len(best) >= 5 and {"device", "heads", "layers", "batch", "one_gpu"} <= reasons, (best, reasons)
    assert any(not answer["rows"] for answer in expected), "nothing fits in some case"
    commands = [answer["command"] for answer in expected if answer["rows"]]
    assert any(command["instead"] for command in commands) and any(command["runs"] for command in commands)


WRONG = {
    "the last unit hides": ("layouts_model.js", "moving / (layers + 1))", "0)"),
    "pipelines of odd stages": ("layouts_model.js", "pipeline of divisors(gcd(job.n_layer,", "pipeline of divisors(gcd(12,"),
    "a GPU's memory": ("layouts_model.js", "h200: gpu(139,", "h200: gpu(141,"),
    "a flag": ("layouts_model.js", "--opt-level O2", "--opt-level O1"),
    "states": ("formulas.js", "shards) + layers * ceil_div(block, shards)", "shards) + layers * floor_div(block, shards)"),
}  # fmt: skip


@needs_browser
@pytest.mark.deep
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_formula_of_the_page_is_found(tmp_path: Path, case: str) -> None:
    file, right, wrong = WRONG[case]
    tools = shutil.copytree(TOOLS, tmp_path / "tools")
    text = (tools / file).read_text()
    assert text.count(right) == 1
    (tools / file).write_text(text.replace(right, wrong))
    with pytest.raises(AssertionError):
        page_and_terminal_agree(tmp_path, tools, 120)


@needs_browser
@pytest.mark.parametrize("below", ["en/", ""])
def test_the_built_page_answers(browser: Browser, address: str, below: str) -> None:
    job = LayoutJob(MODELS["6B"], 1024, 32, "fp16")
    best = plan_layouts(cluster_of("v100-32", 8, host_bytes=240 * GIB), job).best
    browser.open(f"{address}/{below}which/#gpu=v100-32&gpus=8&model=6B&batch=32&host_gib=240")
    browser.wait_for("document.querySelector('#tool-answer') !== null")
    shown = browser.evaluate("document.querySelector('#layouts-tool #tool-answer').dataset.step")
    assert float(shown) == pytest.approx(best.step, rel=1e-12) and not browser.complaints


def test_models_of_the_page_are_those_of_the_terminal() -> None:
    """Names and sizes; a model of the page is one of `pstar plan --model`."""
    text = (TOOLS / "layouts.js").read_text()
    found = re.findall(r'"?(\w+)"?: sizes\((\d+), (\d+), (\d+)\)', text)
    assert len(found) >= 10
    for name, *sizes in found:
        shape = MODELS[name]
        assert [shape.layers, shape.hidden, shape.heads] == [int(size) for size in sizes]
        assert (shape.vocab, shape.positions) == (50257, 1024)
