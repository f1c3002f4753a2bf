"""Finds checkpoints, without an import of torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpt2_chinese.checkpoint.sealed_folder import new_damage
from gpt2_chinese.errors import UserError, notice

PARTS = "parts"


def candidates(directory: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all checkpoints, newest first; step_N.old, left by a kill during a replacement, follows step_N."""
    found = []
    for folder in directory.glob("step_*") if directory.is_dir() else ():
        number = folder.name.removeprefix("step_").removesuffix(".old")
        if folder.is_dir() and number.isdigit():
            found.append((int(number), folder))
    return sorted(found, key=lambda item: (-item[0], item[1].name))


def newest_complete(directory: Path) -> Path | None:
    """The checkpoint of the highest step whose files all match their checksums; a notice names each damaged one."""
    for _, folder in candidates(directory):
        reason = new_damage(folder)
        if reason is None:
            return folder
        notice(f"passing over the damaged checkpoint {folder}: {reason}")
    return None


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_state(path: Path) -> dict[str, Any]:
    """state.json of a checkpoint. Raises UserError when it cannot be read."""
    try:
        return read_json(path / "state.json")
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint {path} cannot be used: state.json: {error}") from None
