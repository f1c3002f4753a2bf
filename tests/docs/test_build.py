"""docs/generate/build.py: code by name, new lines, and an error for each missing word, name or fragment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def build():
    """docs/generate/build.py, with the modules that it imports."""
    from docs.generate import build

    return build


TEXT = '''import x

@decorated
class A:
    """Doc."""

    @property
    def size(self):
        return 1

def after(): pass
'''


def test_code_is_taken_by_name_with_its_decorators(build) -> None:
    assert build.source_of(TEXT, "A").splitlines()[0] == "@decorated"
    assert build.source_of(TEXT, "A.size") == "@property\ndef size(self):\n    return 1"
    assert build.source_of(TEXT, "after") == "def after(): pass"
    with pytest.raises(SystemExit, match="no A.length"):
        build.source_of(TEXT, "A.length")


def test_new_lines_are_those_that_the_parent_lacks(build) -> None:
    assert build.new_lines("a\nnew\n\nb\nchanged\n", "a\nb\nold\n") == [2, 5]
    assert build.new_lines("a\n", "") == []
    marked = build.fence("a\nb\nc\nd", "python", "x.py", [1, 2, 4])
    assert marked == '```python title="x.py" hl_lines="1-2 4"\na\nb\nc\nd\n```\n'
    assert build.fence("```\nx\n```", "text").startswith("````text\n")


def test_the_diff_of_a_chapter_is_that_of_the_files(build, tmp_path: Path) -> None:
    lines = build.diff_to_parent("07_patrickstar").splitlines()
    assert lines[0] == "--- chapters/00_single/train.py" and '-PARENT = None' in lines and '+PARENT = "00_single"' in lines
    with pytest.raises(SystemExit, match="no PARENT"):
        build.diff_to_parent("00_single")


@pytest.mark.parametrize("name", ["code/pstar/chunks/step.py/None.md", "en/none.md", "other/x.md"])
def test_a_fragment_that_is_not_known_is_an_error(build, name: str) -> None:
    with pytest.raises(SystemExit):
        build.fragment(name)


def test_a_word_without_chinese_is_an_error(build) -> None:
    assert build.Words("en")("no such word") == "no such word"
    with pytest.raises(SystemExit, match="no Chinese for 'no such word'"):
        build.Words("zh")("no such word")


def every_row_of_the_ablation() -> dict[str, Any]:
    """Data as benchmarks/ablation.py writes them, with all its variants: the committed run may have fewer."""
    sys.path.append(str(ROOT / "benchmarks"))
    from ablation_variants import VARIANTS

    rows = [{"chapter": one.chapter, "name": one.name, "nproc": 1 if one.one_process else 2, "speed_up": [1.0, 1.1],
             "same_curve": True, "losses": [2.0, 1.0]} for one in VARIANTS]  # fmt: skip
    return {"cores": 2, "rows": rows}


def test_no_chinese_word_is_left_over(build, site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some table uses every translation; one that the code no longer needs must be removed."""
    known = json.loads((ROOT / "docs/zh.json").read_text(encoding="utf-8"))
    used: set[str] = set()

    def words(english: str) -> str:
        used.add(english)
        return known[english]

    words.known = lambda english: words(english) if english in known else english  # names of rows
    monkeypatch.setattr(build.results, "ablation", every_row_of_the_ablation)
    build.results.drawn(words)
    for draw in (build.recorded_run.near, build.recorded_run.blocks):
        draw(words, build.recorded_run.recording())
    for page in ("which", "basics/speed"):
        build.uses.line(words, page)
    for name in build.tables.TABLES:
        build.tables.TABLES[name](words)
    for name in build.arithmetic.CHAPTERS:
        build.arithmetic.chapter(words, name)
    build.adaptation.chapter(words)
    build.pictures.drawn(words)
    build.captures.block(words, build.captures.BASE)
    build.timed.line(words, build.captures.BASE)
    build.api.reference(words)
    build.overview.picture(words)
    build.roofline.drawn(words)
    build.links.all_links(words)
    for chapter in build.texts.LESSONS:
        build.texts.wall(words, chapter)
        build.texts.prediction(words, chapter)
    for chapter in build.links.ROWS:
        build.links.times(words, chapter)
    for table in build.basics.TABLES.values():
        table(words)
    said = build.programs.outputs()    # stored by the build
    for name in build.collectives.KINDS:
        build.collectives.collective(words, name, said[name])
    build.collectives.barrier(words, said["barrier"])
    for name in build.wanted():
        if name.startswith("zh/results_all/"):
            result = ROOT / "benchmarks/results" / name.rpartition("/")[2]
            build.tables.results(words, result.stem, result.read_text(encoding="utf-8"))
        if name.startswith("zh/results/"):
            build.tables.result(words, (ROOT / "benchmarks" / name.removeprefix("zh/")).read_text(encoding="utf-8"))
    assert set(known) == used


def test_every_chapter_has_its_arithmetic(build) -> None:
    """Each chapter has rows in both languages. A line's totals are the sums of the cells before them."""
    for name in build.arithmetic.CHAPTERS:
        english = build.fragment(f"en/arithmetic/{name}.md")
        assert english.count("|") == build.fragment(f"zh/arithmetic/{name}.md").count("|")
        assert "124,439,808" in english and "—" not in english.split("in all, a rank")[0]
    with pytest.raises(SystemExit, match="no rows for 99_none"):
        build.fragment("en/arithmetic/99_none.md")
    assert [build.arithmetic.bytes_text(n) for n in (0, 5 << 20, 50 << 20, 1023 << 20, 3 << 29)] == [
        "0", "5.00 MiB", "50.0 MiB", "1,023 MiB", "1.50 GiB"]  # fmt: skip


def test_the_table_of_methods_adds_up_and_full_training_has_sixteen_bytes_a_parameter(build) -> None:
    english = build.fragment("en/arithmetic/08_param_efficient.md")
    assert english.count("|") == build.fragment("zh/arithmetic/08_param_efficient.md").count("|")
    config, row = build.adaptation.configs()["small"], SimpleNamespace(method="full", count=124_439_808)
    whole = build.adaptation.weight_bytes(config, row) + (4 + 8) * row.count
    assert whole == 16 * 124_439_808 and f"**{build.arithmetic.bytes_text(whole)}**" in english
    job = {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257, "rank": 8, "bottleneck": 64,
           "virtual_tokens": 16, "modules": "all", "batch": 8, "seq_len": 1024, "recompute": "none"}  # fmt: skip
    methods = {row["name"]: row["together"] for row in build.adaptation.calculated(job)["methods"]}
    assert methods["full"] == whole and methods["qlora --bits 4"] < 0.3 * whole


def test_every_entry_of_the_repository_has_its_purpose(build) -> None:
    """The table has exactly the top-level entries that git tracks, except the READMEs: they are the page."""
    done = subprocess.run(["git", "ls-tree", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    entries = [line.split("\t") for line in done.stdout.splitlines()]
    tracked = {name + ("/" if " tree " in kind else "") for kind, name in entries if not name.startswith("README")}
    assert tracked == set(build.tables.TREE)
    assert all((ROOT / path).exists() for path in build.tables.TREE)


def test_every_chapter_is_in_the_course(build) -> None:
    assert {path.parent.name for path in ROOT.glob("chapters/*/train.py")} <= set(build.tables.COURSE)


def test_the_profile_is_kept_until_a_source_changes(build, site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = build.measured
    ran: list[str] = []

    def call(command: list[str], variables: dict[str, str]) -> str:
        ran.append(" ".join(command))
        raise SystemExit("would run")

    monkeypatch.setattr(measured, "call", call)
    measured.profile()
    assert not ran
    monkeypatch.setattr(measured, "SOURCES", (*measured.SOURCES, "README.md"))
    with pytest.raises(SystemExit, match="would run"):
        measured.profile()
    assert measured.PROFILED in ran[0]
