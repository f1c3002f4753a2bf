"""Holds the sizes of functions and classes: a function of more lines, or a class of more attributes, is usually two ideas.

Attributes are read from the syntax tree: the fields that a class annotates, as dataclasses do, and what its methods assign
to self. Constants of a class, ClassVar fields and properties do not count, nor do attributes of a parent class.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.layers import floor_plan

REPO = Path(__file__).parents[2]
FOLDERS = ("durable", "gpt2_chinese", "pstar", "chapters")
MOST_ATTRIBUTES, MOST_LINES = 15, 60

# Each field of these classes is a flag of a command or a key of a configuration, which users find in one list.
FLAG_CLASSES = {
    "gpt2_chinese/settings.py: Settings": "the flags that every chapter has",
    "gpt2_chinese/model/config.py: ModelConfig": "the keys of a GPT-2's config.json",
    "chapters/07_patrickstar/engine_settings.py: Settings": "the flags of chapter 07",
    "chapters/08_param_efficient/adapt_settings.py: Settings": "the flags of chapter 08",
    "pstar/config.py: Config": "the keys of the engine's configuration",
}


def attributes(node: ast.ClassDef) -> set[str]:
    """The names of a class's own attributes."""
    fields = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
              and "ClassVar" not in ast.unparse(each.annotation)}
    return fields | {each.attr for each in _inside(node) if isinstance(each, ast.Attribute)
                     and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"}


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a class, except those of classes inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.ClassDef):
            yield child
            yield from _inside(child)


def classes(repo: Path) -> list[tuple[str, int, set[str]]]:
    """("file: class", line, attributes) of all classes."""
    return [(f"{file}: {node.name}", node.lineno, attributes(node)) for file, node in _nodes(repo)
            if isinstance(node, ast.ClassDef)]


def _nodes(repo: Path) -> Iterator[tuple[Path, ast.AST]]:
    for file in (file for folder in FOLDERS for file in floor_plan.python_files(repo, folder)):
        for node in ast.walk(ast.parse((repo / file).read_text(encoding="utf-8"), str(file))):
            yield file, node


def large_classes(repo: Path) -> list[str]:
    """Classes of more than 15 attributes, other than those of flags."""
    return [f"{name} (line {line}) has {len(found)} attributes, at most {MOST_ATTRIBUTES}: {', '.join(sorted(found))}"
            for name, line, found in classes(repo) if len(found) > MOST_ATTRIBUTES and name not in FLAG_CLASSES]


def long_functions(repo: Path) -> list[str]:
    """Functions of more than 60 lines, with their docstring and without decorators."""
    functions = [(file, node) for file, node in _nodes(repo) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [f"{file}:{node.lineno}: {node.name} has {length} lines, at most {MOST_LINES}" for file, node in functions
            if (length := node.end_lineno - node.lineno + 1) > MOST_LINES]


# ---- this repository


@pytest.mark.parametrize("check", [large_classes, long_functions], ids=lambda check: check.__name__)
def test_the_repository_keeps_to_the_sizes(check) -> None:
    problems = check(REPO)
    assert not problems, "\n".join(["", *problems])


def test_every_exception_is_needed() -> None:
    assert set(FLAG_CLASSES) == {name for name, _, found in classes(REPO) if len(found) > MOST_ATTRIBUTES}


# ---- the checks can fail


FIELDS = "from dataclasses import dataclass\n@dataclass\nclass A:\n" + "".join(f"    a{n}: int = 0\n" for n in range(15))


@pytest.mark.parametrize("text, num", [
    (FIELDS, 15),
    (FIELDS + "    b: ClassVar[int] = 1\n    c = 2\n    @property\n    def d(self): return self.e\n", 15),
    (FIELDS + "    b: int = 0\n", 16),
    (FIELDS + "    def f(self):\n        self.a1 = self.b = 0\n", 16),
    (FIELDS + "    def f(self):\n        self.b, other.c = 0, 1\n", 16),
    (FIELDS + "    def f(self):\n        self.b: int = 0\n        self.c += 1\n", 17),
    (FIELDS + "    def f(self):\n        with open('x') as self.b:\n            self.c.d = 1\n", 16),
    (FIELDS + "    class B:\n        def f(self):\n            self.b = 0\n", 15),
])
def test_attributes_are_counted(tmp_path: Path, text: str, num: int) -> None:
    (tmp_path / "pstar").mkdir()
    (tmp_path / "pstar" / "a.py").write_text(text)
    assert len(classes(tmp_path)[0][2]) == num
    found = large_classes(tmp_path)
    assert len(found) == (num > 15)
    assert not found or found[0].startswith(f"pstar/a.py: A (line 3) has {num} attributes, at most 15: a0, a1, ")


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_lines_are_counted(tmp_path: Path, kind: str) -> None:
    (tmp_path / "chapters" / "00_x").mkdir(parents=True)
    file, body = tmp_path / "chapters" / "00_x" / "a.py", "    pass\n"
    file.write_text(f"@f\n{kind} f():\n{59 * body}")
    assert long_functions(tmp_path) == []
    file.write_text(f"class A:\n    {kind} f():\n{60 * ('    ' + body)}")
    assert long_functions(tmp_path) == ["chapters/00_x/a.py:2: f has 61 lines, at most 60"]
