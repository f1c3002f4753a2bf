"""The floor plan as tables, and functions that read a checkout against it. Each returns the problems it finds.

Imports are read from the syntax tree, so nothing is executed and an import inside a function counts as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

# ---- the tables

# A folder, and what no file in it may import.
FORBIDDEN = {
    "durable": ("gpt2_chinese", "pstar", "chapters", "tests"),
    "gpt2_chinese": ("pstar", "chapters", "tests"),
    "pstar": ("gpt2_chinese", "chapters", "tests", "transformers"),
}

# Rooms of a package, a folder or a file beside them, from bottom to top: a file imports from rooms of lower rows only.
# Files of one folder may import each other, without a circle. Nobody inside imports from the package's face, __init__.
PSTAR_ROWS = {
    "errors": 0,
    "deepspeed": 1,
    "layout": 1,
    "schedule": 1,
    "profile": 1,
    "modules": 1,
    "kernels": 1,
    "config": 2,
    "memory": 2,
    "comm": 3,
    "numerics": 4,
    "planner": 5,
    "chunks": 6,
    "cli": 6,
    "optim": 7,
    "checkpoint": 8,
    "engine": 9,
    "runtime": 10,
    "__init__": 11,
}
# The same inside a folder. Files of a folder do not import from its face, __init__.
FOLDER_ROWS = {
    "pstar/chunks": {
        "activation_streams": 0,
        "borrowed": 0,
        "interrupts": 0,
        "modes": 0,
        "peak_watch": 0,
        "unit": 0,
        "update_tiers": 0,
        "activation_offload": 1,
        "read_only": 1,
        "room": 1,
        "parameters": 2,
        "gradients": 3,
        "kept_gradients": 4,
        "room_ahead": 3,
        "unshard": 3,
        "prefetch": 4,
        "resident": 4,
        "step": 5,
        "assemble": 6,
        "hooks": 6,
        "stages": 7,
        "__init__": 8,
    },
}
# Objects of pstar get their callables in the constructor. Exceptions: pstar replaces these in the user's modules, where copy
# and pickle look up the first, moves and casts the second.
ASKED_OF_AN_OBJECT = {"__reduce_ex__", "_apply"}
# torch's functions that make a tensor of the default dtype, or on the default device, if they are not given another.
MAKE_TENSORS = {f"torch.{name}" for name in (
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones",
    "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros")}
# Pure functions of numbers: files, and folders with all that is in them.
PSTAR_WITHOUT_TORCH = ("errors", "config", "deepspeed", "layout", "schedule", "profile", "numerics.loss_scaler",
                       "planner.gpt_shape", "planner.adam_choice", "planner.disk_traffic", "planner.early_updates",
                       "planner.predict", "planner.paper", "planner.shares", "planner.gpus", "planner.layout_memory",
                       "planner.layout_time", "planner.layouts", "planner.course_commands")

GPT2_ROWS = {
    "background": 0,
    "errors": 0,
    "locks": 0,
    "progress": 0,
    "workers": 0,
    "files": 1,
    "corpus": 2,
    "model": 2,
    "vocabulary": 3,
    "corpora": 4,
    "settings": 4,
    "distributed": 5,
    "data": 6,
    "checkpoint": 6,
    "hangs": 7,
    "tokens": 7,
    "weights": 7,
    "generate": 7,
    "run": 8,
    "evaluate": 9,
    "__init__": 10,
}

DURABLE_ROWS = {
    "boxes": 0,
    "calls": 0,
    "closed_pipe": 0,
    "control_group": 0,
    "distributed_checkpoint": 0,
    "printable": 0,
    "command_line": 1,
    "cores": 1,
    "files": 1,
    "folders": 2,
    "hang_report": 2,
    "__init__": 3,
}

# The only places where torch.distributed appears, besides the technique files of chapters. Those of checkpoints read or
# write the format of torch.distributed.checkpoint, and make no collective of their own.
KNOWS_RANKS = ("gpt2_chinese/distributed/flight_recorder.py", "gpt2_chinese/distributed/ranks.py",
               "gpt2_chinese/distributed/torchrun.py", "gpt2_chinese/distributed/torchrun_launcher.py",
               "gpt2_chinese/distributed/meeting.py", "gpt2_chinese/checkpoint/sharded.py", "pstar/comm/collectives.py",
               "pstar/comm/rail.py", "pstar/comm/node_groups.py", "pstar/comm/member_group.py",
               "pstar/checkpoint/sharded.py", "durable/distributed_checkpoint.py")
# The same for Horovod: 03 and 04 share the ranks that horovodrun starts, as the others share those of torchrun.py.
KNOWS_HOROVOD = ("gpt2_chinese/distributed/horovod_launcher.py", "gpt2_chinese/distributed/horovod_ranks.py")

# These answer a wrong flag or a wrong corpus before torch is loaded.
QUICK_MODULES = ("settings", "errors", "corpus", "hangs", "tokens", "weights", "model.config", "vocabulary.profiles",
                 "vocabulary.fit", "vocabulary.__main__", "corpora.convert", "corpora.__main__", "data.token_cache",
                 "generate.sampling", "generate.writer", "generate.__main__", "checkpoint.trained_model", "checkpoint.load",
                 "evaluate.loss", "evaluate.perplexity", "evaluate.choices", "evaluate.samples", "evaluate.report",
                 "evaluate.__main__", "run.resolve", "distributed.devices",
                 "distributed.horovod_launcher")

CODE = {".py", ".sh", ".cpp", ".cu", ".cuh", ".h"}
NOT_OURS = {"build", "dist", "site", "runs", "node_modules", "__pycache__"}


def line_budget(path: Path) -> int:
    """Returns the number of lines that the file at `path` (relative to the repository) may have."""
    if path.parts[0] == "chapters" and path.suffix == ".py":
        return 200 if path.name == "train.py" else 300
    if path.as_posix() == "gpt2_chinese/model/gpt2.py":
        return 330
    return 600 if path.parts[0] == "tests" else 500


# ---- reading


def code_files(repo: Path, folder: str = ".", suffixes: set[str] = CODE) -> list[Path]:
    """Returns the code files below `repo/folder`, relative to `repo`; environments and generated folders left out."""
    found = []
    for path in sorted((repo / folder).rglob("*")):
        relative = path.relative_to(repo)
        ours = not any(part in NOT_OURS or part.startswith(".") for part in relative.parts)
        if ours and path.suffix in suffixes and path.is_file():
            found.append(relative)
    return found


def python_files(repo: Path, folder: str) -> list[Path]:
    """Returns the Python files below `repo/folder`, relative to `repo`."""
    return code_files(repo, folder, {".py"})


def imports(repo: Path, file: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of all that `file` imports; `from a import b` yields a.b, for b may be a module.

    Also found: relative imports, `importlib.import_module("a.b")`, `__import__("a")`.
    """
    for node in ast.walk(ast.parse((repo / file).read_text(), str(file))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            package = file.parts[: len(file.parts) - node.level] if node.level else ()
            base = ".".join([*package, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def attributes(repo: Path, file: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of attribute accesses such as `torch.distributed.barrier`."""
    for node in ast.walk(ast.parse((repo / file).read_text(), str(file))):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def is_or_below(name: str, module: str) -> bool:
    """True for `module` itself and for what is inside it."""
    return name == module or name.startswith(module + ".")


# ---- checking


def forbidden_imports(repo: Path) -> list[str]:
    """gpt2_chinese and pstar know neither each other nor the chapters; durable, which both use, knows none of them."""
    return [
        f"{file}:{line}: {folder} must not import {name}"
        for folder, modules in FORBIDDEN.items()
        for file in python_files(repo, folder)
        for line, name in imports(repo, file)
        if any(is_or_below(name, module) for module in modules)
    ]


def chapters_that_reach_out(repo: Path) -> list[str]:
    """No chapter imports another, nor bends the import path so that it could."""
    problems = []
    modules: dict[str, set[str]] = {}  # what a chapter's programs can import: its files, and its folders
    for file in python_files(repo, "chapters"):
        if len(file.parts) > 2:
            modules.setdefault(file.parts[1], set()).add(file.parts[2].removesuffix(".py"))
    chapters = sorted(modules)
    for chapter in chapters:
        elsewhere = set().union(*(modules[other] for other in chapters if other != chapter)) - modules[chapter]
        for file in python_files(repo, f"chapters/{chapter}"):
            for line, name in imports(repo, file):
                if name.partition(".")[0] in elsewhere | {"chapters", "tests"}:
                    problems.append(f"{file}:{line}: a chapter must not import {name}, which is another's")
            for line, name in attributes(repo, file):
                last = name.rpartition(".")[2]
                if name == "sys.path" or last in ("spec_from_file_location", "run_path"):
                    problems.append(f"{file}:{line}: a chapter must not use {name} (no chapter imports another)")
    return problems


def chapters_in_circles(repo: Path) -> list[str]:
    """Inside a chapter's folder, and the folders in it, the imports of its files make no circle."""
    problems = []
    for folder in sorted(path for path in (repo / "chapters").glob("*") if path.is_dir()):
        edges: dict[str, set[str]] = {}
        for file in python_files(folder, "."):
            module = ".".join(file.with_suffix("").parts)
            targets = {_file_of(folder, name.split(".")) for _, name in imports(folder, file)}
            edges[module] = targets - {"", module}
        circles = [" -> ".join(circle) for circle in _circles(edges)]
        problems += [f"chapters/{folder.name}: the imports go in a circle: {circle}" for circle in circles]
    return problems


def _file_of(folder: Path, names: list[str]) -> str:
    """The file of a chapter that a.b.c leads to, a folder's face as a.__init__; '' where it leads out of the chapter."""
    for number in range(len(names), 0, -1):
        path = folder.joinpath(*names[:number])
        if path.with_suffix(".py").exists():
            return ".".join(names[:number])
        if (path / "__init__.py").exists():
            return ".".join([*names[:number], "__init__"])
    return ""


def strangers_to_ranks(repo: Path) -> list[str]:
    """torch.distributed and horovod appear in KNOWS_RANKS, KNOWS_HOROVOD and in the technique files of chapters only."""
    problems = []
    for folder in ("durable", "gpt2_chinese", "pstar", "chapters"):
        for file in python_files(repo, folder):
            for library, known in (("torch.distributed", KNOWS_RANKS), ("horovod", KNOWS_HOROVOD)):
                if file.as_posix() in known or (folder == "chapters" and file.name != "train.py"):
                    continue
                names = [*imports(repo, file), *attributes(repo, file)]
                seen = {line for line, name in names if is_or_below(name, library)}
                problems += [f"{file}:{line}: {library} does not belong here" for line in sorted(seen)]
    return problems


def rooms_out_of_order(repo: Path) -> list[str]:
    """Inside a package imports go down the rows of its rooms, by full names, and its files make no circle."""
    packages = {"durable": DURABLE_ROWS, "gpt2_chinese": GPT2_ROWS, "pstar": PSTAR_ROWS}
    return [problem for package, rows in packages.items() for problem in _out_of_order(repo, package, rows)]


def _out_of_order(repo: Path, package: str, rows: dict[str, int]) -> list[str]:
    problems = []
    edges: dict[str, set[str]] = {}
    for file in python_files(repo, package):
        module, room = ".".join(file.with_suffix("").parts[1:]), file.parts[1].removesuffix(".py")
        if room not in rows:
            problems.append(f"{file}: unknown room of {package}; add it to the table of rows in {_here()}")
            continue
        for line, name in imports(repo, file):
            if not is_or_below(name, package) or name == f"{package}.__version__":
                continue
            target = _module_of(repo, name.split(".")[1:], package)
            target_room = target.split(".")[0]
            if target_room == "__init__" or (target_room != room and rows.get(target_room, 99) >= rows[room]):
                where = f"row {rows.get(target_room, 'unknown')}"
                problems.append(f"{file}:{line}: {room} (row {rows[room]}) must not import {target} ({where})")
            elif target != module:
                edges.setdefault(module, set()).add(target)
    return problems + [f"{package}: the imports go in a circle: {' -> '.join(circle)}" for circle in _circles(edges)]


def numbers_that_know_tensors(repo: Path) -> list[str]:
    """What PSTAR_WITHOUT_TORCH names is tested and run without torch, so it must not import it."""
    return [f"{file}:{line}: {file.stem} is made of numbers only and must not import {name}"
            for file in python_files(repo, "pstar")
            if any(is_or_below(".".join(file.with_suffix("").parts[1:]), each) for each in PSTAR_WITHOUT_TORCH)
            for line, name in imports(repo, file) if is_or_below(name, "torch")]


def _module_of(repo: Path, names: list[str], package: str) -> str:
    """The module that a.b.c leads to: as many of the names as are folders or files; __init__ where none is."""
    found: list[str] = []
    for name in names:
        path = repo.joinpath(package, *found, name)
        if not (path.is_dir() or path.with_suffix(".py").exists()):
            break
        found.append(name)
    return ".".join(found) or "__init__"


def folders_out_of_order(repo: Path) -> list[str]:
    """Inside the folders of FOLDER_ROWS imports go down their rows."""
    problems = []
    for folder, rows in FOLDER_ROWS.items():
        package = folder.replace("/", ".")
        for file in python_files(repo, folder):
            if file.stem not in rows:
                problems.append(f"{file}: unknown module of {folder}; add it to the table FOLDER_ROWS in {_here()}")
                continue
            for line, name in imports(repo, file):
                if not is_or_below(name, package):
                    continue
                target = name.removeprefix(package).lstrip(".").split(".")[0]
                target = target if target in rows else "__init__"
                if target != file.stem and rows[target] >= rows[file.stem]:
                    problems.append(f"{file}:{line}: {file.stem} (row {rows[file.stem]}) must not import {target} "
                                    f"(row {rows[target]})")
    return problems


def wired_from_outside(repo: Path) -> list[str]:
    """No module of pstar assigns a callable to an attribute of an object other than its own `self`. An object gets its
    callables in its constructor, so calls go down as imports do."""
    files = python_files(repo, "pstar")
    trees = {file: ast.parse((repo / file).read_text(), str(file)) for file in files}
    methods = set().union(*(_functions(tree) for tree in trees.values())) if trees else set()
    problems = []
    for file, tree in trees.items():
        known = _functions(tree) | _callable_arguments(tree)
        for line, target, name, value in _assignments(tree):
            own = isinstance(target, ast.Name) and target.id in ("self", "cls")
            if not own and name not in ASKED_OF_AN_OBJECT and _is_callable(value, known, methods):
                where = f"{ast.unparse(target)}.{name}"
                problems.append(f"{file}:{line}: {where} is assigned a callable: give it to the object when it is made")
    return problems


def _functions(tree: ast.AST) -> set[str]:
    """The names of all functions and methods; properties are not called by who assigns them."""
    defs = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name for node in defs if not any("property" in ast.unparse(each) for each in node.decorator_list)}


def _callable_arguments(tree: ast.AST) -> set[str]:
    return {node.arg for node in ast.walk(tree)
            if isinstance(node, ast.arg) and node.annotation is not None and "Callable" in ast.unparse(node.annotation)}


def _assignments(tree: ast.AST) -> Iterator[tuple[int, ast.expr, str, ast.expr]]:
    """Yields (line, object, name of its attribute, value), also of `a.x, b.y = f, g` and of setattr."""
    for node in ast.walk(tree):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(node, ast.Assign):
            for target in node.targets:
                several = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs += zip(target.elts, node.value.elts, strict=False) if several else [(target, node.value)]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            pairs.append((node.target, node.value))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and len(node.args) == 3:
            yield node.lineno, node.args[0], ast.unparse(node.args[1]).strip("'\""), node.args[2]
        for target, value in pairs:
            if isinstance(target, ast.Attribute):
                yield node.lineno, target.value, target.attr, value


def _is_callable(value: ast.expr, known: set[str], methods: set[str]) -> bool:
    """Whether an expression is a function, as far as its text shows. A function is a lambda, the name of a function or of
    an argument that is one, a bound method, a partial, or one of these under a condition."""
    if isinstance(value, ast.IfExp):
        return _is_callable(value.body, known, methods) or _is_callable(value.orelse, known, methods)
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in ("partial", "MethodType")
    if isinstance(value, ast.Attribute):
        return value.attr in methods
    return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in known)


def _circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Returns at most one circle, as the names along it."""

    def walk(path: list[str]) -> list[str] | None:
        for target in sorted(edges.get(path[-1], ())):
            if target in path:
                return [*path[path.index(target) :], target]
            if circle := walk([*path, target]):
                return circle
        return None

    for start in sorted(edges):
        if circle := walk([start]):
            return [circle]
    return []


def _here() -> str:
    return "tests/layers/floor_plan.py"


def over_budget(repo: Path) -> list[str]:
    """When a file outgrows its budget it is usually two ideas."""
    problems = []
    for file in code_files(repo):
        lines = len((repo / file).read_text().splitlines())
        if lines > line_budget(file):
            problems.append(f"{file}: {lines} lines, its budget is {line_budget(file)}; is it two ideas?")
    return problems


def left_to_defaults(repo: Path) -> list[str]:
    """pstar names the dtype and the device of each tensor that it makes: torch's defaults are the program's, which may set
    bf16 or a GPU for its own tensors (torch.set_default_dtype, torch.set_default_device)."""
    problems = []
    for file in python_files(repo, "pstar"):
        for node in ast.walk(ast.parse((repo / file).read_text(), str(file))):
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in MAKE_TENSORS:
                given = {keyword.arg for keyword in node.keywords}
                left = [key for key in ("dtype", "device") if key not in given]
                problems += [f"{file}:{node.lineno}: {name} must be given {' and '.join(left)}"] if left else []
    return problems


CHECKS = (forbidden_imports, chapters_that_reach_out, chapters_in_circles, strangers_to_ranks, rooms_out_of_order,
          folders_out_of_order, numbers_that_know_tensors, wired_from_outside, left_to_defaults, over_budget)
