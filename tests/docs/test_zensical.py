"""The same pages built by Zensical: both languages build strictly, load only existing files, and have the same headings."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.pages import ROOT

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def built(shell, site: Path) -> Iterator[Path]:
    """site/zensical, built with a user's command: Zensical writes only inside the checkout."""
    pytest.importorskip("zensical")
    (ROOT / "site").mkdir(exist_ok=True)
    with (ROOT / "site/.zensical.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second test run in this checkout would write to the same folder
        said = shell("bash docs/zensical.sh")
        assert said.count("No issues found") == 2, said
        yield ROOT / "site/zensical"


def pages_of(built: Path, language: str) -> dict[str, str]:
    base = built / language
    return {path.relative_to(base).as_posix(): path.read_text(encoding="utf-8") for path in base.rglob("index.html")}


def test_both_languages_are_whole(built: Path, site: Path) -> None:
    chinese, english = (pages_of(built, language) for language in pages.LANGUAGES)
    assert set(english) == set(chinese) == set(pages.pages_of(site, "en")) and not pages.differences(chinese, english)
    assert pages.Page(chinese["index.html"]).language == "zh" and pages.Page(english["index.html"]).language == "en"
    for language in pages.LANGUAGES:
        for page in (built / language).rglob("index.html"):
            assert not pages.unloadable(page, built)


def test_code_and_generated_fragments_are_on_the_pages(built: Path) -> None:
    last = pages_of(built, "en")["chapters/07_patrickstar/index.html"]
    assert "initialize_engine" in last and "--near-budget" in last and "hll" in last, "new lines are marked"


def test_a_missing_fragment_ends_the_build(built: Path, shell, tmp_path: Path) -> None:
    (tmp_path / "docs/en").mkdir(parents=True)
    (tmp_path / "docs/en/index.md").write_text('# Home\n\n--8<-- "none.md"\n')
    for name in ("mkdocs.yml", "zensical.en.yml"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    assert "none.md" in shell('"$PYTHON" -m zensical build --strict -f zensical.en.yml', cwd=tmp_path, status=1)
