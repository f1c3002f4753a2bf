"""Programs of the system that a test replaces by a few lines of shell."""

from __future__ import annotations

from pathlib import Path


def write_programs(folder: Path, **text_of: str) -> None:
    """Writes executable files into `folder`: name=text. A test puts the folder first on PATH."""
    for name, text in text_of.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
