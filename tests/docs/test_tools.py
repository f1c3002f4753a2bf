"""The calculators in the pages: a real headless browser computes the same as Python, also in the built pages."""

from __future__ import annotations

import inspect
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.chapters.technique import ROOT, technique
from tests.cover import quick_only
from tests.docs.browser import Browser, missing, shared

TOOLS = ROOT / "docs/assets/tools"
needs_browser = pytest.mark.skipif(bool(missing()), reason=missing())

# formulas that take a job, a job and a rank, or another formula's result
OF_A_JOB = ("outside_parameters", "num_parameters", "num_tensors", "refusal", "stages_of", "sharded_parameters",
            "micro_tokens", "tensor_bytes", "step_flops")  # fmt: skip
OF_A_RANK = ("held_parameters", "states", "live_micro_batches", "activations", "memory", "boundaries", "traffic")
OF_BYTES = {"device_bytes": "memory", "host_bytes": "memory", "sent_bytes": "traffic", "received_bytes": "traffic"}
PAGE = """<!doctype html><meta charset="utf-8"><pre id="out"></pre><script src="{folder}/formulas.js"></script>
<script src="{folder}/schedules.js"></script><script src="{folder}/controls.js"></script>
<script src="{folder}/adaptation.js"></script><script src="{folder}/layouts_model.js"></script>
<script src="cases.js"></script><script>
const layouts_answer = (own, job) => courseLayouts.plan_layouts(courseLayouts.cluster_of(...own), job);
const all = {{ ...courseFormulas, ...courseSchedules, ...courseAdaptation, ...courseLayouts, layouts_answer,
  PRESETS: courseTools.PRESETS }};
const value = (x) => typeof all[x.name] === "function" ? all[x.name](...x.arguments) : all[x.name];
document.getElementById("out").textContent = JSON.stringify(cases.map(value));
</script>"""


@pytest.fixture(scope="module")
def formulas():
    from docs.generate.arithmetic import formulas

    return formulas


@pytest.fixture(scope="module")
def schedules():
    return technique("05_model_parallel", "schedules")


def opened(address: str) -> Browser:
    """The browser with a page, which it loads anew also if only the part after # differs."""
    shared().open("about:blank")
    shared().open(address)
    return shared()


def in_the_browser(folder: Path, cases: list[dict[str, Any]], tools: Path = TOOLS) -> list[Any]:
    """The scripts' answers to the cases, each {name, arguments}."""
    (folder / "cases.js").write_text(f"const cases = {json.dumps(cases)};", encoding="utf-8")
    (folder / "cases.html").write_text(PAGE.format(folder=tools.as_uri()), encoding="utf-8")
    browser = opened((folder / "cases.html").as_uri())
    found = browser.evaluate('document.getElementById("out").textContent')
    assert found, f"the scripts ended with an error: {browser.complaints}"
    return json.loads(found)


def same(ours: Any, theirs: Any) -> bool:
    """Compares whole numbers exactly, up to the precision of a double, and others to 1e-12."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, float) or (isinstance(ours, int) and abs(ours) >= 2**53):
        return theirs == pytest.approx(ours, rel=1e-12, abs=1e-300)
    return ours == theirs


def random_job(formulas, chance: random.Random) -> dict[str, Any]:
    """A random job, possibly one that the programs refuse: the numbers shown for it must also be right."""
    strategy = chance.choice(formulas.STRATEGIES)
    heads = chance.choice([1, 2, 4, 12, 16, 25])
    ranks = 1 if strategy == "single" else chance.choice([1, 2, 3, 4, 7, 8, 16, 64, 512])
    micros = chance.choice([1, 2, 3, 4, 8, 32])
    fitting = chance.random() < 0.7
    layers = (ranks if fitting and ranks <= 64 else 1) * chance.choice([1, 2, 3, 4, 12])
    return {"n_layer": layers, "n_embd": heads * chance.choice([8, 64, 100, 128]), "n_head": heads,
            "n_positions": chance.choice([128, 1024, 2048]), "vocab_size": chance.choice([3980, 21128, 50257, 100_003]),
            "strategy": strategy, "precision": chance.choice(formulas.precisions_of(strategy)), "ranks": ranks,
            "batch": (ranks * micros if fitting else 1) * chance.choice([1, 2, 5, 24]),
            "seq_len": chance.choice([1, 64, 127, 128, 1024]), "micro_batches": micros,
            "checkpointing": chance.random() < 0.4, "virtual_stages": chance.choice([1, 2, 3]),
            "near_percent": chance.choice([0, 1, 10, 25, 60, 99, 100])}  # fmt: skip


def written_cases(formulas, number: int = 400) -> list[tuple[dict[str, Any], Any]]:
    """Pairs of ({name, arguments}, Python's answer)."""
    chance, found = random.Random(8), []

    def add(name: str, *arguments: Any) -> Any:
        answer = getattr(formulas, name)(*arguments)
        found.append(({"name": name, "arguments": arguments}, answer))
        return answer

    for strategy in formulas.STRATEGIES:
        found.append(({"name": "precisions_of", "arguments": [strategy]}, list(formulas.precisions_of(strategy))))
        for precision in formulas.precisions_of(strategy):
            add("parameter_costs", strategy, precision)
            add("activation_costs", precision)
    for _ in range(number):
        job = random_job(formulas, chance)
        rank = chance.randrange(job["ranks"])
        for name in OF_A_JOB:
            add(name, job)
        answers = {name: add(name, job, rank) for name in OF_A_RANK}
        for name, of in OF_BYTES.items():
            add(name, answers[of])
        if job["strategy"] == "pstar":
            add("near_budget", job)
            add("pstar_away", job)
        add("compute_seconds", job, chance.uniform(1e9, 1e15))
        add("link_seconds", answers["traffic"], chance.uniform(1e6, 1e12))
        p, m = job["ranks"], job["micro_batches"]
        add("bubble_fraction", job["strategy"], p, m, chance.choice([1, 2, 3]))
        add("ring_bytes", chance.randrange(2**40), p)
        add("usable_bytes", chance.choice([8, 16, 24, 40, 80]))
    return found


@needs_browser
def test_the_formulas_in_the_browser_are_python_s(formulas, tmp_path: Path) -> None:
    cases = written_cases(formulas)
    answers = in_the_browser(tmp_path, [case for case, _ in cases])
    wrong = [(case, expected, got) for (case, expected), got in zip(cases, answers, strict=True) if not same(expected, got)]
    assert not wrong, f"{len(wrong)} of {len(cases)}, the first: {wrong[0]}"
    assert len(cases) > 5000 and {case["arguments"][0]["strategy"] for case, _ in cases if case["name"] == "memory"} == set(
        formulas.STRATEGIES)  # fmt: skip


@needs_browser
def test_names_and_lists_are_the_same(formulas, schedules, tmp_path: Path) -> None:
    lists = ("PIPELINES", "ZERO", "REPLICAS", "STRATEGIES", "KINDS", "HOST_KINDS")
    found = in_the_browser(tmp_path, [{"name": name, "arguments": []} for name in (*lists, "NAMES")])
    assert found == [*(list(getattr(formulas, name)) for name in lists), list(schedules.NAMES)]
    public = {name for name, what in vars(formulas).items() if inspect.isfunction(what)}
    text = (TOOLS / "formulas.js").read_text()
    assert {"zero_states", "zero_shares", "ring_bytes"} <= public
    assert all(re.search(rf"(function|const) {name}\b", text) for name in public), "function by function"


@needs_browser
def test_presets_are_those_of_the_configuration(tmp_path: Path) -> None:
    """Tiny with the shipped vocabulary, the others with GPT-2's, each at its default batch and length."""
    from gpt2_chinese.model.config import PRESETS, RUN_DEFAULTS
    from gpt2_chinese.vocabulary.profiles import vocabulary_size

    (found,) = in_the_browser(tmp_path, [{"name": "PRESETS", "arguments": []}])
    assert list(found) == list(PRESETS)
    for name, preset in found.items():
        run, config = RUN_DEFAULTS[name], PRESETS[name]
        vocabulary = vocabulary_size(ROOT / "cache/vocab.txt") if name == "tiny" else 50257
        assert preset == {**{key: getattr(config, key) for key in ("n_layer", "n_embd", "n_head", "n_positions")},
                          "vocab_size": vocabulary, "batch": run.batch_size, "seq_len": run.seq_len}  # fmt: skip


@needs_browser
def test_the_player_s_schedules_are_those_of_chapter_05(schedules, tmp_path: Path) -> None:
    plans = [(name, p, m, 1) for name in ("naive", "gpipe", "1f1b") for p in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 4, 8, 13)]
    plans += [("interleaved", p, m, v) for p in (1, 2, 3, 4, 8) for m in (p, 2 * p, 3 * p) for v in (1, 2, 3)]
    cases, expected = [], []
    for name, p, m, v in plans:
        order = schedules.orders(name, p, m, v)
        cases.append({"name": "orders", "arguments": [name, p, m, v]})
        expected.append([[work._asdict() for work in works] for works in order])
        for backward in (1, 2):
            events = schedules.simulate(order, 1, backward)
            cases.append({"name": "simulate", "arguments": [expected[-1] if backward == 1 else expected[-3], 1, backward]})
            expected.append([{**event._asdict(), "work": event.work._asdict()} for event in events])
            cases.append({"name": "bubble", "arguments": [expected[-1], p]})
            expected.append(schedules.bubble(events, p))
    answers = in_the_browser(tmp_path, cases)
    for case, mine, theirs in zip(cases, expected, answers, strict=True):
        assert theirs == (pytest.approx(mine, abs=1e-12) if isinstance(mine, float) else mine), case
    assert len(plans) > 100


@needs_browser
@pytest.mark.parametrize("file, right, wrong", [
    ("formulas.js", "12 * n_embd ** 2 + 7 * n_embd", "12 * n_embd ** 2 + 6 * n_embd"),
    ("formulas.js", "2 * num_bytes * (p - 1)", "2 * num_bytes * p"),
    ("formulas.js", "(number - (number % divisor)) / divisor", "number / divisor"),
    ("schedules.js", '"1f1b": p - rank', '"1f1b": p'),
])  # fmt: skip
def test_a_wrong_formula_is_found(
    formulas, schedules, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, right: str, wrong: str
) -> None:
    tools = shutil.copytree(TOOLS, tmp_path / "tools")
    text = (tools / file).read_text()
    assert text.count(right) == 1
    (tools / file).write_text(text.replace(right, wrong))
    monkeypatch.setattr("tests.docs.test_tools.in_the_browser", lambda folder, cases, real=in_the_browser: real(
        folder, cases, tools))  # fmt: skip
    with pytest.raises(AssertionError):
        test_the_formulas_in_the_browser_are_python_s(formulas, tmp_path)
        test_the_player_s_schedules_are_those_of_chapter_05(schedules, tmp_path)


# ---- chapter 08's calculator

PLANS = ("none", "block", "every:2", "sqrt", "selective")
ADAPTED = {"rank": 8, "modules": "usual", "bottleneck": 16, "virtual_tokens": 16, "recompute": "none"}


def random_adaptation(chance: random.Random) -> dict[str, Any]:
    """A random model and method's numbers; some of them are refused."""
    heads = chance.choice([1, 2, 4, 12, 25])
    return {"n_layer": chance.choice([1, 2, 3, 4, 7, 12, 48]), "n_embd": heads * chance.choice([8, 9, 64, 100]),
            "n_head": heads if chance.random() < 0.9 else 7, "n_positions": chance.choice([64, 128, 1024]),
            "vocab_size": chance.choice([97, 3980, 50257]), "rank": chance.choice([1, 3, 8, 64, 300]),
            "modules": chance.choice(["usual", "attention", "all"]), "bottleneck": chance.choice([1, 16, 99, 2600]),
            "virtual_tokens": chance.choice([1, 16, 63, 64]), "batch": chance.choice([1, 5, 24]),
            "seq_len": chance.choice([1, 63, 64, 128]), "recompute": chance.choice(PLANS)}  # fmt: skip


def is_refused(job: dict[str, Any]) -> bool:
    """Whether chapter 08 or the model's configuration refuses a job."""
    from docs.generate.arithmetic.adaptation import MODULES
    from gpt2_chinese.errors import UserError
    from gpt2_chinese.model.config import ModelConfig
    from gpt2_chinese.model.recompute_plan import Plan

    spec = technique("08_param_efficient", "methods.spec").MethodSpec
    try:
        keys = ("n_layer", "n_embd", "n_head", "n_positions", "vocab_size")
        config = ModelConfig.from_dict({key: job[key] for key in keys}, "a test")
        for method in ("lora", "adapter", "prompt"):
            spec(method, job["rank"], modules=MODULES[job["modules"]], bottleneck=job["bottleneck"],
                 num_virtual_tokens=job["virtual_tokens"]).check(config)  # fmt: skip
        Plan.of(job["recompute"], config.n_layer)
    except UserError:
        return True
    return job["seq_len"] > job["n_positions"]


def adaptations_agree(folder: Path, tools: Path = TOOLS) -> None:
    from docs.generate.arithmetic.adaptation import calculated

    chance = random.Random(5)
    jobs = [random_adaptation(chance) for _ in range(400)]
    answers = in_the_browser(folder, [{"name": "calculated", "arguments": [job]} for job in jobs], tools)
    refused = [is_refused(job) for job in jobs]
    assert 50 < sum(refused) < 350
    for job, no, found in zip(jobs, refused, answers, strict=True):
        assert bool(found["refusal"]) == no, (job, found["refusal"])
        assert no or found == calculated(job), job


@needs_browser
def test_the_bytes_of_each_method_in_the_browser_are_python_s(tmp_path: Path) -> None:
    """The chapter's formulas, which its own tests hold to counted tensors. Every number is equal: the same operations."""
    adaptations_agree(tmp_path)


WRONG = {
    "lora": ("lora: L * r * S", "lora: L * r * O"),
    "states": ("rest = 12 * count", "rest = 8 * count"),
    "segments": ("(length - 1) * n * C", "length * n * C"),
    "rank": ('if (job.rank > job.n_embd) return "rank"', 'if (job.rank > 3 * job.n_embd) return "rank"'),
}


@needs_browser
@pytest.mark.parametrize("case", quick_only(WRONG, "segments"))
def test_a_wrong_formula_of_a_method_is_found(tmp_path: Path, case: str) -> None:
    right, wrong = WRONG[case]
    tools = shutil.copytree(TOOLS, tmp_path / "tools")
    text = (tools / "adaptation.js").read_text()
    assert text.count(right) == 1
    (tools / "adaptation.js").write_text(text.replace(right, wrong))
    with pytest.raises(AssertionError):
        adaptations_agree(tmp_path, tools)


# ---- in the built pages

SMALL = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257, "batch": 16, "seq_len": 512,
         "micro_batches": 1, "checkpointing": False, "virtual_stages": 2, "near_percent": 25}  # fmt: skip
LANGUAGES = pytest.mark.parametrize("below", ["", "en/"])


def answer(site: Path, page: str, attribute: str, **setting: Any) -> float:
    """The number that a calculator shows for a setting in the address."""
    browser = opened(f"{(site / page).as_uri()}/index.html#{urlencode(setting)}")
    return float(browser.wait_for(f'document.getElementById("tool-answer")?.getAttribute("{attribute}")'))


@needs_browser
@LANGUAGES
@pytest.mark.parametrize("changes", [
    {"strategy": "zero3", "precision": "bf16", "ranks": 8},
    {"strategy": "1f1b", "precision": "O1", "ranks": 4, "micro_batches": 8},
    {"strategy": "pstar", "precision": "bf16", "ranks": 2, "near_percent": 40},
])  # fmt: skip
def test_the_memory_page_answers(formulas, site: Path, below: str, changes: dict[str, Any]) -> None:
    job = {**SMALL, **changes}
    expected = max(formulas.device_bytes(formulas.memory(job, rank)) for rank in range(job["ranks"]))
    assert answer(site, f"{below}tools/memory", "data-bytes", model="small", **changes) == expected


@needs_browser
@LANGUAGES
def test_the_traffic_page_answers(formulas, site: Path, below: str) -> None:
    changes = {"strategy": "server", "precision": "fp32", "ranks": 8}
    expected = formulas.sent_bytes(formulas.traffic({**SMALL, **changes}))
    assert answer(site, f"{below}tools/traffic", "data-bytes", model="small", **changes) == expected
    own = {"n_layer": 3, "n_embd": 64, "n_head": 2, "vocab_size": 1000, "n_positions": 64, "seq_len": 32}
    changes = {"strategy": "tensor", "precision": "fp32", "ranks": 2, "checkpointing": 1, **own}
    expected = formulas.sent_bytes(formulas.traffic({**SMALL, **changes}))
    assert answer(site, f"{below}tools/traffic", "data-bytes", model="custom", **changes) == expected


@needs_browser
@LANGUAGES
def test_the_player_answers(schedules, site: Path, below: str) -> None:
    events = schedules.simulate(schedules.orders("interleaved", 4, 8, 2))
    setting = {"schedule": "interleaved", "stages": 4, "micros": 8, "virtual": 2}
    shown = answer(site, f"{below}tools/bubble", "data-share", **setting)
    assert shown == pytest.approx(schedules.bubble(events, 4), rel=1e-12)


@needs_browser
@LANGUAGES
def test_the_page_of_chapter_08_answers(site: Path, below: str) -> None:
    from docs.generate.arithmetic.adaptation import calculated

    changes = {"rank": 64, "modules": "all", "recompute": "sqrt"}
    lora = next(row for row in calculated({**SMALL, **ADAPTED, **changes})["methods"] if row["name"] == "lora")
    shown = answer(site, f"{below}chapters/08_param_efficient", "data-share", model="small", **changes)
    assert shown == pytest.approx(lora["share"], rel=1e-12)


@needs_browser
def test_an_impossible_run_is_refused_and_a_wrong_address_gives_the_default(formulas, site: Path) -> None:
    address = (site / "en/tools/memory").as_uri()
    browser = opened(f"{address}/index.html#model=small&strategy=tensor&precision=fp32&ranks=5")
    assert browser.wait_for('document.body.textContent.includes("Possible ranks: 1, 2, 3, 4, 6, 12.")')
    default = formulas.device_bytes(formulas.memory({**SMALL, "strategy": "ddp", "precision": "O2", "ranks": 4}))
    assert answer(site, "en/tools/memory", "data-bytes", ranks=-3, strategy="none", batch="x", model='">') == default
