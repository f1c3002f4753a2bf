"""docs/generate/pictures: every chapter has two pictures, readable on a phone; text that does not fit is an error."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from tests.docs.pages import ROOT

PHONE = 358  # width of a picture in pixels, on a phone of 390
SMALLEST = 11


@pytest.fixture(scope="module")
def build():
    from docs.generate import build

    return build


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_chapter_has_two_pictures_with_letters_that_a_phone_shows(build, language: str) -> None:
    drawn = build.pictures.drawn(build.Words(language))
    written = {path.parent.name for path in ROOT.glob("chapters/*/train.py")}
    more = {"05_model_parallel_tensor", "08_param_efficient_decision"}
    assert set(drawn) == written | {f"{name}_time" for name in written} | more
    for name, svg in drawn.items():
        root = ElementTree.fromstring(svg)
        _, _, width, _ = map(float, root.get("viewBox").split())
        sizes = {float(size) for size in re.findall(r'font-size="([\d.]+)"', svg)}
        assert min(sizes) * PHONE / width >= SMALLEST, name
        if language == "zh":
            said = "".join(root.itertext())
            assert re.search(r"[\u4e00-\u9fff]", said) and not re.search(r"forward|backward|messages|gradients", said), name


def test_the_pictures_follow_the_data_of_the_repository(build) -> None:
    from docs.generate.pictures import data
    from gpt2_chinese.model.config import PRESETS

    sizes = [sum(bucket) for bucket in data.buckets()]
    assert sum(sizes) == sum(p.numel() for p in data.model().parameters()) and len(sizes) > 2
    layers = PRESETS["tiny"].n_layer
    drawn = build.pictures.drawn(build.Words("en"))
    assert f"all-reduce of {len(sizes)} buckets" in " ".join(ElementTree.fromstring(drawn["02_ddp"]).itertext())
    assert f"h.{layers - 1}" in drawn["05_model_parallel"]
    boxes = [int(n) for n in re.findall(r">(\d)</text>", drawn["05_model_parallel_time"])]
    assert boxes.count(7) == 2 * 2 * 4, "forward and backward of micro-batch 7 on four ranks, in two schedules with numbers"


def test_the_slots_of_the_engine_hold_every_needed_chunk(build) -> None:
    from docs.generate.pictures import data
    from pstar.schedule.schedule import count_loads

    order = [*range(6), *reversed(range(6))]
    history, loads = data.slots_of(order, 3)
    assert all(chunk in slots for chunk, slots in zip(order, history, strict=True))
    assert len(loads) == count_loads(order, 3, "next_use")


def shared_swatches(build, svg: str) -> list[list[str]]:
    """The names in a legend that share one swatch, its shape and colour: a computation and its result have one colour."""
    named: dict[tuple[str, str], list[str]] = {}
    meanings = {build.pictures.MEANING[kind]: kind for kind in build.pictures.MEANING}
    meanings |= {f"message: {name}": kind for name, kind in meanings.items()}
    for shape, colour, name in re.findall(r'<(rect|polygon) [^>]*fill="(#\w+)"[^>]*/>\n<text [^>]*>([^<]*)</text>', svg):
        if meanings.get(name) and build.pictures.COLOURS[meanings[name]] == colour:
            named.setdefault((shape, colour), []).append(name)
    return [names for names in named.values() if len(set(names)) > 1]


def test_each_swatch_of_a_legend_has_one_name(build) -> None:
    drawn = build.pictures.drawn(build.Words("en"))
    assert not {name: shared for name, svg in drawn.items() if (shared := shared_swatches(build, svg))}
    assert ">message: gradients<" in drawn["02_ddp_time"] and ">message: gradients<" in drawn["03_horovod_time"]
    drawing = build.pictures.Drawing(str, "test")
    drawing.box(0, 0, 60, 20, "backward")
    drawing.box(0, 0, 60, 20, "gradients")
    drawing.legend()
    assert shared_swatches(build, drawing.svg()) == [["gradients", "backward"]], "the check can fail"


def test_a_text_that_does_not_fit_is_an_error(build) -> None:
    drawing = build.pictures.Drawing(str, "test")
    drawing.box(0, 0, 60, 20, "gradients", "short")
    with pytest.raises(ValueError, match="does not fit"):
        drawing.box(0, 0, 20, 20, "gradients", "much too long")
    with pytest.raises(ValueError, match="too narrow"):
        drawing.text(400, 10, "beyond the right edge")


def test_chinese_lines_do_not_begin_with_a_stop(build) -> None:
    wrapped = build.pictures.wrapped
    lines = wrapped("权重相同、梯度相同，更新也就相同。", 14 * 4)
    assert "".join(lines) == "权重相同、梯度相同，更新也就相同。" and not any(line[0] in "，。、" for line in lines)
    assert wrapped("one two three", 60) == ["one two", "three"]
