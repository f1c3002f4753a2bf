"""Figures that move inside the lessons: their numbers are those of the chapters' code; keys, phone, themes, less motion."""

from __future__ import annotations

import functools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pstar.layout.nodes import sent_by_flat_ring, sent_in_two_levels
from tests.chapters.technique import ROOT, technique
from tests.docs import figure_runs
from tests.docs.browser import Browser, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
FIGURES = ROOT / "docs/assets/figures"
PAGES = {"ring": "chapters/02_ddp", "loss-scale": "chapters/04_apex", "zero": "chapters/06_zero",
         "staleness": "chapters/01_parameter_server", "pipeline": "chapters/05_model_parallel",
         "states": "chapters/06_zero", "two-levels": "production/clusters"}  # fmt: skip
PAGE = """<!doctype html><html lang="{language}"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
{styles}<style>:root {{ --md-default-bg-color: #fff }}</style>
<body style="margin:16px"><div data-figure="{figure}">text</div>{scripts}</body></html>"""


def computed(browser: Browser, script: str, name: str, cases: list[list[Any]], change: tuple[str, str] | None = None) -> Any:
    """The answers of a script's expression `name` to lists of arguments, after a change of its text."""
    text = (FIGURES / script).read_text(encoding="utf-8")
    if change:
        if text.count(change[0]) != 1:
            raise ValueError(f"{script} does not have once: {change[0]}")
        text = text.replace(*change)
    return browser.evaluate(f"(() => {{ {text}; return {json.dumps(cases)}.map((all) => {name}(...all)); }})()")


# ---- the ring


def held_by_python(turns: list[Any], num_ranks: int) -> list[list[list[int]]]:
    """Which ranks' numbers each chunk of each rank contains after some turns, chunk by chunk as the executor adds them."""
    held = [[[rank] for _ in range(num_ranks)] for rank in range(num_ranks)]
    for phase, sends in turns:
        arrived = [held[rank - 1][sends[rank - 1]] for rank in range(num_ranks)]
        for rank, own in enumerate(held):
            chunk = sends[rank - 1]
            own[chunk] = sorted(own[chunk] + arrived[rank]) if phase == "reduce-scatter" else arrived[rank]
    return held


def the_ring_agrees(browser: Browser, change: tuple[str, str] | None = None) -> None:
    ring, sizes = technique("02_ddp", "ring"), range(1, 10)
    turns = computed(browser, "ring.js", "courseRing.ring_turns", [[p] for p in sizes], change)
    moments = [(p, count) for p in sizes for count in range(2 * (p - 1) + 1)]
    held = computed(browser, "ring.js", "courseRing.ring_held", [list(one) for one in moments], change)
    sent = computed(browser, "ring.js", "courseRing.ring_sent", [[p, 2 * (p - 1), 5040] for p in sizes], change)
    for p, theirs, num_bytes in zip(sizes, turns, sent, strict=True):
        assert theirs == [{"phase": turn.phase, "sends": list(turn.sends)} for turn in ring.ring_turns(p)]
        assert num_bytes == pytest.approx(ring.ring_bytes(5040, p))
    for (p, count), theirs in zip(moments, held, strict=True):
        assert theirs == held_by_python(ring.ring_turns(p)[:count], p)


def test_the_ring_is_the_table_that_chapter_02_runs(browser: Browser) -> None:
    the_ring_agrees(browser)


@pytest.mark.parametrize("change", [
    ('turns("all-gather", 1)', 'turns("all-gather", 0)'),
    ("(rank + 1) % p, arrived", "(rank + 2) % p, arrived"),
    ("count * (bytes / p)", "count * (bytes / (p + 1))"),
])  # fmt: skip
def test_a_wrong_ring_is_found(browser: Browser, change: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        the_ring_agrees(browser, change)


# ---- the loss scale


def scales_by_python(overflows: list[bool], window: int) -> list[dict[str, Any]]:
    """The trace of chapter 04's LossScaler, whose gradients are inf in the steps that overflow."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = technique("04_apex", "loss_scaler").LossScaler("dynamic", window, lambda number: number, None)
    found = []
    for overflow in overflows:
        scale, before = scaler.value, parameter.item()
        parameter.grad = torch.full((1,), float("inf") if overflow else scale)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        try:
            scaler.update()
        except SystemExit:  # it gives up
            break
        found.append({"scale": scale, "skipped": parameter.item() == before, "next": scaler.value,
                      "good": scaler.state_dict()["good_in_a_row"]})  # fmt: skip
    return found


@functools.cache
def sequences() -> list[tuple[list[bool], int]]:
    """50 random sequences and windows, and three that reach the largest scale, give up, and almost give up."""
    chance = random.Random(4)
    found = [([chance.random() < chance.choice([0.0, 0.1, 0.5]) for _ in range(chance.choice([1, 16, 80]))],
              chance.choice([1, 2, 3, 4, 8, 1000])) for _ in range(50)]  # fmt: skip
    return [*found, ([False] * 12, 1), ([True] * 30, 4), ([True] * 19 + [False] * 9 + [True] * 3, 4)]


def scales_agree(browser: Browser, change: tuple[str, str] | None = None) -> None:
    cases = [[overflows, window] for overflows, window in sequences()]
    answers = computed(browser, "loss_scale.js", "courseScale.loss_scales", cases, change)
    assert answers == [scales_by_python(*one) for one in sequences()]


def test_the_loss_scale_is_that_of_chapter_04_s_scaler(browser: Browser) -> None:
    scales_agree(browser)
    lengths = [len(scales_by_python(*one)) for one in sequences()]
    assert lengths[-2:] == [19, 31] and scales_by_python(*sequences()[-3])[-1]["next"] == 2.0**24


@pytest.mark.parametrize("change", [
    ("BACKOFF = 0.5", "BACKOFF = 0.25"), ("LARGEST = 2 ** 24", "LARGEST = 2 ** 25"), ("PATIENCE = 20", "PATIENCE = 21"),
    ("good = overflow ? 0 : good + 1", "good = good + 1"), ("LARGEST); good = 0;", "LARGEST);"),
])  # fmt: skip
def test_a_wrong_loss_scale_is_found(browser: Browser, change: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        scales_agree(browser, change)


# ---- ZeRO

STAGES = [(stage, blocks) for stage in range(4) for blocks in (1, 2, 4)]


@pytest.fixture(scope="module")
def zero_runs(ranks: Any) -> dict[tuple[int, int, int], list[dict[str, Any]]]:
    """What each of p ranks of chapter 06 held in a step: (p, stage, blocks) -> by rank."""
    return {(p, *one): ranks(p).run(figure_runs.zero_moments, *one) for p in (2, 3, 4) for one in STAGES}


def zero_agrees(browser: Browser, runs: Any, change: tuple[str, str] | None = None) -> None:
    tables = dict(zip(STAGES, computed(browser, "zero.js", "courseZero.zero_moments", [list(one) for one in STAGES], change),
                      strict=True))  # fmt: skip
    size = figure_runs.SIZE
    cases = [(p, stage, rank) for p in (2, 3, 4) for stage in range(4) for rank in range(p)]
    arguments = [[stage, p, rank, size] for p, stage, rank in cases]
    owned = dict(zip(cases, computed(browser, "zero.js", "courseZero.zero_owned", arguments, change), strict=True))
    for (p, stage, blocks), run in runs.items():
        table = tables[stage, blocks]
        held = computed(browser, "zero.js", "courseZero.zero_bytes", [[stage, p, moment, size] for moment in table], change)
        for rank, seen in enumerate(run):
            assert [{**moment, "bytes": one} for moment, one in zip(table, held, strict=True)] == seen["moments"]
            assert seen["owned"] == [tuple(owned[p, stage, rank])] * (blocks + 1)


def test_the_moments_of_zero_are_those_of_chapter_06_s_ranks(browser: Browser, zero_runs: Any) -> None:
    zero_agrees(browser, zero_runs)
    last = technique("06_zero", "zero.ledger").state_formula([figure_runs.SIZE] * 5, 3, 4, 2)
    mean = zero_runs[4, 3, 4][0]["moments"][-3]
    assert mean["phase"] == "mean" and sum(mean["bytes"].values()) == sum(last.values())


@pytest.mark.parametrize("change", [
    ("gather(unit, unit + 1)", "gather(unit, unit + 2)"), ("gather(unit, unit - 1)", "gather(unit)"),
    ("      free(unit);\n", ""), ("finish(0); free(0)", "finish(0)"), ("      finish(1);", "      finish(2);"),
    ("if (stage !== 1) reduce", "if (stage > 1) reduce"), ("if (stage === 1 || stage === 2) {", "if (stage === 2) {"),
    ("(rank * size) / p", "0"), ("(stage === 3 ? 2 * own : 0)", "0"), ("fp32: 4 * own", "fp32: 2 * own"),
    ("12 * own * moment", "16 * own * moment"),
])  # fmt: skip
def test_a_wrong_zero_is_found(browser: Browser, zero_runs: Any, change: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        zero_agrees(browser, zero_runs, change)


# ---- the parameter server


@functools.cache
def servers() -> list[tuple[list[int], int | None, int]]:
    """(durations, bound, steps): 60 random ones of 1 to 5 ranks, and those that a reader can choose."""
    chance = random.Random(1)
    found = [([chance.randint(1, 9) for _ in range(chance.randint(1, 5))], chance.choice([None, 0, 1, 2, 3, 5]), 12)
             for _ in range(60)]  # fmt: skip
    return found + [([2, 2 * slow, 3, 4][:p], bound, 20) for p in (2, 3, 4) for slow in (1, 3, 5) for bound in (0, 1, 2, 4)]


@functools.cache
def server_runs() -> list[list[dict[str, Any]]]:
    return [figure_runs.ServerWorld(durations, bound).run(steps) for durations, bound, steps in servers()]


def servers_agree(browser: Browser, change: tuple[str, str] | None = None) -> None:
    cases = [list(one) for one in servers()]
    assert computed(browser, "staleness.js", "courseServer.server_run", cases, change) == server_runs()


def test_staleness_is_that_of_chapter_01_s_server(browser: Browser) -> None:
    servers_agree(browser)
    for (_, bound, _), run in zip(servers(), server_runs(), strict=True):
        assert max(one["staleness"] for step in run for one in step["gradients"]) <= (bound or 0)
    assert max(one["staleness"] for run in server_runs() for step in run for one in step["gradients"]) == 5


@pytest.mark.parametrize("change", [
    ("- works_on >= bound", "- works_on > bound"), ("bound === null ||", "bound !== null &&"),
    ("arrives(rank) <= at", "arrives(rank) < at"), ("began[rank] = at;", ""),
    ("staleness: step - 1 -", "staleness: step -"), ("works_on[rank] = step;", "works_on[rank] += 1;"),
])  # fmt: skip
def test_a_wrong_server_is_found(browser: Browser, change: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        servers_agree(browser, change)


# ---- the tree of a two-level all-gather

NODES = [(n, m) for n in (2, 3, 4) for m in (1, 2, 3)]


def the_tree_agrees(browser: Browser, change: tuple[str, str] | None = None) -> None:
    trees = computed(browser, "two_levels.js", "courseTwoLevels.gather_tree", [list(one) for one in NODES], change)
    sent = computed(browser, "two_levels.js", "courseTwoLevels.gather_sent", [list(one) for one in NODES], change)
    moments = [[n, m, count] for n, m in NODES for count in range(3)]
    held = iter(computed(browser, "two_levels.js", "courseTwoLevels.gather_held", moments, change))
    for (n, m), tree, chunks in zip(NODES, trees, sent, strict=True):
        world = figure_runs.GatherWorld(n, m).run()
        for theirs, ours in zip(tree, world.passed, strict=True):
            assert sorted([one["chunk"], one["source"], one["target"]] for one in theirs) == sorted(ours)
        assert [next(held) for _ in range(3)] == world.held
        assert chunks == {"levels": sent_in_two_levels(n, n * m, 0), "ring": sent_by_flat_ring(n * m, n * m, 0)}


def test_the_tree_is_what_pstar_s_two_levels_copy(browser: Browser) -> None:
    the_tree_agrees(browser)


@pytest.mark.parametrize("change", [
    ("place_of(rank, m) === place_of(chunk, m)", "node_of(rank, m) === node_of(chunk, m)"),
    ("source: chunk, target: source", "source, target: chunk"), ("if (target !== source && ", "if ("),
    (".slice(0, count)", ".slice(1, count)"), ("node_of(copy.source, m) === 0", "true"),
    ("ring: n * m - 1", "ring: n * m"),
])  # fmt: skip
def test_a_wrong_tree_is_found(browser: Browser, change: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        the_tree_agrees(browser, change)


# ---- on a page


def show(browser: Browser, folder: Path, figure: str, language: str = "en", assets: Path = ROOT / "docs/assets") -> None:
    """Opens a page that has only this figure, with the scripts of a folder of assets."""
    styles = "".join(f'<link rel="stylesheet" href="{(assets / name).as_uri()}">'
                     for name in ("site.css", "tools/tools.css", "figures/figures.css"))  # fmt: skip
    own = [f"figures/{one.name}" for one in sorted(FIGURES.glob("*.js")) if one.name != "frame.js"]
    names = ["tools/formulas.js", "tools/schedules.js", "tools/controls.js", "figures/frame.js", *own]
    scripts = "".join(f'<script src="{(assets / name).as_uri()}"></script>' for name in names)
    page = folder / f"{figure}_{language}.html"
    page.write_text(PAGE.format(language=language, styles=styles, figure=figure, scripts=scripts), encoding="utf-8")
    browser.open(page.as_uri())
    browser.wait_for("document.querySelector('[data-step]') !== null")


def press(browser: Browser, key: str) -> int:
    """Sends a key to the figure; returns the step that it shows then."""
    return pressed(browser, key)[0]


def pressed(browser: Browser, key: str) -> tuple[int, str]:
    """The step and the text of the play button right after a key: one call, because a figure that plays goes on."""
    step, text = browser.evaluate(f"""(() => {{
        const figure = document.querySelector(".figure");
        figure.dispatchEvent(new KeyboardEvent("keydown", {{key: "{key}"}}));
        return [figure.dataset.step, figure.querySelectorAll(".tool-player button")[2].textContent];
    }})()""")
    return int(step), text


@pytest.mark.parametrize("figure, last", [("ring", 6), ("loss-scale", 16), ("zero", 14), ("staleness", 10),
                                          ("pipeline", 22), ("states", 4), ("two-levels", 2)])  # fmt: skip
def test_keys_and_buttons_move_a_figure(browser: Browser, tmp_path: Path, figure: str, last: int) -> None:
    show(browser, tmp_path, figure)
    assert press(browser, "Home") == 0
    keys = ("ArrowRight", "ArrowRight", "ArrowLeft", "Home", "ArrowLeft", "End", "ArrowRight")
    assert [press(browser, key) for key in keys] == [1, 2, 1, 0, 0, last, last]
    browser.evaluate("document.querySelectorAll('.tool-player button')[1].click()")
    assert browser.evaluate("Number(document.querySelector('.figure').dataset.step)") == last - 1
    assert pressed(browser, " ") == (last - 1, "pause")
    browser.wait_for(f"document.querySelector('.figure').dataset.step == {last}")
    browser.wait_for("document.querySelectorAll('.tool-player button')[2].textContent == 'play'")
    assert not browser.complaints


@pytest.mark.parametrize("figure", sorted(PAGES))
def test_a_reader_who_wants_less_motion_gets_steps_only(browser: Browser, tmp_path: Path, figure: str) -> None:
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    try:
        show(browser, tmp_path, figure)
        assert browser.evaluate("document.querySelectorAll('.tool-player button')[2].hidden")
        press(browser, "Home")
        assert press(browser, "ArrowRight") == 1 and pressed(browser, " ") == (1, "play")
    finally:
        browser.call("Emulation.setEmulatedMedia", features=[])


@pytest.mark.parametrize("figure", sorted(PAGES))
def test_a_figure_fits_a_phone_in_both_languages(browser: Browser, tmp_path: Path, figure: str) -> None:
    said = {}
    browser.resize(390)
    try:
        for language in ("en", "zh"):
            show(browser, tmp_path, figure, language)
            said[language] = browser.evaluate("document.querySelector('.figure').textContent")
            assert browser.evaluate("document.documentElement.scrollWidth") <= 390
            smallest = browser.evaluate("""Math.min(...[...document.querySelectorAll('.figure text')].map(one =>
                parseFloat(getComputedStyle(one).fontSize) * one.ownerSVGElement.getBoundingClientRect().width / 360))""")
            assert smallest >= 10, "letters of at least 10 px"
    finally:
        browser.resize(1280)
    assert re.search("[一-鿿]", said["zh"]) and not re.search("[一-鿿]", said["en"])


def test_the_picture_of_the_ring_is_its_table(browser: Browser, tmp_path: Path) -> None:
    ring = technique("02_ddp", "ring")
    show(browser, tmp_path, "ring")
    for count in range(7):
        cells = browser.evaluate("[...document.querySelectorAll('.figure-cell')].map(one => one.dataset.sum)")
        held = held_by_python(ring.ring_turns(4)[:count], 4)
        assert cells == ["+".join(map(str, chunk)) for own in held for chunk in own]
        said = browser.evaluate("document.querySelector('.figure-said').textContent")
        assert float(re.search(r"has sent ([\d.]+) of 90", said)[1]) == ring.ring_bytes(60, 4) * count / 6
        press(browser, "ArrowRight")
    assert not browser.complaints


def test_the_picture_of_two_levels_is_its_tree(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, "two-levels")
    for n, m, chosen in ((2, 2, 1), (3, 2, 4), (4, 3, 11), (2, 1, 1)):
        for place, number in enumerate((n, m, chosen)):
            browser.evaluate(f"""(() => {{ const select = document.querySelectorAll(".figure select")[{place}];
                select.value = {number}; select.dispatchEvent(new Event("change")); }})()""")
        world = figure_runs.GatherWorld(n, m).run()
        for count in range(3):
            press(browser, "Home" if not count else "ArrowRight")
            cells = browser.evaluate("[...document.querySelectorAll('[data-has]')].map(one => one.dataset.has)")
            assert cells == [f"{step} {rank} {chunk} {str(step <= count and chunk in world.held[step][rank]).lower()}"
                             for step in range(3) for rank in range(n * m) for chunk in range(n * m)]  # fmt: skip
            ways = browser.evaluate("[...document.querySelectorAll('[data-way]')].map(one => one.dataset.way)")
            expected = [" ".join(map(str, one)) for copies in world.passed[:count] for one in copies if one[0] == chosen]
            assert sorted(ways) == sorted(expected)
    assert not browser.complaints


def test_the_picture_of_zero_is_its_table(browser: Browser, tmp_path: Path, zero_runs: Any) -> None:
    show(browser, tmp_path, "zero")
    peak = 0.0
    for moment in zero_runs[2, 3, 4][0]["moments"]:
        cells = browser.evaluate("[...document.querySelectorAll('[data-state]')].map(one => one.dataset.state)")
        assert cells == [f"{kind} {unit} {moment.get(kind, ['own'] * 5)[unit]}" for _ in range(2)
                         for kind in ("parameters", "gradients", "optimizer") for unit in range(5)]  # fmt: skip
        said = browser.evaluate("document.querySelector('.figure-said').textContent")
        now, most = map(float, re.search(r"holds ([\d.]+) bytes a parameter, ([\d.]+) at", said).groups())
        held = sum(moment["bytes"].values()) / (5 * figure_runs.SIZE)
        peak = max(peak, held)
        assert (now, most) == (pytest.approx(held, abs=0.05), pytest.approx(peak, abs=0.05))
        press(browser, "ArrowRight")
    assert not browser.complaints


def test_the_picture_of_staleness_is_its_table(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, "staleness")
    for bound, slow in ((4, 5), (1, 3), (0, 5)):
        for place, number in ((1, slow), (2, bound)):
            browser.evaluate(f"""(() => {{ const select = document.querySelectorAll(".figure select")[{place}];
                select.value = {number}; select.dispatchEvent(new Event("change")); }})()""")
        assert browser.evaluate("document.querySelectorAll('[data-gradient]').length") == 0
        press(browser, "End")
        drawn = browser.evaluate("[...document.querySelectorAll('[data-gradient]')].map(one => one.dataset.gradient)")
        run = figure_runs.ServerWorld([2, 2 * slow, 3], bound).run(20)
        assert drawn == [f"{one['rank']} {one['version']} {one['staleness']}" for step in run if step["at"] <= 20
                         for one in step["gradients"]]  # fmt: skip
    assert not browser.complaints


def test_a_toggle_changes_the_scales(browser: Browser, tmp_path: Path) -> None:
    show(browser, tmp_path, "loss-scale")
    press(browser, "End")
    drawn = "[...document.querySelectorAll('[data-scale]')].map(one => Number(one.dataset.scale))"
    overflows = [step in (0, 1, 10) for step in range(16)]
    assert browser.evaluate(drawn) == [one["scale"] for one in scales_by_python(overflows, 4)]
    browser.evaluate("document.querySelectorAll('.figure-toggles button')[5].click()")
    overflows[5] = True
    assert browser.evaluate("Number(document.querySelector('.figure').dataset.step)") == 6
    press(browser, "End")
    assert browser.evaluate(drawn) == [one["scale"] for one in scales_by_python(overflows, 4)]


def test_every_figure_is_loaded_and_on_its_page_in_both_languages() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert all(f"assets/figures/{one.name}" in settings for one in FIGURES.iterdir())
    defined = {name for one in FIGURES.glob("*.js") for name in re.findall(r'\.define\("([\w-]+)"', one.read_text("utf-8"))}
    assert defined == set(PAGES)
    for figure, page in PAGES.items():
        for language in ("en", "zh"):
            text = (ROOT / f"docs/{language}/{page}.md").read_text(encoding="utf-8")
            assert re.search(rf'^<div data-figure="{figure}"><p>.{{20,}}</p></div>$', text, re.MULTILINE), (figure, language)
