"""The API reference: what pstar exports, with its docstrings. The docstrings are English in both languages."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

# Every exported name, in reading order.
GROUPS = {
    "Train": ("initialize_engine", "Engine"),
    "Configure and plan": ("load_config", "Config", "plan_engine", "Plan"),
    "The model": ("torch_scope", "exclude", "TiledLinear", "tile_linears", "join_tiles", "tiled_loss"),
    "The optimizer alone": ("HybridAdam", "DeepSpeedLR"),
    "Errors": ("PstarError", "ConfigError", "BudgetError", "CheckpointError", "StateError", "ArgumentError"),
}
SECTION = re.compile(r"^(Args|Attributes|Raises|Returns):$")
ENTRY = re.compile(r"^([\w.]+(?:, [\w.]+)*): (.*)")


def reference(words: Callable[[str], str], module: ModuleType | None = None) -> str:
    """The whole reference in Markdown. Raises SystemExit if GROUPS and the exported names differ."""
    if module is None:
        import pstar as module
    placed = {name for names in GROUPS.values() for name in names}
    if placed != set(module.__all__):
        raise SystemExit(f"error: GROUPS of api.py and pstar.__all__ differ in {sorted(placed ^ set(module.__all__))}")
    parts = []
    for group, names in GROUPS.items():
        parts.append(f"## {words(group)} {{ #{group.lower().replace(' ', '-')} }}")
        for name in names:
            parts += entry(name, getattr(module, name))
    return "\n\n".join(parts) + "\n"


def entry(name: str, thing: Any) -> list[str]:
    """A function, or a class with its public methods, as Markdown blocks."""
    node = ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    parts = [f"### `{name}` {{ #{name} }}"]
    if not isinstance(node, ast.ClassDef):
        return [*parts, _fence(signature(node, name)), markdown(_said(node, name))]
    methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
    for method in methods:
        if method.name == "__init__":
            parts.append(_fence(signature(method, name)))
    if any(isinstance(base, ast.Name) and base.id.endswith(("Error", "Exception")) for base in node.bases):
        parts.append(_fence(f"class {name}({', '.join(map(ast.unparse, node.bases))})"))
    parts.append(markdown(_said(node, name)))
    for method in methods:
        if not method.name.startswith("_") and ast.get_docstring(method):
            parts.append(f"#### `{name}.{method.name}` {{ #{name}-{method.name} }}")
            parts += [_fence(signature(method, method.name)), markdown(_said(method, method.name))]
    return parts


def signature(node: ast.FunctionDef, name: str) -> str:
    """The signature in the source without self or cls; for a property its type. A long one has one argument per line."""
    node = _Unquoted().visit(node)
    arguments, returns = node.args, f" -> {ast.unparse(node.returns)}" if node.returns else ""
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    if "property" in decorators:
        return f"{name}: {ast.unparse(node.returns)}"
    first = (arguments.posonlyargs + arguments.args)[:1]
    if first and first[0].arg in ("self", "cls"):
        del (arguments.posonlyargs or arguments.args)[0]
    after = "" if returns == " -> None" and name[0].isupper() else returns
    text = ast.unparse(arguments)
    if len(name) + len(text) + len(after) <= 88:
        return f"{name}({text}){after}"
    lines = "".join(f"    {argument},\n" for argument in _apart(text))
    return f"{name}(\n{lines}){after}"


class _Unquoted(ast.NodeTransformer):
    """Removes the quotes of quoted annotations."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        """Removes the quotes of one argument's annotation."""
        if isinstance(node.annotation, ast.Constant) and isinstance(node.annotation.value, str):
            node.annotation = ast.parse(node.annotation.value, mode="eval").body
        return node


def _apart(arguments: str) -> list[str]:
    """'a: dict[str, int], b' -> ['a: dict[str, int]', 'b']: cut at commas outside of brackets."""
    parts, depth = [""], 0
    for char in arguments:
        depth += (char in "[({") - (char in "])}")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def markdown(doc: str) -> str:
    """A docstring as Markdown: the sections Args, Attributes, Raises and Returns become lists."""
    lines, inside = [], False
    for line in doc.splitlines():
        if SECTION.match(line):
            lines += [f"**{line.removesuffix(':')}**", ""]
            inside = True
        elif not inside or (line and not line.startswith("    ")):
            lines.append(line)
            inside = False
        elif line.startswith("     "):
            lines.append(f"    {line.strip()}")
        elif found := ENTRY.match(line.strip()):
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            lines.append(f"- {names}: {found[2]}")
        else:
            lines.append(f"- {line.strip()}" if line.strip() else "")
    return re.sub(r"(?<![`\w])(__\w+__)(?![`\w])", r"`\1`", "\n".join(lines))    # Markdown would make __name__ bold


def _said(node: Any, name: str) -> str:
    doc = ast.get_docstring(node)
    if not doc:
        raise SystemExit(f"error: {name} is exported by pstar and has no docstring")
    return doc


def _fence(text: str) -> str:
    return f"```python\n{text}\n```"
