"""Conversion by several processes: the bytes, the report and the errors of one process; the fast JSON against Python's."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpt2_chinese.corpora import convert as convert_module
from gpt2_chinese.corpora import prepare as prepare_module
from gpt2_chinese.corpora import processes
from gpt2_chinese.corpora.__main__ import main
from gpt2_chinese.corpora.cleaning import Seen, clean, content_hash, is_validation
from gpt2_chinese.corpora.formats import DECODER, Item, parsed
from tests.gpt2_chinese.corpora.test_command import _signals, wiki_lines, write  # noqa: F401
from tests.gpt2_chinese.corpora.test_formats import CLUE, NOVEL, RECORDS, UER


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stretches of seven items, batches of 300 characters, two processes from the first byte on."""
    monkeypatch.setattr(convert_module, "_ITEMS_AT_ONCE", 7)
    monkeypatch.setattr(convert_module, "_CHARACTERS_AT_ONCE", 300)
    monkeypatch.setattr(convert_module, "PARALLEL_BYTES", 0)


def convert(monkeypatch: pytest.MonkeyPatch, cores: int, *arguments: object) -> int:
    """The exit status of a conversion on so many cores."""
    monkeypatch.setattr(convert_module, "num_cores", lambda: cores)
    try:
        main(["convert", *map(str, arguments)])
    except SystemExit as end:
        return int(end.code)
    return 0


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.json"))}


def mixture(folder: Path) -> Path:
    """Files of all formats, with copies, broken lines, empty and long items; the order of all is random."""
    chance = random.Random(3)
    for form, (record, _) in RECORDS.items():
        lines = [json.dumps(record, ensure_ascii=False)] * 2 + ["{broken", "null", '"\\ud800"', '{"text": 3}', ""]
        if form != "array-json":
            lines += [json.dumps({**record, "id": i}, ensure_ascii=bool(i % 2)) for i in range(30)]
        chance.shuffle(lines)
        write(folder / f"{form}.json", json.dumps(record, ensure_ascii=False) + "\n" + "\n".join(lines))
    write(folder / "wiki.json", wiki_lines(200) + '{"text": 5, "title": "x"}\n' + wiki_lines(210))
    texts = [f"第{i % 40}句。" * (i % 13) for i in range(100)]
    write(folder / "array.json", json.dumps(texts, ensure_ascii=False, indent=1))
    write(folder / "clue.txt", CLUE * 60)
    write(folder / "uer.txt", UER * 60 + "坏\ufffd\ufffd\n短\n" + "长" * 500 + "\n")
    write(folder / "novel.txt", NOVEL * 30)
    return folder


def test_several_processes_write_the_bytes_and_the_report_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    given, found = sorted(mixture(tmp_path / "in").iterdir()), []
    for cores in (1, 3):
        status = convert(monkeypatch, cores, *given, "--output", tmp_path / "out", "--max-length", 40, "--min-length", 3,
                         "--shard-mb", "0.003", "--overwrite", "--valid-share", "0.3")  # fmt: skip
        said = capsys.readouterr()
        found.append((status, content(tmp_path / "out"), said.out, said.err))
    assert found[0] == found[1] and found[0][0] == 0
    report = json.loads(found[0][1]["report.json"])
    assert report["cut"] and len(report["dropped"]) >= 4 and report["unreadable"]["items"] > 20
    assert report["parts"]["train"]["files"] > 2 and report["parts"]["valid"]["files"] > 1


@pytest.mark.parametrize("end", ["", "\n3, 4, 5,"])
def test_the_first_of_two_errors_is_the_one_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    """An array that is cut short: what was read before its end is counted first."""
    given = write(tmp_path / "in.json", '[\n"' + '",\n"'.join(f"第{i}句" for i in range(201)) + '",\n' + end + "\n")
    errors = []
    for cores in (1, 2):
        flags = "--output", tmp_path / "out", "--format", "array-json", "--max-bad", 2
        assert convert(monkeypatch, cores, given, *flags) == 2
        errors.append(capsys.readouterr().err)
    assert errors[0] == errors[1], "and what was passed over is printed before it"
    assert [path.name for path in tmp_path.iterdir()] == ["in.json"]
    if not end:
        assert "item 202 is missing" in errors[0] and "passed over" not in errors[0]
    else:
        assert errors[0].count("passed over") == 3 and "more than 2 items cannot be read, the last is" in errors[0]


def test_a_process_that_dies_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    given = write(tmp_path / "in.jsonl", wiki_lines(100))
    monkeypatch.setattr(processes, "_PROGRAM", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert convert(monkeypatch, 2, given, "--output", tmp_path / "out") == 2
    assert "a process that converted ended by itself with status -9: is there enough memory?" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_ctrl_c_ends_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    given, workers = write(tmp_path / "in.jsonl", wiki_lines(2000)), []
    real = processes.start_worker

    def started(*given):
        workers.append(real(*given))
        return workers[-1]

    def keep(conversion, name, found):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    monkeypatch.setattr(processes, "start_worker", started)
    monkeypatch.setattr(convert_module.Conversion, "_count_and_keep", keep)
    assert convert(monkeypatch, 2, given, "--output", tmp_path / "out") == 130
    assert capsys.readouterr().err.endswith("interrupted: nothing was written\n")
    assert len(workers) == 2 and all(worker.returncode == -signal.SIGKILL for worker in workers)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_the_output_is_what_ten_simple_lines_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    texts = [f"\u3000第{i % 70}句，“引号\"、\\ 反斜线”\n第二行\t{'😀' * (i % 3)} " for i in range(150)]
    given = write(tmp_path / "in.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert convert(monkeypatch, 2, given, "--output", tmp_path / "out", "--valid-share", "0.4") == 0
    expected: dict[str, list[str]] = {"train": [], "valid": []}
    for text in dict.fromkeys(clean(text).text for text in texts):
        expected["valid" if is_validation(content_hash(text), 0.4) else "train"].append(json.dumps(text, ensure_ascii=False))
    for part, lines in expected.items():
        written = (tmp_path / "out" / part / "part-00000.json").read_text(encoding="utf-8")
        assert lines and written == "[\n" + ",\n".join(lines) + "\n]\n"


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
                    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=3), inside, max_size=3),
                    max_leaves=6)  # fmt: skip


def slow(text: str) -> object:
    """What Python's reader gives, or its error."""
    try:
        return DECODER.decode(text)
    except ValueError as error:
        return Item("1", text[:30], f"is no JSON ({error.msg})")


@given(st.builds(lambda value, plain: json.dumps(value, ensure_ascii=plain), JSON, st.booleans()), st.integers(0, 99))
@example('{"star": 18446744073709551616, "text": "a"}', 99)
@example('{"a": 1.0, "b": 1e400, "c": -0}', 99)
@example('{"a": "x\ny", "a": "z", "b": NaN}', 99)
@example('"\\ud800"', 99)
@example('{"a": 1} x', 99)
@example("[" * 20_000, 99_999)
def test_a_line_is_what_the_standard_library_reads(line: str, cut: int) -> None:
    for text in (line, line[:cut], line.replace("\\n", "\n").replace('"', "", 1)):
        try:
            wanted = slow(text)
        except RecursionError:
            wanted = Item("1", text[:30], "is nested too deeply")
        found = parsed(Item("1", text))
        if isinstance(wanted, Item):
            assert found == wanted
        else:
            assert not found.problem and repr(found.value) == repr(wanted), "repr tells 1 from 1.0 and True"


@given(st.text(st.characters(exclude_categories=())))
@example("".join(map(chr, range(300))))
def test_a_cleaned_text_is_encoded_as_the_standard_library_does(raw: str) -> None:
    text = clean(raw).text
    assert orjson.dumps(text) == json.dumps(text, ensure_ascii=False).encode()


@given(st.lists(st.lists(st.integers(0, 9) | st.sampled_from([-(2**63), 2**63 - 1]), max_size=9), max_size=9))
def test_a_table_of_seen_texts_answers_as_a_set(groups: list[list[int]]) -> None:
    seen, known = Seen(Path(":memory:")), set()
    for group in groups:
        answers = seen.add(group)
        for number, answer in zip(group, answers, strict=True):
            assert answer == (number not in known)
            known.add(number)
    seen.close()


def test_a_stretch_holds_its_characters_and_one_item_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = prepare_module.prepare
    monkeypatch.setattr(convert_module, "_CHARACTERS_AT_ONCE", 1000)
    monkeypatch.setattr(processes, "prepare", lambda stretch, rules: sizes.append(sum(map(len, stretch.items[1])))
                        or real(stretch, rules))  # fmt: skip
    given = write(tmp_path / "in.txt", "".join("好" * (i % 300) + "。\n" for i in range(2000)))
    assert convert(monkeypatch, 1, given, "--output", tmp_path / "out", "--format", "lines") == 0
    assert len(sizes) > 100 and max(sizes) <= 1000 + 300
