"""One colour key for the whole site: pictures, charts, calculators and figures that move name the same thing by a colour."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generate.pictures import dark, overview, pictures
from docs.generate.tables import tables
from tests.docs.contrast import LEAST
from tests.docs.pages import LANGUAGES, ROOT
from tests.docs.test_schemes import ratio

ASSETS = ROOT / "docs/assets"
OF_THE_PICTURES = {"optimizer": "states", "buffers": "data"}  # names in tools.css -> in pictures.py, where they differ
NO_KIND = {"#fff", "#ffffff"}
HEX = re.compile(r"#[0-9a-fA-F]{3,8}\b")


def key(text: str, scheme: str = ":root") -> dict[str, str]:
    """Kind -> colour, in the first block of a scheme in tools.css."""
    block = text[text.index(scheme) :].partition("}")[0]
    return dict(re.findall(r"--kind-(\w+): (#\w{6})", block))


def unlike(styles: str) -> list[str]:
    """The kinds whose colour in a style sheet is not that of the pictures."""
    return [kind for kind, colour in key(styles).items() if colour != pictures.COLOURS[OF_THE_PICTURES.get(kind, kind)]]


def test_calculators_and_figures_have_the_colours_of_the_pictures() -> None:
    text = (ASSETS / "tools/tools.css").read_text(encoding="utf-8")
    assert not unlike(text) and set(key(text)) == set(tables.KEY) == set(key(text, "[data-md-color-scheme=slate]"))
    assert unlike(text.replace("--kind-gradients: #bf4f00", "--kind-gradients: #bf4f01", 1)) == ["gradients"]
    assert set(overview.COLOURS.values()) <= set(pictures.COLOURS.values())


def test_white_letters_can_be_read_on_every_colour_of_the_key() -> None:
    text = (ASSETS / "tools/tools.css").read_text(encoding="utf-8")
    light, slate = key(text), key(text, "[data-md-color-scheme=slate]")
    assert all(ratio(colour, "#ffffff") >= LEAST for kind, colour in light.items() if kind != "idle")
    lettered = ("parameters", "gradients", "optimizer", "activations")  # figures write on these
    assert all(ratio(slate[kind], "#ffffff") >= 4.0 for kind in lettered)
    assert all(ratio(slate[kind], dark.PAGE) >= 2.0 for kind in lettered)


def test_scripts_and_figures_name_kinds_and_no_colours() -> None:
    for path in [*ASSETS.rglob("*.js"), ASSETS / "figures/figures.css", ASSETS / "tools/chunks.css"]:
        assert not set(HEX.findall(path.read_text(encoding="utf-8"))) - NO_KIND, path.name
    for path in (ROOT / "docs/generate").rglob("*.py"):
        if path.name not in ("pictures.py", "dark.py"):
            found = set(HEX.findall(path.read_text(encoding="utf-8"))) - {"#ffffff", "#e0e0e0", *pictures.COLOURS.values()}
            assert not found, path.name


@pytest.mark.parametrize("language", LANGUAGES)
def test_home_shows_the_key(site: Path, language: str) -> None:
    text = (site / ("en" if language == "en" else "") / "index.html").read_text(encoding="utf-8")
    shown = text[text.index('class="tool-legend key"') :].partition("</p>")[0]
    assert re.findall(r"kind kind-(\w+)", shown) == list(tables.KEY)
