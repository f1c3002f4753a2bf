"""Files and folders that are complete or absent, and the boxes and metadata of torch's distributed checkpoints."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from durable.boxes import boxes
from durable.files import replacing, write_flushed, write_json
from durable.folders import digest, first_damage, put_in_place
from durable.printable import escape_what_stdout_lacks, printable


@pytest.mark.parametrize("per_process", [False, True])
def test_a_file_is_replaced_as_a_whole_or_stays_as_it_was(tmp_path: Path, per_process: bool) -> None:
    path = tmp_path / "kept.json"
    write_json(path, {"一": 1})
    before = path.read_bytes()
    with pytest.raises(OSError, match="disk full"), replacing(path, per_process) as staging:
        staging.write_text("half")
        raise OSError("disk full")
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with replacing(path, per_process) as staging:
        staging.write_text("new")
        assert path.read_bytes() == before and (str(os.getpid()) in staging.name) == per_process
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_json_keeps_a_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    """As of files from a Chinese Windows."""
    name = os.fsdecode("资料.json".encode("gbk"))
    write_json(tmp_path / "x.json", {"train_data": name, "一": 1})
    written = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert "一" in written and json.loads(written) == {"train_data": name, "一": 1}


def test_escapes_for_characters_that_stdout_lacks_or_that_break_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, shown in (("iso-8859-1", "\\u4eca\\u5929 é"), ("gbk", "今天 é"), ("utf-8", "今天 é")):
        file = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding=encoding))
        escape_what_stdout_lacks()
        print("今天 é", end="", flush=True)
        assert file.getvalue().decode(encoding) == shown
    assert printable("今\n\ud800\x1b[1m") == "今\\n\\ud800\\x1b[1m"


def test_write_flushed_replaces_a_leftover_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    left = tmp_path / "x.bin.tmp"
    left.write_bytes(b"longer than what comes")
    left.chmod(0o444)
    write_flushed(path, b"new")
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_replaced_has_another_name_until_the_new_one_is_there(tmp_path: Path, monkeypatch) -> None:
    staging, target, old = tmp_path / "x.tmp", tmp_path / "x", tmp_path / "x.old"
    for folder, text in ((staging, "new"), (target, "before"), (old, "long before")):
        folder.mkdir()
        (folder / "file").write_text(text)
    seen, rename = [], os.rename

    def watched(*names: Path) -> None:
        rename(*names)
        seen.append(sorted((folder.name, (folder / "file").read_text()) for folder in tmp_path.iterdir()))

    monkeypatch.setattr(os, "rename", watched)
    put_in_place(staging, target, old)
    assert seen == [[("x.old", "before"), ("x.tmp", "new")], [("x", "new"), ("x.old", "before")]]
    assert [folder.name for folder in tmp_path.iterdir()] == ["x"]


def test_the_first_damaged_file_is_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    files = {name: digest(tmp_path / name) for name in ("a", "b")}
    assert first_damage(tmp_path, files) is None
    (tmp_path / "b").write_text("c")
    assert first_damage(tmp_path, files) == ("b", "does not match its checksum")
    (tmp_path / "a").unlink()
    assert first_damage(tmp_path, files) == ("a", "is missing")


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_cover_a_run_of_elements_in_order(shape, data):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, whole.numel() - 1))
    numel = data.draw(st.integers(1, whole.numel() - start))
    found = boxes(shape, start, numel)
    parts = [whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))] for box in found]
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), torch.arange(start, start + numel))
    assert [int(part.reshape(-1)[0]) for part in parts] == [box.start for box in found]
    assert [part.shape for part in parts] == [box.sizes for box in found] and len(found) <= max(1, 2 * len(shape) - 1)


class Payload:
    def __init__(self, found: tuple):
        self.found = found

    def __reduce__(self):
        return self.found


def test_metadata_name_only_the_classes_of_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from durable.distributed_checkpoint import ForeignClass, Reader

    monkeypatch.chdir(tmp_path)
    foreign = {"posix.mkdir": (os.mkdir, ("carried_out",)), "builtins.getattr": (getattr, (torch.Size, "count")),
               "torch.serialization.load": (torch.load, ("x",))}  # fmt: skip
    for name, found in foreign.items():
        Path(".metadata").write_bytes(pickle.dumps(Payload(found)))
        with pytest.raises(ForeignClass, match="does not belong there") as refused:
            Reader(tmp_path).read_metadata()
        assert refused.value.name == name and not Path("carried_out").exists()
