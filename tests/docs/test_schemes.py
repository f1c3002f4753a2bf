"""Light and dark pages: texts have enough contrast, figures suit both, and the reader's system decides."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.generate.pictures import dark, overview, pictures
from tests.docs.browser import Browser, missing, serve
from tests.docs.contrast import LEAST, scheme, too_faint

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
SCHEMES = {"light": "default", "dark": "slate"}
SOME = ("en/", "en/tools/bubble/#schedule=interleaved&stages=4&micros=8&virtual=4", "en/tools/memory/", "chapters/06_zero/",
        "en/404.html")  # fmt: skip


@pytest.fixture
def coloured(browser: Browser) -> Iterator[Browser]:
    """The browser, afterwards again with a light system."""
    yield browser
    scheme(browser, "light")


def faint(browser: Browser, url: str) -> list[str]:
    browser.open("about:blank")  # an address that differs after # alone would not load again
    browser.open(url)
    browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    return too_faint(browser)


@pytest.mark.parametrize("name", SCHEMES)
def test_texts_have_enough_contrast(coloured: Browser, address: str, name: str) -> None:
    scheme(coloured, name)
    coloured.resize(1280)
    wrong = {page: found for page in SOME if (found := faint(coloured, f"{address}/{page}"))}
    assert not wrong
    assert coloured.evaluate("document.body.dataset.mdColorScheme") == SCHEMES[name]
    assert not coloured.complaints


@pytest.mark.deep
@pytest.mark.parametrize("name", SCHEMES)
def test_texts_of_all_pages_have_enough_contrast(coloured: Browser, address: str, site: Path, name: str) -> None:
    scheme(coloured, name)
    every = sorted(path.relative_to(site).as_posix().removesuffix("index.html") for path in site.rglob("index.html"))
    for width in (1280, 390):
        coloured.resize(width)
        wrong = {page: found for page in every if (found := faint(coloured, f"{address}/{page}"))}
        assert not wrong, width


@pytest.mark.parametrize("name", SCHEMES)
def test_a_page_shows_each_figure_once_in_its_scheme(coloured: Browser, address: str, name: str) -> None:
    scheme(coloured, name)
    coloured.open(f"{address}/en/chapters/02_ddp/")
    shown = coloured.evaluate("""[...document.querySelectorAll("article img")].filter(image => image.getClientRects().length)
        .map(image => image.getAttribute("src"))""")
    drawn = [source for source in shown if ".svg" in source]
    assert drawn and all((".dark.svg" in source) == (name == "dark") for source in drawn)
    assert len({source.split("/")[-1].split(".")[0] for source in drawn}) == len(drawn)


def test_letters_in_coloured_boxes_have_enough_contrast() -> None:
    """White letters on each colour of the figures; 3.1 on the orange of before."""
    for colours in (pictures.COLOURS, overview.COLOURS):
        filled = {kind: colour for kind, colour in colours.items() if kind != "idle"}
        assert all(ratio(colour, "#ffffff") >= LEAST for colour in filled.values()), filled
    assert ratio("#ef6c00", "#ffffff") < 3.1
    for light, other in dark.LINES.items():
        if light in (pictures.DARK, "#616161"):
            assert min(ratio(other, dark.PAGE), ratio(other, dark.LINES["#eeeeee"])) >= LEAST


def on_page(colour: str, opacity: float) -> str:
    """A colour over the dark page."""
    both = zip(*(bytes.fromhex(one[1:]) for one in (colour, dark.PAGE)), strict=True)
    return "#" + "".join(f"{round(opacity * front + (1 - opacity) * back):02x}" for front, back in both)


def test_a_pale_box_can_be_seen_and_read_on_a_dark_page() -> None:
    for colour in {colour for kind, colour in pictures.COLOURS.items() if kind != "idle"}:
        for light, other in dark.PALE.items():
            assert ratio(on_page(colour, float(other)), dark.PAGE) >= 1.25
            assert ratio(on_page(colour, float(other)), dark.LINES[pictures.DARK]) >= LEAST
            assert ratio(on_page(colour, float(light)), dark.PAGE) < ratio(on_page(colour, float(other)), dark.PAGE)
    assert ratio(on_page(pictures.COLOURS["parameters"], 0.3), dark.PAGE) < 1.25, "the check can fail"


def test_a_dark_figure_has_the_shapes_and_words_of_the_light_one(site: Path) -> None:
    figures = site / "_generated/figures"
    names = [path for path in figures.glob("*.svg") if not path.name.endswith(".dark.svg")]
    assert len(names) > 50
    for path in names:
        light, other = (re.sub(r'#[0-9a-f]{6}|(?<=fill-opacity=")[\d.]+', "#", one.read_text(encoding="utf-8"))
                        for one in (path, path.with_suffix(".dark.svg")))  # fmt: skip
        assert light == other
        assert not set(dark.LINES) & set(re.findall(r"#[0-9a-f]{6}", path.with_suffix(".dark.svg").read_text()))


def test_a_faint_text_is_found(coloured: Browser, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("""<!doctype html><link rel="icon" href="data:,"><body style="background:#fff">
        <p style="color:#767676">enough</p><p style="color:#777777">too faint</p>
        <p style="color:#8a8a8a;font-size:30px">large</p><p style="background:#ef6c00;color:#fff">orange</p>
        <p style="color:#000;opacity:.4">half</p><p style="color:#00000080">glass</p>
        <p style="color:#fff;display:none">hidden</p>""")
    with serve(tmp_path) as base:
        found = faint(coloured, f"{base}/")
    assert [re.search('"(.+)"', one)[1] for one in found] == ["too faint", "orange", "half", "glass"]


def ratio(one: str, other: str) -> float:
    """The contrast of two colours, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
