"""A chapter is its parent with one idea more: its train.py has at most 20 lines that the parent's has not."""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

import pytest

CHAPTERS = Path(__file__).parents[2] / "chapters"
MOST = 20


def lines_of(program: Path) -> list[str]:
    """The lines of a program without its docstring, which differs in every chapter."""
    text = program.read_text(encoding="utf-8")
    first = ast.parse(text).body[0]
    return text.splitlines()[first.end_lineno :]


def parent_of(program: Path) -> str | None:
    """The value of PARENT."""
    for node in ast.parse(program.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PARENT":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{program} names no PARENT")


def new_lines(program: Path, parent: Path) -> list[str]:
    """What the page of a chapter highlights: lines that its parent does not have."""
    diff = difflib.ndiff(lines_of(parent), lines_of(program))
    return [line[2:] for line in diff if line.startswith("+ ") and line[2:].strip()]


@pytest.mark.parametrize("program", sorted(CHAPTERS.glob("[0-9]*/train.py")), ids=lambda path: path.parent.name)
def test_a_chapter_differs_from_its_parent_by_its_idea(program: Path) -> None:
    parent = parent_of(program)
    if parent is None:
        return
    assert (CHAPTERS / parent / "train.py").exists(), f"PARENT {parent} is no chapter"
    new = new_lines(program, CHAPTERS / parent / "train.py")
    assert 0 < len(new) <= MOST, "\n".join([f"{len(new)} new lines:", *new])


def test_the_count_can_fail(tmp_path: Path) -> None:
    parent, child = tmp_path / "parent.py", tmp_path / "child.py"
    parent.write_text('"""Parent."""\nPARENT = None\na = 1\n')
    child.write_text('"""Child,\nlonger."""\nPARENT = "x"\na = 1\nb = 2\n')
    assert new_lines(child, parent) == ['PARENT = "x"', "b = 2"]
