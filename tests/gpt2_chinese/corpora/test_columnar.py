"""Parquet and Arrow files, as Hugging Face's `datasets` and its hub store them, give the texts of the same JSON lines."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from gpt2_chinese.corpora import columnar
from gpt2_chinese.corpora.__main__ import main
from gpt2_chinese.corpus import corpus_files
from gpt2_chinese.errors import UserError
from tests.chapters.program import environment
from tests.gpt2_chinese.corpora.test_command import _signals, convert, items, report, write  # noqa: F401  (a fixture)
from tests.gpt2_chinese.corpora.test_formats import RECORDS
from tests.limits import HANGS_S

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import ipc, parquet  # noqa: E402

TEXTS = [f"第{number}段文字，讲一件小事。" for number in range(300)]


def save(path: Path, columns: dict, rows: int = 100, file_format: bool = False) -> Path:
    """Writes columns as Parquet (row groups of `rows`), or as Arrow batches: a stream as `datasets` does, or a file."""
    table = columns if isinstance(columns, pyarrow.Table) else pyarrow.table(columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=rows)
    else:
        with (ipc.new_file if file_format else ipc.new_stream)(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=rows)
    return path


def saved_to_disk(folder: Path, texts: list[str], shards: int = 2) -> None:
    """A folder as Dataset.save_to_disk writes it, after a map() whose result is kept beside it."""
    names = [f"data-{number:05d}-of-{shards:05d}.arrow" for number in range(shards)]
    for number, name in enumerate(names):
        save(folder / name, {"text": texts[number::shards]})
    save(folder / "cache-0123456789abcdef.arrow", {"text": ["映射的结果"], "input_ids": [[1, 2]]})
    write(folder / "dataset_info.json", json.dumps({"features": {"text": {"dtype": "string", "_type": "Value"}}}))
    write(folder / "state.json", json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "train"}))


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
@pytest.mark.parametrize("form", RECORDS)
def test_every_format_of_records_comes_through(form: str, kind: str, tmp_path: Path, capsys) -> None:
    record, expected = RECORDS[form]
    if not isinstance(record, dict):
        pytest.skip("columns have names")
    columns = {name: [value] for name, value in record.items()} | {"picture": [b"\x89PNG" * 10]}
    given = save(tmp_path / f"a.{'parquet' if kind == 'parquet' else 'arrow'}", columns, file_format=kind == "file")
    convert(given, "--output", tmp_path / "out", "--valid-share", "0")
    assert items(tmp_path / "out/train") == expected
    found = "json-lines" if form == "array-json" else form
    assert f"{given.name}: {found} (columns {', '.join(record)}" in capsys.readouterr().out


def test_a_folder_of_save_to_disk_and_a_clone_of_the_hub_give_the_texts_of_json_lines(tmp_path: Path) -> None:
    write(tmp_path / "plain/a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    saved_to_disk(tmp_path / "saved/train", TEXTS[:200])
    saved_to_disk(tmp_path / "saved/test", TEXTS[200:], shards=1)
    write(tmp_path / "saved/dataset_dict.json", '{"splits": ["train", "test"]}')
    for number in range(3):
        save(tmp_path / f"clone/data/train-{number:05d}-of-00003.parquet", {"id": range(100), "text": TEXTS[number::3]}, 30)
    write(tmp_path / "clone/README.md", "---\nlicense: mit\n---\n")
    write(tmp_path / "clone/.gitattributes", "*.parquet filter=lfs\n")
    for name in ("plain", "saved", "clone"):
        convert(tmp_path / name, "--output", tmp_path / f"{name}-out", "--valid-share", "0.2")
    for part in ("train", "valid"):
        expected = sorted(items(tmp_path / "plain-out" / part))
        assert expected and sorted(items(tmp_path / "saved-out" / part)) == expected, "map's result is not read"
        assert sorted(items(tmp_path / "clone-out" / part)) == expected
    assert report(tmp_path / "saved-out")["read"] == 300


def test_strange_values_are_counted_as_in_json(tmp_path: Path) -> None:
    broken = pyarrow.array([b"\xe4\xbd\xa0\xe5\xa5\xbd\xff", None, "好".encode() * 30]).view(pyarrow.binary())
    strings = pyarrow.StringArray.from_buffers(3, broken.buffers()[1], broken.buffers()[2], broken.buffers()[0])
    given = save(tmp_path / "a.arrow", pyarrow.table({"text": strings}))
    convert(given, "--output", tmp_path / "out", "--valid-share", "0")
    assert items(tmp_path / "out/train") == ["好" * 30]
    found = report(tmp_path / "out")
    assert found["dropped"]["broken encoding"]["items"] == 1 and found["unreadable"]["items"] == 1
    assert found["unreadable"]["examples"][0].startswith(f'{given}:row 2 has no field "text"')


@pytest.mark.parametrize("values", [
    pyarrow.array(TEXTS).dictionary_encode(), pyarrow.array(TEXTS, pyarrow.large_string()),
    pyarrow.array(TEXTS).cast(pyarrow.string_view()), pyarrow.chunked_array([TEXTS[:7], TEXTS[7:]])],
    ids=["dictionary", "large", "view", "chunks"])  # fmt: skip
def test_text_may_be_stored_in_any_way(values, tmp_path: Path) -> None:
    convert(save(tmp_path / "a.arrow", pyarrow.table({"text": values})), "--output", tmp_path / "out", "--valid-share", "0")
    assert items(tmp_path / "out/train") == TEXTS


def test_field_names_the_column(tmp_path: Path) -> None:
    given = save(tmp_path / "a.parquet", {"instruction": ["问题"], "output": ["回答"]})
    convert(given, "--output", tmp_path / "out", "--field", "output", "--valid-share", "0")
    assert items(tmp_path / "out/train") == ["回答"]


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-40])
    return path


WRONG = {
    "no known column": (lambda t: save(t / "a.parquet", {"a": ["x"], "b": [1]}), (),
                        r"a\.parquet has columns of no known format \(a, b\): name the text by --field"),
    "no such column": (lambda t: save(t / "a.parquet", {"a": ["x"]}), ("--field", "b"),
                       r"a\.parquet has no column 'b' \(--field\), but a"),
    "a format of text": (lambda t: save(t / "a.parquet", {"text": ["x"]}), ("--format", "lines"),
                         r"--format lines is for text, but \S+a\.parquet has columns: leave --format out"),
    "two columns of a name": (lambda t: save(t / "a.arrow", pyarrow.table([["x"], ["y"]], names=["text", "text"])), (),
                              r"a\.arrow has two columns 'text': rename one of them"),
    "a pointer of Git LFS": (
        lambda t: write(t / "a.parquet", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), (),
        r"a\.parquet is a pointer of Git LFS, not the file: get the file itself by `git lfs pull`"),
    "empty": (lambda t: write(t / "a.parquet", b""), (), r"a\.parquet is no parquet file: it is empty; get it again"),
    "JSON": (lambda t: write(t / "a.arrow", "[]"), (), r"a\.arrow is no arrow file: it begins with b'\[\]'; get it again"),
    "a parquet file cut short": (lambda t: cut(save(t / "a.parquet", {"text": TEXTS})), (),
                                 r"a\.parquet is damaged, cut short or encrypted \(.*\): get it again"),
    "a stream cut short": (lambda t: cut(save(t / "a.arrow", {"text": TEXTS}, 10)), (),
                           r"a\.arrow is damaged, cut short or encrypted \(.*\): get it again"),
    "an arrow file cut short": (lambda t: cut(save(t / "a.arrow", {"text": TEXTS}, file_format=True)), (),
                                r"a\.arrow is damaged, cut short or encrypted \(.*\): get it again"),
    "a column that is no text": (lambda t: save(t / "a.parquet", {"text": [[1], [2]]}), ("--max-bad", "1"),
                                 r'more than 1 items cannot be read, .*a\.parquet:row 2, it has a field "text" that is'),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_one_line(case: str, tmp_path: Path, capsys) -> None:
    make, flags, line = WRONG[case]
    given = make(tmp_path)
    with pytest.raises(SystemExit) as stop:
        convert(given, "--output", tmp_path / "out", *flags)
    *before, said = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and all(line.startswith("passed over: ") for line in before)
    assert re.fullmatch(rf"error: .*{line}.*", said), said
    assert not (tmp_path / "out").exists()


def test_without_pyarrow_the_line_names_the_extra(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    given = save(tmp_path / "a.parquet", {"text": TEXTS})
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pyarrow" else found(name, *rest))
    write(tmp_path / "first.txt", "一行\n两行\n")
    with pytest.raises(SystemExit):
        main(["convert", str(tmp_path / "first.txt"), str(given), "--output", str(tmp_path / "out")])
    assert capsys.readouterr().err == f'error: {given} needs pyarrow, which is not installed: pip install -e ".[parquet]"\n'


def test_train_data_says_how_to_convert_them(tmp_path: Path) -> None:
    saved_to_disk(tmp_path / "saved/train", TEXTS)
    write(tmp_path / "saved/dataset_dict.json", '{"splits": ["train"]}')
    given = save(tmp_path / "clone/a.parquet", {"text": TEXTS})
    for path in (given, given.parent, tmp_path / "saved", tmp_path / "saved/train"):
        command = f"bash scripts/python.sh -m gpt2_chinese.corpora convert {path} --out"
        with pytest.raises(UserError, match=f"convert it first with `{command}"):
            corpus_files(path)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_memory_does_not_grow_with_the_file(name: str, tmp_path: Path) -> None:
    """One row group of 20 MB of text (an Arrow stream in its writer's batches): less than 14 MB of memory."""
    generator = random.Random(0)
    texts = ["".join(chr(generator.randrange(0x4E00, 0x9FA0)) for _ in range(1000)) for _ in range(100)]
    given = save(tmp_path / name, {"text": [texts[number % 100] + str(number) for number in range(6_700)],
                                   "embedding": [b"x" * 1000] * 6_700}, 10**6 if name == "a.parquet" else 500)
    pool = pyarrow.default_memory_pool()
    before, most, count = pool.bytes_allocated(), 0, 0
    tracemalloc.start()
    try:
        with given.open("rb") as stream:
            for item in columnar.Table(stream, columnar.kind_of(stream.peek(16)[:16], name), name).records(""):
                count += len(item.value["text"].encode())
                most = max(most, pool.bytes_allocated() - before)
        most += tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count > 20e6 and most < 14e6


MUTATE = '''
import json, random, sys
from pathlib import Path
from gpt2_chinese.corpora import columnar
from gpt2_chinese.errors import UserError
generator, results = random.Random(1), {"read": 0, "refused": 0}
for given in map(Path, sys.argv[1:]):
    good = given.read_bytes()
    for number in range(150):
        data = bytearray(good)
        for _ in range(generator.randrange(1, 9)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        bad = given.with_name(f"bad{given.suffix}")
        bad.write_bytes(data)
        try:
            with bad.open("rb") as stream:
                kind = columnar.kind_of(stream.peek(16)[:16], bad.name)
                if kind:
                    list(columnar.Table(stream, kind, bad.name).records("text"))
            results["read"] += 1
        except UserError:
            results["refused"] += 1
print(json.dumps(results))
'''


def test_mutated_files_are_read_or_refused_and_never_crash(tmp_path: Path) -> None:
    files = [save(tmp_path / "a.parquet", {"text": TEXTS}), save(tmp_path / "b.arrow", {"text": TEXTS}),
             save(tmp_path / "c.arrow", {"text": TEXTS}, file_format=True)]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", MUTATE, *map(str, files)], capture_output=True, text=True, timeout=HANGS_S,
                          env=environment() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))})  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["read"] > 20 and found["refused"] > 20
