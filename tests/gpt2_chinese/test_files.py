"""Files that are complete or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpt2_chinese.files import replacing, write_json


def test_a_file_is_replaced_as_a_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    write_json(path, {"一": 1})
    before = path.read_bytes()
    with pytest.raises(OSError, match="disk full"), replacing(path) as staging:
        staging.write_text("half")
        raise OSError("disk full")
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with replacing(path) as staging:
        staging.write_text("new")
        assert path.read_bytes() == before
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]
