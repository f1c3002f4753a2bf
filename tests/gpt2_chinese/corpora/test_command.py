"""The command `corpora convert`: its output, its report, each wrong input's one line, kills, and mutated inputs."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest

from gpt2_chinese.corpora import output
from gpt2_chinese.corpora.__main__ import main
from gpt2_chinese.corpus import read_paragraphs
from gpt2_chinese.errors import UserError
from tests.gpt2_chinese.corpora.test_formats import CLUE, NOVEL, RECORDS, UER
from tests.limits import HANGS_S, limited

ROOT = Path(__file__).resolve().parents[3]
VOCAB = ROOT / "cache/vocab.txt"


@pytest.fixture(autouse=True)
def _signals():
    """main() takes over SIGTERM; the test run keeps its own."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def convert(*arguments: object) -> None:
    main(["convert", *map(str, arguments)])


def items(folder: Path) -> list[str]:
    """What a chapter would read."""
    return list(read_paragraphs(folder))


def report(output: Path) -> dict:
    return json.loads((output / "report.json").read_text(encoding="utf-8"))


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def wiki_lines(number: int) -> str:
    form = '{{"id": "{0}", "url": "u", "title": "条目{0}", "text": "第{0}条的正文，讲一件小事。"}}\n'
    return "".join(form.format(i) for i in range(number))


# ---- what comes out


def test_the_output_is_read_by_the_chapters_and_divided_by_content(tmp_path: Path, capsys) -> None:
    write(tmp_path / "in/a.json", wiki_lines(300))
    write(tmp_path / "in/b.json", "\ufeff" + wiki_lines(400))  # the first 300 again
    convert(tmp_path / "in", "--output", tmp_path / "out", "--valid-share", "0.2", "--shard-mb", "0.005")
    train, valid = items(tmp_path / "out/train"), items(tmp_path / "out/valid")
    expected = [f"条目{i}\n第{i}条的正文，讲一件小事。" for i in range(400)]
    assert sorted(train + valid) == sorted(expected) and train == [item for item in expected if item in set(train)]
    assert 40 < len(valid) < 130 and len(list((tmp_path / "out/train").iterdir())) > 3
    found = report(tmp_path / "out")
    assert (found["read"], found["kept"]) == (700, 400)
    assert found["dropped"]["duplicate (--dedup)"]["items"] == 300
    assert found["dropped"]["duplicate (--dedup)"]["examples"][0].startswith(f"{tmp_path}/in/b.json:1: ")
    said = capsys.readouterr().out
    assert "a.json: wiki2019zh (JSON, a record a line; 50 of the first 50 records have the fields id, url," in said
    assert f"--train-data {tmp_path}/out/train --valid-data {tmp_path}/out/valid" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"], "no other file is left"

    convert(tmp_path / "in/b.json", tmp_path / "in/a.json", "--output", tmp_path / "again", "--valid-share", "0.2")
    assert set(items(tmp_path / "again/valid")) == set(valid), "train or valid depends on the text alone"


@pytest.mark.parametrize("form", [*RECORDS, "clue-text", "lines", "paragraphs", "file"])
def test_every_format_comes_through_by_itself_and_when_named(tmp_path: Path, form: str) -> None:
    if form in RECORDS:
        record, expected = RECORDS[form]
        content = json.dumps(record, ensure_ascii=False) + "\n"
    else:
        content = {"clue-text": CLUE, "lines": UER, "paragraphs": NOVEL, "file": "题目\n正文。"}[form]
        expected = {"clue-text": ["河岸灯会周五开幕。\n展出三百盏手工灯。", "纸船是用纸折成的小船。"],
                    "lines": UER.split("\n")[:2], "file": ["题目\n正文。"],
                    "paragraphs": ["第一段在这里，折成了两行。", "第二段。"]}[form]  # fmt: skip
    given = write(tmp_path / "in" / ("a.json" if form in RECORDS else "a.txt"), content)
    if form == "file":
        write(tmp_path / "in/b.txt", content)
        given = given.parent
    for number, chosen in enumerate(("auto", form)):
        convert(given, "--output", tmp_path / f"out{number}", "--format", chosen, "--valid-share", "0")
        assert items(tmp_path / f"out{number}/train") == expected


def test_rules_and_their_report(tmp_path: Path, capsys) -> None:
    lines = ["短", "这一行有\x07控制符", "", "\x00\x01", "好" * 30 + "。" + "长" * 30, "这一行有控制符", "坏\ufffd\ufffd"]
    given = write(tmp_path / "a.txt", "\n".join(lines))
    rules = ("--format", "lines", "--min-length", "2", "--max-length", "40", "--valid-share", "0", "--vocab", VOCAB)
    convert(given, "--output", tmp_path / "split", *rules)
    assert items(tmp_path / "split/train") == ["这一行有控制符", "好" * 30 + "。", "长" * 30]
    found = report(tmp_path / "split")
    dropped = {rule: count["items"] for rule, count in found["dropped"].items()}
    assert dropped == {"too short (--min-length)": 1, "empty": 1, "duplicate (--dedup)": 1, "broken encoding": 1}
    assert found["read"] == 6 and found["cut"] == 1 and found["characters"] == 68
    assert found["removed_characters"] == {"control": 3, "broken": 2}
    assert found["tokens"]["count"] == 68 and found["tokens"]["unknown_rate"] == found["tokens"]["unknown"] / 68
    assert sum(row["items"] for row in found["lengths"]) == 4 and found["lengths"][-1]["items_below"] == 1
    said = capsys.readouterr().out
    assert f"dropped 1: too short (--min-length), such as {given}:1: '短'" in said and "unknown to --vocab" in said
    convert(given, "--output", tmp_path / "drop", *rules, "--too-long", "drop", "--no-dedup")
    assert items(tmp_path / "drop/train") == ["这一行有控制符"] * 2


def test_flags_of_formats(tmp_path: Path) -> None:
    from tests.gpt2_chinese.corpora.test_formats import PAIR, WEBTEXT

    def converted(content: str, *flags: object) -> list[str]:
        given = write(tmp_path / "in.txt", content)
        convert(given, "--output", tmp_path / "out", "--overwrite", "--valid-share", "0", *flags)
        return items(tmp_path / "out/train")

    answers = "\n".join(json.dumps(WEBTEXT | {"star": star, "content": f"答{star}"}) for star in (1, 3, 5))
    assert [item[-2:] for item in converted(answers)] == ["答3", "答5"]
    assert report(tmp_path / "out")["dropped"]["too few stars (--star)"]["items"] == 1
    assert [item[-2:] for item in converted(answers, "--star", "5")] == ["答5"]
    assert converted(json.dumps(PAIR), "--both") == ["灯亮着。\nThe lamp is on."]
    assert converted('{"body": "甲"}', "--field", "body") == ["甲"]
    assert converted(CLUE, "--join", "")[0] == "河岸灯会周五开幕。展出三百盏手工灯。"
    given = write(tmp_path / "gbk.txt", UER.encode("gb18030"))
    convert(given, "--output", tmp_path / "out", "--overwrite", "--valid-share", "0", "--encoding", "gb18030")
    assert items(tmp_path / "out/train") == UER.split("\n")[:2]


# ---- what is refused: the input, the flags, the line

BROKEN = "\n".join(['{"text": "好"}'] * 5 + ['{"text": '] * 3) + "\n"
WRONG = {
    "nothing there": (None, [], "in.txt does not exist: give files, folders or archives"),
    "no text": ("\n \n", [], "no item is left of 0 read: the inputs hold no text"),
    "all dropped": ("一\n二\n", ["--min-length", "9"], "no item is left of 2 read: 2 too short (--min-length)"),
    "binary": (bytes(range(256)) * 40, [], "in.txt is not UTF-8 text: is it in another --encoding (gb18030, big5, utf-16)?"),
    "gbk": ((UER * 9).encode("gb18030"), [], "in.txt is not UTF-8 text"),
    "unknown fields": ('{"body": "一"}', [], "(its records hold 'body'): name the text by --field"),
    "too many bad": (BROKEN, ["--max-bad", "2"], "more than 2 items cannot be read, the last is {t}/in.txt:8, it is no"),
    "wrong format": (CLUE * 60, ["--format", "wiki2019zh"], "more than 100 items cannot be read"),
    "cut array": ('["一", "二"', [], "in.txt:1, item 3 is missing: the array is cut short"),
    "cut gz": (gzip.compress(UER.encode())[:-4], [], "in.txt is damaged or cut short"),
    "no number": (UER, ["--min-length", "x"], "--min-length: must be a number, 0 or more, not 'x'"),
    "a share above 1": (UER, ["--valid-share", "5"], "--valid-share: must be a number, from 0 to 1, not '5'"),
    "no share": (UER, ["--valid-share", "nan"], "--valid-share: must be a number"),
    "no such format": (UER, ["--format", "xml"], "--format: invalid choice: 'xml'"),
    "no such flag": (UER, ["--colour"], "unrecognized arguments: --colour"),
    "no such vocabulary": (UER, ["--vocab", "{t}/vocab.txt"], "vocab.txt does not exist"),
    "output is a file": (UER, ["--output", "{t}/in.txt"], "in.txt is no folder: give another name"),
    "output cannot be": (UER, ["--output", "{t}/in.txt/out"], "in.txt/out cannot be written"),
    "output not empty": (UER, ["--output", "{t}/full"], "full is not empty: give another folder, or --overwrite"),
    "not ours": (UER, ["--output", "{t}/full", "--overwrite"], "full holds 'mine.txt', which no conversion wrote"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_is_one_line_and_leaves_no_file(tmp_path: Path, capsys, name: str) -> None:
    content, flags, line = WRONG[name]
    if content is not None:
        write(tmp_path / "in.txt", content)
    write(tmp_path / "full/mine.txt", "mine")
    before = sorted(tmp_path.rglob("*"))
    flags = [each.replace("{t}", str(tmp_path)) for each in flags]
    with pytest.raises(SystemExit) as end:
        convert(tmp_path / "in.txt", "--output", tmp_path / "out", *flags)
    errors = [each for each in capsys.readouterr().err.splitlines() if not each.startswith("passed over: ")]
    assert end.value.code == 2 and len(errors) == 1 and errors[0].startswith("error: ")
    assert line.replace("{t}", str(tmp_path)) in errors[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_an_input_inside_the_output_is_refused(tmp_path: Path, capsys) -> None:
    given = write(tmp_path / "out/train/a.json", '["一"]')
    with pytest.raises(SystemExit):
        convert(given.parent, "--output", tmp_path / "out", "--overwrite")
    assert f"{given} is inside --output" in capsys.readouterr().err and given.exists()


def test_bad_items_are_passed_over_up_to_the_limit(tmp_path: Path, capsys) -> None:
    given = write(tmp_path / "in.jsonl", '{"text": "一"}\n{"text": 二}\n{"title": "三"}\n{"text": "四"}\n')
    convert(given, "--output", tmp_path / "out", "--valid-share", "0", "--max-bad", "2")
    assert items(tmp_path / "out/train") == ["一", "四"]
    said = capsys.readouterr().err.splitlines()
    assert said == [f"passed over: {given}:2 is no JSON (Expecting value): '{{\"text\": 二}}'",
                    f"passed over: {given}:3 has no field \"text\": '{{\"title\": \"三\"}}'"]  # fmt: skip
    assert report(tmp_path / "out")["unreadable"]["items"] == 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.json.gz", "a.zip"])
def test_the_reader_of_the_chapters_names_the_command(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "in" / name, '{"text": "一"}\n')
    for given in (path, path.parent):
        command = f"bash .*scripts/python.sh -m gpt2_chinese.corpora convert {given} --output FOLDER"
        with pytest.raises(UserError, match=command):
            list(read_paragraphs(given))
    for content in ('{"text": "一"}', '[{"text": "一"}]'):
        with pytest.raises(UserError, match="gpt2_chinese.corpora convert"):
            list(read_paragraphs(write(tmp_path / "b.json", content)))


# ---- all or nothing


def test_overwriting_replaces_the_whole_folder_and_one_conversion_writes_at_a_time(tmp_path: Path) -> None:
    given = write(tmp_path / "a.txt", UER)
    convert(given, "--output", tmp_path / "out", "--shard-mb", "0.001", "--valid-share", "0")
    write(tmp_path / "out/train/part-00009.json", '["旧"]')
    convert(given, "--output", tmp_path / "out", "--overwrite", "--valid-share", "0")
    assert items(tmp_path / "out/train") == UER.split("\n")[:2]
    held = output.OutputFolder(tmp_path / "other", False)
    with pytest.raises(UserError, match="is being written by another conversion"):
        output.OutputFolder(tmp_path / "other", False)
    held.discard()
    # killed between the renames of an overwriting one: what was there comes back
    os.rename(tmp_path / "out", tmp_path / ".out.old")
    with pytest.raises(UserError, match="is not empty"):
        output.OutputFolder(tmp_path / "out", False)
    assert items(tmp_path / "out/train") == UER.split("\n")[:2]


def start(given: Path, output: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "gpt2_chinese.corpora", "convert", str(given), "--output", str(output)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


EVERY_KILL = """
import os, shutil, sys
from pathlib import Path
from gpt2_chinese.corpora.__main__ import main
from gpt2_chinese.corpus import read_paragraphs
from gpt2_chinese.errors import UserError
from tests.gpt2_chinese.killed import killed_before
given, output = map(Path, sys.argv[1:])

def command():
    main(["convert", str(given), "--output", str(output), "--overwrite", "--shard-mb", "0.001"])

def content():
    return [sorted(read_paragraphs(output / kind)) for kind in ("train", "valid")]

assert not killed_before(0, command)
whole, number, killed = content(), 0, True
assert len(list((output / "train").iterdir())) > 5
while killed:
    number += 1
    for earlier in (True, False):
        if not earlier:
            shutil.rmtree(output)
        killed = killed_before(number, command)
        if output.exists():
            assert content() == whole, number
        else:
            assert not earlier or output.with_name(".out.old").exists(), number
            try:
                content()
                raise AssertionError(number)
            except UserError as error:
                assert "does not exist" in str(error)
        assert not killed_before(0, command)  # the next one goes on by itself
        assert content() == whole and sorted(os.listdir(output.parent)) == ["in.jsonl", "out"], number
print("kills", number)
"""


def test_a_killed_conversion_leaves_all_or_nothing(tmp_path: Path) -> None:
    """Kills before each change of the disk, with and without an earlier output: a chapter would only read complete
    output."""
    given = write(tmp_path / "in.jsonl", wiki_lines(140))
    command = [sys.executable, "-c", EVERY_KILL, str(given), str(tmp_path / "out")]
    where = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=where, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert int(done.stdout.split()[-1]) > 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_conversion_tidies_up(tmp_path: Path, number: int) -> None:
    pipe = tmp_path / "in.jsonl"
    os.mkfifo(pipe)
    process = start(pipe, tmp_path / "out")
    with pipe.open("w", encoding="utf-8") as stream:  # held open, so that the conversion waits for more
        stream.write(wiki_lines(5000))
        stream.flush()
        process.send_signal(number)
        assert process.communicate(timeout=HANGS_S)[1].strip() == "interrupted: nothing was written"
    assert process.returncode == 130 and [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_full_disk_is_one_line(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    given = write(tmp_path / "in.jsonl", wiki_lines(20_000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        with pytest.raises(SystemExit) as end:
            convert(given, "--output", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert end.value.code == 2 and "cannot be written: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


# ---- mutated inputs


def seeds() -> list[tuple[str, bytes]]:
    """Small inputs of every format and every kind of archive."""
    found = [(f"{form}.json", ("\n".join([json.dumps(record, ensure_ascii=False)] * 4)).encode()) for form, (record, _)
             in RECORDS.items()]  # fmt: skip
    found += [("array.json", json.dumps(["一段。"] * 9, ensure_ascii=False).encode()),
              ("records.json", json.dumps([record for record, _ in RECORDS.values()], indent=1).encode()),
              ("clue.txt", CLUE.encode() * 3), ("uer.txt", UER.encode() * 3), ("novel.txt", NOVEL.encode() * 3)]  # fmt: skip
    texts = found[:2] + found[-3:]
    for suffix in (".zip", ".tar", ".tar.gz"):
        raw = io.BytesIO()
        if suffix == ".zip":
            with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, content in texts:
                    archive.writestr(name, content)
        else:
            with tarfile.open(fileobj=raw, mode="w:gz" if suffix == ".tar.gz" else "w") as archive:
                for name, content in texts:
                    header = tarfile.TarInfo("深" * 70 + name)  # a name that needs an extended header
                    header.size = len(content)
                    archive.addfile(header, io.BytesIO(content))
        found += [("in" + suffix, raw.getvalue())] * 4
    return found + [("in.txt.gz", gzip.compress(content)) for _, content in texts]


def mutated(content: bytes, chance: random.Random) -> bytes:
    raw = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(raw) + 1)
        kind = chance.randrange(5)
        if kind == 0 and place < len(raw):
            raw[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del raw[place : len(raw) if chance.random() < 0.3 else place + chance.randint(1, 20)]
        elif kind == 2:
            raw[place:place] = chance.randbytes(chance.randint(1, 20))
        elif kind == 3:
            raw[place:place] = chance.choice([b"[" * 2000, b'"', b"\n", b"{", b"\\u", b"\xff", b"\0" * 600, b'{"a": 1e9}'])
        else:
            other = chance.randrange(len(raw) + 1)
            raw[place:place] = raw[min(place, other) : max(place, other)]
    return bytes(raw)


@pytest.mark.deep
def test_a_thousand_mutated_inputs_give_a_result_or_one_line(tmp_path: Path, capsys) -> None:
    chance, given = random.Random(7), seeds()
    ends = {"converted": 0, "refused": 0}
    threads = set(threading.enumerate())
    for number in range(1000):
        name, content = given[number % len(given)]
        path = write(tmp_path / "in" / name, mutated(content, chance))
        try:
            with limited(HANGS_S / 10, TimeoutError(f"input {number} has no end")):
                convert(path, "--output", tmp_path / "out", "--overwrite", "--max-bad", chance.choice(["0", "100"]))
            ends["converted"] += 1
            for part in (tmp_path / "out").glob("*/"):
                assert all(item and item == item.strip() for item in items(part))
        except SystemExit as end:
            errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
            assert end.code == 2 and len(errors) == 1, (number, errors)
            ends["refused"] += 1
        path.unlink()
    assert min(ends.values()) > 200, ends
    assert set(threading.enumerate()) <= threads, "none is left"
