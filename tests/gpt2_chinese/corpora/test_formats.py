"""Formats of corpora: a golden case for each, invented after the examples of the corpora's own pages; and cleaning."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from gpt2_chinese.corpora import formats
from gpt2_chinese.corpora.cleaning import Seen, clean, content_hash, is_validation, seen_number, split_long
from gpt2_chinese.corpora.detect import Head, detect, layout, take_head
from gpt2_chinese.corpora.formats import Item, block_items, decoded, json_lines, json_values, line_items, paragraph_items
from gpt2_chinese.corpora.records import BadRecord, Choices, LeftOut, record_texts
from gpt2_chinese.corpus import read_paragraphs
from gpt2_chinese.errors import UserError
from gpt2_chinese.settings import ROOT
from tests.limits import peak_bytes

WIKI = {"id": "7", "url": "https://example.invalid/7", "title": "纸船", "text": "纸船\n\n纸船用纸折成。\n\n孩子们常放。"}
NEWS = {"news_id": "1001", "keywords": "灯会", "title": "灯会开幕", "desc": "灯会周五开幕。", "source": "示例报",
        "time": "05-01 09:00", "content": "灯会周五晚开幕，展出三百盏灯。"}  # fmt: skip
BAIKE = {"qid": "q1", "category": "家", "title": "怎样晾干雨伞？ ", "desc": "", "answer": "先甩去水珠。\r\r再撑开晾着。"}
WEBTEXT = {"qid": 9, "title": "为什么猫喜欢纸箱？", "desc": "家里的猫<br>总钻纸箱。", "topic": "宠物", "star": 12,
           "content": "<p>纸箱让猫觉得安全 &amp; 暖。</p>", "answer_id": 77, "answerer_tags": "养猫@生活"}  # fmt: skip
PAIR = {"english": "The lamp is on.", "chinese": "灯亮着。"}
TASK = {"label": "108", "sentence": "河岸灯会周五开幕", "keywords": ""}
TASK_PAIR = {"sentence1": "灯亮着", "sentence2": "灯没有灭", "label": "1"}

RECORDS = {
    "wiki2019zh": (WIKI, ["纸船\n纸船用纸折成。\n孩子们常放。"]),
    "news2016zh": (NEWS, ["灯会开幕\n灯会周五晚开幕，展出三百盏灯。"]),
    "baike2018qa": (BAIKE, ["怎样晾干雨伞？\n先甩去水珠。\n再撑开晾着。"]),
    "webtext2019zh": (WEBTEXT, ["为什么猫喜欢纸箱？\n家里的猫\n总钻纸箱。\n纸箱让猫觉得安全 & 暖。"]),
    "translation2019zh": (PAIR, ["灯亮着。"]),
    "clue-task": (TASK, ["河岸灯会周五开幕"]),
    "json-lines": ({"text": "纸船。", "label": 3}, ["纸船。"]),
}
CLUE = "河岸灯会周五开幕。\n展出三百盏手工灯。\n\n纸船是用纸折成的小船。\n"
UER = "河岸灯会周五开幕。展出三百盏手工灯。\n纸船是用纸折成的小船。\n"
NOVEL = "　　第一段在这里，\n折成了两行。\n　　第二段。\n"


def texts(items: Iterator[Item]) -> list:
    return [item.value for item in items if not item.problem]


def dumps(record) -> str:
    return json.dumps(record, ensure_ascii=False)


# ---- records


@pytest.mark.parametrize("form", RECORDS)
def test_each_format_gives_its_text(form: str) -> None:
    record, expected = RECORDS[form]
    assert record_texts(form, record, Choices()) == expected


def test_details_of_records() -> None:
    plain = Choices()
    assert record_texts("wiki2019zh", WIKI | {"title": "小船"}, plain)[0].startswith("小船\n纸船\n")
    assert record_texts("baike2018qa", BAIKE | {"desc": "雨伞是绸面的"}, plain)[0].split("\n")[1] == "雨伞是绸面的"
    assert record_texts("baike2018qa", BAIKE | {"desc": "怎样晾干雨伞？"}, plain) == RECORDS["baike2018qa"][1]
    assert record_texts("translation2019zh", PAIR, Choices(both=True)) == ["灯亮着。\nThe lamp is on."]
    assert record_texts("clue-task", TASK_PAIR, plain) == ["灯亮着", "灯没有灭"]
    assert record_texts("clue-task", {"text": "一"}, plain) == ["一"]
    assert record_texts("json-lines", {"body": "甲", "text": "乙"}, Choices(field="body")) == ["甲"]
    kept = record_texts("webtext2019zh", WEBTEXT | {"content": "若 a<b 且 c>d，写 &lt;b&gt;"}, plain)[0]
    assert kept.endswith("若 a<b 且 c>d，写 <b>")
    with pytest.raises(LeftOut, match="--star"):
        record_texts("webtext2019zh", WEBTEXT | {"star": 2}, plain)
    assert record_texts("webtext2019zh", WEBTEXT | {"star": "2"}, Choices(star=2))


@pytest.mark.parametrize(
    "form, record, said",
    [
        ("wiki2019zh", {"title": "纸船"}, 'no field "text"'),
        ("news2016zh", NEWS | {"content": None}, 'no field "content"'),
        ("news2016zh", NEWS | {"content": 3}, '"content" that is no text'),
        ("webtext2019zh", WEBTEXT | {"star": "many"}, '"star" that is no number'),
        ("webtext2019zh", WEBTEXT | {"star": float("inf")}, '"star" that is no number'),
        ("clue-task", {"sentence1": "一"}, 'no field "sentence2"'),
        ("wiki2019zh", ["纸船"], "is no object"),
        ("array-json", 3, "neither a string nor an object"),
    ],
)
def test_a_record_without_its_fields_is_named(form: str, record, said: str) -> None:
    with pytest.raises(BadRecord) as error:
        record_texts(form, record, Choices())
    assert said in str(error.value)


# ---- detection


@pytest.mark.parametrize("form", RECORDS)
@pytest.mark.parametrize("arrangement", ["lines", "array", "objects", "pretty"])
def test_formats_are_detected_by_their_fields_in_every_layout(form: str, arrangement: str) -> None:
    record, expected = RECORDS[form]
    text = {
        "lines": "\n".join([dumps(record)] * 3) + "\n",
        "array": dumps([record] * 3),
        "objects": dumps(record) * 3,
        "pretty": "\n".join([json.dumps(record, ensure_ascii=False, indent=2)] * 3),
    }[arrangement]
    head = Head(text, True)
    assert detect(head, True, "x").format == form
    assert layout(head) == arrangement.replace("pretty", "objects")
    items = list(json_lines([text]) if arrangement == "lines" else json_values([text], "x"))
    assert [record_texts(form, item.value, Choices()) for item in items] == [expected] * 3


@pytest.mark.parametrize(
    "text, form, arrangement",
    [
        ('["一段。", "二段。"]', "array-json", "array"),
        ("\n [\n]", "array-json", "array"),
        ('"一段。"\n"二段。"\n', "json-lines", "lines"),
        (CLUE, "clue-text", ""),
        (UER, "lines", ""),
        (NOVEL, "paragraphs", ""),
        ('"你好。"他说。\n"再见。"她答。\n', "lines", ""),
        ("[注1] 这是一条注释。\n正文。\n", "lines", ""),
        ("{花括号}开头的一行。\n第二行。\n", "lines", ""),
        (dumps(WIKI)[:40] + "\n" + "\n".join([dumps(WIKI)] * 4), "wiki2019zh", "lines"),
    ],
)
def test_array_lines_and_plain_text_are_told_apart(text: str, form: str, arrangement: str) -> None:
    head = Head(text, True)
    assert detect(head, True, "x").format == form and layout(head) == arrangement


def test_detection_looks_at_fifty_lines_and_a_blank_text_decides_nothing() -> None:
    head, pieces = take_head(iter(["行\n" * 30] * 10))
    assert not head.whole and head.text.count("\n") < 100
    assert "".join(pieces) == "行\n" * 300
    assert detect(head, True, "x").format == "lines"
    assert detect(Head(" \n\n", True), True, "x") is None
    late_blank = "行\n" * 60 + "\n" + "行\n"
    assert detect(Head(late_blank, True), False, "x").format != "file"
    assert detect(Head("题目\n正文。\n", True), False, "x").format == "file"
    assert detect(Head(CLUE, True), False, "x").format == "clue-text"


def test_unknown_fields_are_refused_with_their_names() -> None:
    with pytest.raises(UserError, match="x.json is JSON of no known format .*body, lang.*--field"):
        detect(Head('{"body": "一", "lang": "zh"}\n', True), True, "x.json")


# ---- texts


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_texts_come_the_same_in_pieces_of_any_size(size: int) -> None:
    def cut(text: str) -> list[str]:
        return [text[i : i + size] for i in range(0, len(text), size)]

    assert texts(block_items(cut(CLUE))) == ["河岸灯会周五开幕。\n展出三百盏手工灯。", "纸船是用纸折成的小船。"]
    assert texts(block_items(cut(CLUE), "")) == ["河岸灯会周五开幕。展出三百盏手工灯。", "纸船是用纸折成的小船。"]
    assert texts(line_items(cut(UER))) == UER.split("\n")[:2]
    assert texts(line_items(cut("\n" + CLUE))) == [line for line in CLUE.split("\n") if line]
    assert texts(paragraph_items(cut(NOVEL))) == ["第一段在这里，折成了两行。", "第二段。"]
    records = [WIKI, NEWS, "串\n\\\"尾", BAIKE]
    for text in (json.dumps(records), json.dumps(records, indent=1, ensure_ascii=False), dumps(records) + " \n"):
        assert texts(json_values(cut("\n" + text), "x")) == records
    assert texts(json_values(cut("".join(map(dumps, records))), "x")) == records
    lines = "\n".join(map(dumps, records)) + ",\n\n"
    assert texts(json_lines(cut(lines))) == records


def test_places_are_lines_and_items() -> None:
    assert [item.where for item in block_items([CLUE])] == ["1", "4"]
    assert [item.where for item in json_lines(['"一"\n\n"二"\n'])] == ["1", "3"]
    assert [item.where for item in json_values(['[\n"一",\n\n"二"]'], "x")] == ["2, item 1", "4, item 2"]


@pytest.mark.parametrize("bad", ['{"text": tru}', '{"text" "一"}', '{"text": "没有引号}', '{"text": "\\x"}', "[" * 100_000])
@pytest.mark.parametrize("arrangement", ["lines", "array", "objects"])
def test_after_a_bad_record_the_next_line_is_read(bad: str, arrangement: str) -> None:
    good = [dumps({"text": f"第{i}段"}) for i in range(4)]
    lines = [good[0], good[1], bad, good[2], good[3]]
    text = "[\n" + ",\n".join(lines) + "\n]" if arrangement == "array" else "\n".join(lines)
    found = list(json_lines([text]) if arrangement == "lines" else json_values([text], "x"))
    assert [item.value["text"] for item in found if not item.problem] == [f"第{i}段" for i in range(4)]
    (item,) = [item for item in found if item.problem]
    assert item.where.startswith("4" if arrangement == "array" else "3") and item.value == bad[:30] or arrangement != "lines"


@pytest.mark.parametrize(
    "text, said",
    [
        ('["一", "二"', "x.json:1, item 3 is missing: the array is cut short"),
        ('["一", "二', "x.json:1, item 2 is no JSON"),
        ('["一", tru, "三"]', "x.json:1, item 2 is no JSON .* nothing after it can be read: 'tru, \"三\"]'"),
        ('["一"] ["二"]', "x.json:1: something follows the array"),
    ],
)
def test_an_array_that_cannot_be_read_on_is_an_error(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        list(json_values([text], "x.json"))


def test_items_of_any_length_are_passed_over_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "ITEM_CHARS", 1000)
    long = ["长" * 400] * 5
    assert [bool(i.problem) for i in line_items(["一\n", *long, "\n二\n", *long])] == [False, True, False, True]
    blocks = ["一\n\n", *[part + "\n" for part in long], "\n二\n"]
    assert [bool(i.problem) for i in block_items(blocks)] == [False, True, False]
    assert [bool(i.problem) for i in formats.whole_item(long)] == [True]
    pieces = ['[\n"一",\n"', *long, '",\n"二"\n]']
    assert [bool(i.problem) for i in json_values(pieces, "x")] == [False, True, False]


@pytest.mark.parametrize("form", ["lines", "clue-text", "json-lines", "array", "one endless line"])
def test_a_stream_is_never_held(form: str) -> None:
    """20 MB and more go by while a few are in memory, even where nothing in them ends a line."""

    def pieces(number: int) -> Iterator[str]:
        yield "[" if form == "array" else ""
        item = "一段文字。" * 40
        sentence = {"json-lines": f'"{item}"\n', "array": f'"{item}", ', "clue-text": f"{item}\n\n"}.get(form, item)
        for _ in range(number):
            yield sentence * 200 + ("\n" if form == "lines" else "")
        yield '"尾"]' if form == "array" else ""

    read = {"lines": line_items, "clue-text": block_items, "json-lines": json_lines,
            "array": lambda given: json_values(given, "x"), "one endless line": line_items}[form]  # fmt: skip
    numbers = []
    # characters above Latin-1 take two bytes each; the endless line is held up to ITEM_CHARS
    peak = peak_bytes(lambda: numbers.append(sum(1 for _ in read(pieces(300)))))
    assert min(numbers) >= 1 and peak < (70e6 if form == "one endless line" else 3e6), f"{peak / 1e6:.1f} MB, {numbers}"


def test_encodings_and_marks() -> None:
    def read(raw: bytes, encoding: str = "utf-8") -> str:
        chunks = iter([raw[i : i + 1] for i in range(len(raw))] + [b""])
        return "".join(decoded(lambda size: next(chunks), encoding))

    assert read("\ufeff一段。".encode()) == "一段。"
    for encoding in ("gb18030", "big5", "utf-16"):
        assert read("一段。".encode(encoding), encoding) == "一段。"
    assert read("一".encode()[:2] + "段".encode()) == "\ufffd段"


# ---- cleaning


def test_cleaning_removes_characters_that_are_no_text_and_keeps_full_width_forms() -> None:
    assert clean("一\x00二\x07三\x7f\u200b，。！？“”　（四）").text == "一二三，。！？“”　（四）"
    assert clean("一\r\n二\r三\u2028四\x85五\t六").text == "一\n二\n三\n四\n五 六"
    assert clean("  一\n").text == "一"
    assert clean("一\ufffd\ud800二\x01") == ("一二", 1, 2)
    assert clean("👨\u200d👩").text == "👨\u200d👩"


def test_cutting_keeps_every_character_and_ends_at_sentences() -> None:
    text = "第一句。第二句！“第三句？”第四句很长没有标点可以停下来的地方\n尾"
    pieces = list(split_long(text, 10))
    assert "".join(pieces).replace("\n", "") == text.replace("\n", "")
    assert max(map(len, pieces)) <= 10 and pieces[0] == "第一句。第二句！"
    assert list(split_long("一二三四五", 2)) == ["一二", "三四", "五"]
    assert list(split_long("一\n二\n三", 4)) == ["一\n二", "三"]


def test_the_shipped_corpus_is_split_by_the_content_of_its_items() -> None:
    for part in ("train", "valid"):
        for text in read_paragraphs(ROOT / "data" / part):
            assert is_validation(content_hash(text), 0.05) == (part == "valid"), text


def test_a_per_cent_divided_by_100_splits_as_the_share_itself() -> None:
    """0.9 / 100 * 10,000 is above 90 in floating point: unrounded, a text with the number 90 would change sides."""
    digest = (90).to_bytes(8, "big") + bytes(24)
    assert not is_validation(digest, 0.009) and not is_validation(digest, 0.9 / 100) and is_validation(digest, 0.0091)


def test_copies_are_found_in_little_memory(tmp_path) -> None:
    news = []

    def add_all() -> None:
        seen, new = Seen(tmp_path / f"seen{len(news)}"), 0
        for begin in range(0, 60_000, 500):
            new += sum(seen.add([seen_number(content_hash(str(i % 30_000))) for i in range(begin, begin + 500)]))
        news.append(new)
        seen.close()

    assert peak_bytes(add_all) < 100_000
    assert news == [30_000] * 3
