"""The quick start of chapter 07: it runs, its table says what was measured, and wrong flags are one line."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpt2_chinese.errors import UserError
from tests.chapters.program import fork
from tests.chapters.technique import technique

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def quick() -> Any:
    return technique("07_patrickstar", "quick")


@pytest.fixture(scope="module")
def quick_page() -> Any:
    return technique("07_patrickstar", "quick_page")


def test_it_runs_and_its_numbers_are_those_of_the_settings(quick: Any, quick_page: Any, tmp_path: Path) -> None:
    """Bytes, not times: with everything near nothing is copied, with a smaller budget near never exceeds it."""
    program = str(ROOT / "chapters/07_patrickstar/quick.py")
    said = fork([sys.executable, program, "--tiny", "--rounds", "1", "--device", "cpu", "--output-dir", str(tmp_path / "q")])
    text = (tmp_path / "q/quick.md").read_text(encoding="utf-8")
    assert text in said and "left out" not in said and not list((tmp_path / "q").glob("*tmp*")), "the disk's folder is gone"
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")]
    rows = {row[0].strip("`"): dict(zip(quick_page.COLUMNS, row, strict=True)) for row in cells}
    assert list(rows) == [variant.name for variant in quick.variants(quick.TINY, "", "cpu")]
    base, near = rows[quick.BASE], rows["near_budget 100%"]
    sizes = [key for key in quick_page.COLUMNS if key.startswith("MB")]
    number = {name: {key: float(row[key]) for key in sizes} for name, row in rows.items()}
    assert base["step time"] == "1.00" and base["middle half"] == "1.00 to 1.00" and near["waits s"] == "0.000"
    assert number["near_budget 100%"]["MB in"] == number["near_budget 100%"]["MB out"] == 0 < number[quick.BASE]["MB in"]
    small = [name for name in rows if name != "near_budget 100%" and not name.startswith("near 60%")]
    whole = number["near_budget 100%"]["MB near, chunks"]
    assert all(number[name]["MB near, chunks"] <= 0.21 * whole for name in small), "20 %, and a rounding to 0.1 MB"
    for name in ("recomputation", "offload_activations"):
        assert number[name]["MB near, activations"] < number[quick.BASE]["MB near, activations"]
    assert number["offload_activations"]["MB out"] > number[quick.BASE]["MB out"]
    assert number["tiling, smaller chunks"]["MB near, at least"] < number[quick.BASE]["MB near, at least"]
    assert [name for name in rows if number[name]["MB disk"] > 0] == ["disk_path, far_budget min"]
    assert {row["losses"] for name, row in rows.items() if name != "state_bits 8"} == {"same bits"}
    assert rows["state_bits 8"]["losses"].startswith("within ")


def told(seconds: float, **more: float) -> dict[str, float]:
    return {"seconds": seconds, "far_to_near_bytes": 2e6, "near_to_far_bytes": 1e6, "far_to_disk_bytes": 3e6,
            "disk_bytes": 9e6, "copy_wait_s": 0.25} | more


def test_a_ratio_compares_the_same_round(quick_page: Any) -> None:
    """By hand: 2/1, 3/2, 9/3 have the median 2 and the quartiles 1.75 and 2.5; a slow round slows both."""
    facts = {"gap": 0.0, "chunks near": 4e6, "activations": 5e6, "least near": 6e6}
    base = SimpleNamespace(name="a", about="", rounds=[told(1), told(2), told(3)], facts=facts)
    other = SimpleNamespace(name="b", about="", rounds=[told(2), told(3), told(9)], facts=facts | {"gap": 2e-4})
    lines = quick_page.table([quick_page.row(each, base) for each in (base, other)])
    assert lines[3] == ("| `b` | 2.00 | 1.75 to 2.50 | 3.000 | 2.0 | 1.0 | 3.0 | 0.250 | 4.0 | 5.0 | 6.0 | within 2e-04 |")
    assert lines[2].startswith("| `a` | 1.00 | 1.00 to 1.00 | 2.000 |") and lines[2].endswith("| same bits |")
    assert len({line.count("|") for line in lines}) == 1


def test_the_figure_has_three_panels(quick_page: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    facts = {"gap": 0.0, "chunks near": 4e6, "activations": 5e6, "least near": 6e6}
    found = [SimpleNamespace(name=name, about="", rounds=[told(1), told(2)], facts=facts) for name in "ab"]
    said = quick_page.write(tmp_path, found, [("work", "w"), ("versions", "v"), ("date", "d")])
    assert imread(tmp_path / "quick.png").shape[1] == 1320 and "quick.png" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quick.md", "quick.png"]


@pytest.mark.parametrize("flags, line", [
    (["--minutes", "0"], "--minutes 0: give a number above 0"), (["--minutes", "nan"], "--minutes nan: give a number"),
    (["--rounds", "0"], "--rounds 0: give at least 1"), (["--round", "2"], "unrecognized arguments: --round"),
    (["--output-dir", "/proc/x"], "--output-dir /proc/x: cannot be written: "), (["--device", "tpu"], "--device: invalid"),
])
def test_a_wrong_flag_is_one_line(quick: Any, flags: list[str], line: str) -> None:
    with pytest.raises(UserError) as error:
        quick.parse(flags)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_a_near_budget_that_cannot_work_is_one_line(quick: Any, tmp_path: Path) -> None:
    for near, line in (("1KiB", "--near 1KiB: near budget 1KiB (1024 bytes) is too small"),
                       ("100%", "--near 100%: nothing is copied, because everything fits"),
                       ("lots", "--near lots: 'lots' is no amount of memory")):
        with pytest.raises(UserError) as error:
            quick.main(["--tiny", "--near", near, "--device", "cpu", "--output-dir", str(tmp_path)])
        assert str(error.value).startswith(line)


def test_it_says_what_this_machine_lacks(quick: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pstar.kernels import cpu

    assert any(line.startswith("no GPU: ") for line in quick.fallen_away("cpu"))
    monkeypatch.setattr(cpu, "paths", list)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [line.split(":")[0] for line in quick.fallen_away("cuda")] == ["no C++ compiler", "no matplotlib"]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_explains_every_row(quick: Any, language: str) -> None:
    page = (ROOT / f"docs/{language}/chapters/07_patrickstar.md").read_text(encoding="utf-8")
    assert not [each.name for each in quick.variants(quick.TINY, "", "cpu") if f"`{each.name}`" not in page]
