"""The Settings of every chapter, as its train.py imports them."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from gpt2_chinese.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted(path.parent.name for path in (ROOT / "chapters").glob("*/train.py"))


def settings_of(chapter: str) -> type[Settings]:
    """The class `Settings` that chapters/NAME/train.py takes its flags from; the program itself does not run."""
    folder = ROOT / "chapters" / chapter
    (module,) = re.findall(r"^from (\S+) import Settings$", (folder / "train.py").read_text(encoding="utf-8"), re.MULTILINE)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(module).Settings
    finally:
        sys.path.remove(str(folder))
