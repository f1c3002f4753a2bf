"""The built site: a strict build, complete, with the same pages and headings in both languages, and only its own files."""

from __future__ import annotations

import functools
import gzip
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.pages import ROOT

LARGEST = 600_000  # bytes of a page with all that it loads, as sent, without the search index
WRITTEN = {path.relative_to(ROOT / "docs/zh").with_suffix("").as_posix() for path in ROOT.glob("docs/zh/**/*.md")}


def test_both_languages_have_the_same_pages_and_headings(site: Path) -> None:
    chinese, english = (pages.pages_of(site, language) for language in pages.LANGUAGES)
    assert set(chinese) == {f"{name.removesuffix('index').rstrip('/')}/index.html".lstrip("/") for name in WRITTEN}
    assert not pages.differences(chinese, english)
    assert pages.Page(chinese["index.html"]).language == "zh" and pages.Page(english["index.html"]).language == "en"
    assert len(pages.Page(english["engine/index.html"]).headings) > 5, "headings are seen"


def test_every_page_loads_only_files_of_the_site(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not pages.unloadable(page, site)


def test_no_path_of_this_machine_is_on_a_page(site: Path) -> None:
    for page in [*site.rglob("*.html"), *site.rglob("search_index.json")]:
        text = page.read_text(encoding="utf-8")
        for path in {str(ROOT), sys.prefix, os.path.expanduser("~/"), "/tmp/"} - {"/usr", "/"}:
            assert path not in text, f"{page.relative_to(site)} has {path}"


def test_only_pages_and_the_files_they_need_are_published(site: Path) -> None:
    from docs.generate import build

    kinds = {path.suffix for path in site.rglob("*") if path.is_file()}
    assert not kinds & {".py", ".sh", ".md"} and not (site / "zh.json").exists() and not (site / "zh").exists()
    courses = [path.parent.name for path in ROOT.glob("chapters/*/train.py")]
    charts = ["adam", "ablation_speedup", "blocks", "curves_all", "loss_00_07", "near", "overview", "quantization", "quick",
              "quick_bytes", "staleness", *(f"curve_{name}" for name in courses)]  # fmt: skip
    if build.results.drawn(build.Words("en")).get("ablation_loss"):
        charts.append("ablation_loss")
    drawn = {f"{name}_{lang}.svg" for name in charts for lang in ("en", "zh")}
    drawn |= {f"{name}{kind}_{lang}.svg" for name in courses for kind in ("", "_time") for lang in ("en", "zh")}
    pages_of_basics = "".join(path.read_text() for path in ROOT.glob("docs/en/basics/*.md"))
    drawn |= {f"basics_{name}_{lang}.svg" for name in re.findall(r"/basics_(\w+)_en\.svg", pages_of_basics)
              for lang in ("en", "zh")}
    drawn |= {f"{name}_{lang}.svg" for name in ("05_model_parallel_tensor", "08_param_efficient_decision")
              for lang in ("en", "zh")}  # fmt: skip
    drawn |= {name.replace(".svg", ".dark.svg") for name in drawn if name.endswith(".svg")}
    assert {path.name for path in (site / "_generated").rglob("*") if path.is_file()} == drawn


@functools.cache
def as_sent(path: Path) -> int:
    """The bytes of a file as servers send it, compressed."""
    return min(len(gzip.compress(path.read_bytes(), 6)), path.stat().st_size)


def heavy(site: Path) -> dict[str, int]:
    """The pages that load more than LARGEST bytes, without the search: page -> bytes."""
    found = {}
    for page in site.rglob("index.html"):
        own = [re.split("[?#]", name)[0] for name in pages.Page(page.read_text(encoding="utf-8")).loads]
        files = {(page.parent / name).resolve() for name in own if not name.startswith("data:")}
        # A reader's browser loads the figures of one scheme.
        shown = {path for path in files if ".dark." not in path.name and path.parent.name != "search"}
        weight = sum(as_sent(path) for path in [page, *shown])
        if weight > LARGEST:
            found[page.relative_to(site).as_posix()] = weight
    return found


def test_no_page_is_heavier_than_600_kb(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not heavy(site)
    monkeypatch.setattr("tests.docs.test_site.LARGEST", 100_000)
    assert heavy(site), "weights are counted"


def test_pages_show_the_content_of_the_files(site: Path) -> None:
    english = pages.pages_of(site, "en")
    last = english["chapters/07_patrickstar/index.html"]
    assert "initialize_engine" in last and "--near-budget" in last and 'class="hll"' in last, "new lines are marked"
    assert 'class="hll"' not in english["chapters/00_single/index.html"], "the first chapter has no parent"
    assert "eviction_policy" in english["engine/configuration/index.html"]


def test_the_site_is_built_with_a_pinned_generator_of_the_line_that_works() -> None:
    """mkdocs 2 has no plugins, and the pages need the theme, i18n and snippets."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert pins["mkdocs"].startswith("1.") and {"mkdocs-material", "mkdocs-static-i18n", "pymdown-extensions"} <= set(pins)
    docs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    assert next(one for one in docs if one.startswith("mkdocs>")).endswith("<2")
    for name in ("build.sh", "serve.sh"):
        text = (ROOT / "docs" / name).read_text()
        assert "NO_MKDOCS_2_WARNING=1" in text and 'scripts/setup.sh" docs' in text and "-m docs.generate" in text
    assert "--strict" in (ROOT / "docs/build.sh").read_text()


# ---- the checks can fail


@pytest.fixture(scope="module")
def copy(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that mkdocs reads, for tests that break it."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", folder)
    return folder


@pytest.mark.parametrize("wrong", [
    {"[gone](chapters/99_none.md)": "99_none.md", "[gone](engine/index.md#no-such-heading)": "no-such-heading",
     "![gone](../_generated/figures/none.png)": "none.png"},
    {'--8<-- "code/none.md"': "none.md"},
], ids=["links", "fragment"])  # fmt: skip
def test_a_dead_link_anchor_image_or_fragment_ends_the_build(copy: Path, shell, wrong: dict[str, str]) -> None:
    page = copy / "docs/en/index.md"
    before = page.read_text()
    page.write_text("\n\n".join([before, *wrong]))
    try:
        said = shell('"$PYTHON" -m mkdocs build --strict -d broken', cwd=copy, status=1)
    finally:
        page.write_text(before)
    assert all(complaint in said for complaint in wrong.values()), said


def test_a_missing_page_and_another_heading_are_found() -> None:
    chinese = {"index.html": "<h1 id=a>x</h1><h2 id=b>x</h2>", "start/index.html": "<h1 id=s>x</h1>"}
    assert not pages.differences(chinese, dict(chinese))
    assert pages.differences(chinese, {"index.html": chinese["index.html"]}) == ["start/index.html: in one language only"]
    other = {**chinese, "index.html": "<h1 id=a>x</h1><h2 id=c>x</h2>"}
    assert pages.differences(chinese, other) == ["index.html: headings ['h2 b', 'h2 c']"]
    moved = {**chinese, "index.html": "<h2 id=b>x</h2><h1 id=a>x</h1>"}
    assert pages.differences(chinese, moved) == ["index.html: headings in another order"]


def test_a_file_that_a_page_cannot_load_is_found(tmp_path: Path) -> None:
    page = tmp_path / "index.html"
    page.write_text('<img src="a.png"><script src="https://cdn.example.org/x.js"></script><img src="data:,x">')
    assert pages.unloadable(page, tmp_path) == [
        "index.html loads a.png, which is not there",
        "index.html loads https://cdn.example.org/x.js from elsewhere",
    ]
