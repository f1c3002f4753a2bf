"""Small corpora and a vocabulary for the tests of this package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def vocab() -> Path:
    """The shipped vocabulary."""
    return ROOT / "cache" / "vocab.txt"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with two files of array-JSON, 80 paragraphs in all."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("a", "b"):
        items = [f"第{i}段，今天的天气很好，我们去河边走了{i * 7}步。" for i in range(40)]
        (folder / f"{name}.json").write_text(json.dumps(items, ensure_ascii=False), encoding="utf-8")
    return folder
