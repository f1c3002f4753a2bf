"""Whether a run is complete. `python -m gpt2_chinese.run.complete FOLDER` ends with status 0 if it is, otherwise with 1."""

from __future__ import annotations

import sys
from pathlib import Path

from gpt2_chinese.checkpoint.find import read_json
from gpt2_chinese.checkpoint.sealed_folder import new_damage


def final_step(folder: Path) -> int | None:
    """The step after which the run in `folder` wrote final/; None if there is none or it is damaged."""
    final = folder / "final"
    return None if new_damage(final) else read_json(final / "run.json").get("step")


def complete_steps(folder: Path) -> int | None:
    """How many steps the run in `folder` has taken, if these are all that its configuration asks for; otherwise None.

    Raises OSError, ValueError or KeyError for files that are not those of a run.
    """
    steps = read_json(folder / "config.json")["max_steps"]
    return steps if final_step(folder) == steps else None


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("error: give the folder of a run: python -m gpt2_chinese.run.complete runs/02_ddp", file=sys.stderr)
        return 2
    try:
        return 0 if complete_steps(Path(arguments[0])) else 1
    except (OSError, ValueError, KeyError):
        return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
