"""Holds the floor plan: who imports whom, where torch.distributed appears, how long a file may be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gpt2_chinese
from tests.layers import floor_plan

REPO = Path(__file__).parents[2]


def write(repo: Path, path: str, text: str = "") -> None:
    (repo / path).parent.mkdir(parents=True, exist_ok=True)
    (repo / path).write_text(text)


# ---- this repository


@pytest.mark.parametrize("check", floor_plan.CHECKS, ids=lambda check: check.__name__)
def test_the_repository_keeps_to_the_floor_plan(check):
    problems = check(REPO)
    assert not problems, "\n".join(["", *problems])


def test_the_checks_have_something_to_read():
    """Each part of the repository is found: no rule may hold only because it looked in the wrong place."""
    for folder in ("durable", "gpt2_chinese", "pstar", "tests", "scripts"):
        assert floor_plan.code_files(REPO, folder), folder
    for chapter in (REPO / "chapters").glob("[0-9][0-9]_*"):
        names = [path.name for path in floor_plan.python_files(REPO, f"chapters/{chapter.name}")]
        assert "train.py" in names, f"chapters/{chapter.name} has no train.py"
    for file in map(Path, floor_plan.KNOWS_RANKS):
        if (REPO / file).exists():
            names = [name for _, name in floor_plan.imports(REPO, file)]
            assert any(name.startswith("torch.distributed") for name in names), f"{file} needs no exception any more"


@pytest.mark.parametrize("module", floor_plan.QUICK_MODULES)
def test_importing_it_does_not_import_torch(module):
    if not (REPO / "gpt2_chinese" / "settings.py").exists():
        pytest.skip("gpt2_chinese is not written yet")
    code = f"import sys, gpt2_chinese.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0


def test_a_chapter_takes_its_settings_from_the_face_without_torch():
    code = "import sys; from gpt2_chinese import ParallelSettings, Settings, flag, resolve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0


def test_every_name_of_the_package_face_can_be_imported():
    missing = [name for name in gpt2_chinese.__all__ if not hasattr(gpt2_chinese, name)]
    assert not missing, missing
    with pytest.raises(ImportError, match="cannot import name 'Trainer'"):
        from gpt2_chinese import Trainer  # noqa: F401


# ---- the checks can fail


def test_a_good_example_is_green(tmp_path):
    write(tmp_path, "gpt2_chinese/__init__.py", "from importlib import import_module\n__version__ = '1'\n")
    write(tmp_path, "gpt2_chinese/errors.py")
    write(tmp_path, "gpt2_chinese/distributed/ranks.py", "import torch.distributed\nfrom ..errors import UserError\n")
    write(tmp_path, "gpt2_chinese/distributed/torchrun.py", "from .ranks import Ranks\nimport torch.distributed\n")
    write(tmp_path, "gpt2_chinese/run/run.py", "from gpt2_chinese import __version__\nfrom ..distributed import ranks")
    write(tmp_path, "pstar/__init__.py", "from pstar.engine import initialize_engine\n")
    write(tmp_path, "pstar/errors.py")
    write(tmp_path, "pstar/layout/layout.py", "import math\nfrom pstar.errors import LayoutError\n")
    write(tmp_path, "pstar/comm/collectives.py", "from torch import distributed\nfrom .. import errors\n")
    write(tmp_path, "pstar/kernels/__init__.py", "import torch\n")
    write(tmp_path, "pstar/kernels/adam.py", "from . import build\nfrom ..errors import KernelError\n")
    write(tmp_path, "pstar/optim/chunked_adam.py", "from pstar import kernels\n")
    write(tmp_path, "pstar/engine.py", "from pstar.layout import layout\nfrom pstar import optim\nimport pstar.chunks\n")
    write(tmp_path, "pstar/chunks/__init__.py", "from pstar.chunks.hooks import Hooks\n")
    write(tmp_path, "pstar/chunks/hooks.py", "import torch\nfrom pstar.chunks.unit import Unit\n")
    own = "class Unit:\n    def __init__(self, f):\n        self.f, self.g = f, lambda: 0\n    def use(self, tier):\n"
    write(tmp_path, "pstar/chunks/unit.py", own + "        tier.peak = self.use(tier)\n        tier.kind = 'near'\n")
    write(tmp_path, "durable/distributed_checkpoint.py", "import torch.distributed.checkpoint\n")
    write(tmp_path, "durable/files.py")
    write(tmp_path, "durable/folders.py", "from durable.files import flush\n")
    write(tmp_path, "pstar/checkpoint/sharded.py", "from durable.folders import digest\n")
    write(tmp_path, "chapters/02_ddp/train.py", "import torch\nfrom ddp import f\nimport gpt2_chinese\n" + "#\n" * 197)
    write(tmp_path, "chapters/02_ddp/ddp.py", "import torch.distributed as dist\n" + "#\n" * 299)
    write(tmp_path, "chapters/06_zero/train.py", "from zero import shard\n")
    write(tmp_path, "chapters/06_zero/zero/__init__.py", "from zero.stage3 import shard\n")
    write(tmp_path, "chapters/06_zero/zero/stage3.py", "import torch.distributed as dist\nfrom zero import units\n")
    write(tmp_path, "chapters/06_zero/zero/units.py")
    write(tmp_path, "chapters/07_patrickstar/train.py", "import pstar\n")
    for check in floor_plan.CHECKS:
        assert check(tmp_path) == []


@pytest.mark.parametrize(
    "path, text, said",
    [
        ("gpt2_chinese/model/gpt2.py", "import pstar.engine", "model/gpt2.py:1: gpt2_chinese must not import pstar"),
        ("gpt2_chinese/model/gpt2.py", "def f():\n    from pstar import engine", "gpt2.py:2: gpt2_chinese must not import"),
        ("gpt2_chinese/model/gpt2.py", "import importlib\nimportlib.import_module('chapters.x')", "not import chapters.x"),
        ("pstar/engine.py", "from gpt2_chinese.model import GPT2LMHeadModel", "pstar must not import gpt2_chinese"),
        ("durable/files.py", "from pstar.errors import PstarError", "durable must not import pstar.errors"),
        ("durable/files.py", "def f():\n    import gpt2_chinese.errors", "files.py:2: durable must not import gpt2_chinese"),
        ("durable/files.py", "from durable.folders import digest", "files (row 1) must not import folders (row 2)"),
        ("durable/files.py", "import torch.distributed", "files.py:1: torch.distributed does not belong here"),
        ("durable/news.py", "", "unknown room of durable; add it to the table"),
        ("pstar/kernels/adam.py", "import transformers", "pstar must not import transformers"),
        ("chapters/02_ddp/train.py", "from server import Server", "must not import server.Server, which is another's"),
        ("chapters/02_ddp/train.py", "import zero", "must not import zero, which is another's"),
        ("chapters/06_zero/zero/stage3.py", "import server", "must not import server, which is another's"),
        ("chapters/01_parameter_server/server.py", "def f():\n    import books", "circle: books -> server -> books"),
        ("chapters/06_zero/zero/comm.py", "from zero.stage3 import x", "circle: zero.stage3 -> zero.comm -> zero.stage3"),
        ("chapters/06_zero/zero/comm.py", "from zero import x", "zero.__init__ -> zero.stage3 -> zero.comm -> zero"),
        ("chapters/02_ddp/train.py", "import sys\nsys.path.insert(0, '../01_server')", "must not use sys.path"),
        ("chapters/02_ddp/train.py", "import runpy\nrunpy.run_path('x')", "must not use runpy.run_path"),
        ("chapters/02_ddp/train.py", "import torch.distributed as dist", "torch.distributed does not belong here"),
        ("gpt2_chinese/evaluate/loss.py", "import torch\n\ntorch.distributed.barrier()", "loss.py:3: torch.distributed"),
        ("gpt2_chinese/distributed/torchrun.py", "import horovod.torch as hvd", "run.py:1: horovod does not belong here"),
        ("pstar/engine.py", "from torch import distributed as dist", "engine.py:1: torch.distributed does not belong"),
        ("pstar/engine.py", "from torch.distributed import barrier", "engine.py:1: torch.distributed does not belong"),
        ("pstar/memory/tier.py", "from pstar import comm", "memory (row 2) must not import comm (row 3)"),
        ("pstar/memory/tier.py", "from ..comm import collectives", "memory (row 2) must not import comm.collectives (row 3"),
        ("pstar/layout/layout.py", "import pstar.schedule", "layout (row 1) must not import schedule (row 1)"),
        ("pstar/kernels/adam.py", "from ..schedule import x", "kernels (row 1) must not import schedule (row 1"),
        ("pstar/checkpoint/state.py", "from pstar import initialize_engine", "(row 8) must not import __init__ (row 11)"),
        ("pstar/chunks/unit.py", "from pstar.chunks.hooks import x", "unit (row 0) must not import hooks (row 6)"),
        ("pstar/chunks/hooks.py", "from pstar.chunks import Chunks", "hooks (row 6) must not import __init__ (row 8)"),
        ("pstar/chunks/prefetch.py", "from . import step", "prefetch (row 4) must not import step (row 5)"),
        ("pstar/chunks/new.py", "", "unknown module of pstar/chunks; add it to the table"),
        ("pstar/cli.py", "tier.hook = lambda: 0", "cli.py:1: tier.hook is assigned a callable"),
        ("pstar/cli.py", "class A:\n    def f(self, b):\n        b.y = self.f", "cli.py:3: b.y is assigned a callable"),
        ("pstar/cli.py", "class A:\n    def f(self):\n        self.b.c, x = self.f, 1", "self.b.c is assigned a callable"),
        ("pstar/cli.py", "def f(): ...\nsetattr(a, 'b', f)", "cli.py:2: a.b is assigned a callable"),
        ("pstar/cli.py", "def f(a, g: Callable[[], int]):\n    a.b = g if a else None", "a.b is assigned a callable"),
        ("pstar/cli.py", "a.b: object = functools.partial(print, 1)", "a.b is assigned a callable"),
        ("pstar/cli.py", "import torch\ntorch.empty(3, device='cpu')", "cli.py:2: torch.empty must be given dtype"),
        ("pstar/cli.py", "x = torch.tensor(f(0), dtype=int)", "cli.py:1: torch.tensor must be given device"),
        ("pstar/cli.py", "torch.zeros(3).sum()", "cli.py:1: torch.zeros must be given dtype and device"),
        ("pstar/errors.py", "def f():\n    from pstar import cli", "errors.py:2: errors (row 0) must not import cli"),
        ("pstar/comm/collectives.py", "from .shared_memory import x", "circle: comm.collectives -> comm.shared_memory"),
        ("pstar/layout/layout.py", "import torch", "layout is made of numbers only and must not import torch"),
        ("pstar/numerics/loss_scaler.py", "from torch import Tensor", "is made of numbers only and must not import torch"),
        ("pstar/prefetch.py", "", "unknown room of pstar; add it to the table"),
        ("pstar/search/chunk_size.py", "", "unknown room of pstar; add it to the table"),
        ("chapters/02_ddp/train.py", "#\n" * 201, "201 lines, its budget is 200"),
        ("chapters/02_ddp/ddp.py", "#\n" * 301, "301 lines, its budget is 300"),
        ("gpt2_chinese/files.py", "from gpt2_chinese.run.run import Run", "files (row 1) must not import run.run (row 8)"),
        ("gpt2_chinese/settings.py", "def f():\n    from gpt2_chinese.run import run", "(row 4) must not import run.run"),
        ("gpt2_chinese/data/batches.py", "from ..checkpoint import find", "(row 6) must not import checkpoint.find (row 6)"),
        ("gpt2_chinese/data/batches.py", "from gpt2_chinese import Run", "data (row 6) must not import __init__ (row 10)"),
        ("gpt2_chinese/run/run.py", "import gpt2_chinese", "run (row 8) must not import __init__ (row 10)"),
        ("gpt2_chinese/checkpoint/find.py", "from .load import load", "in a circle: checkpoint.find -> checkpoint.load -> "),
        ("gpt2_chinese/trainer/loop.py", "", "unknown room of gpt2_chinese; add it to the table"),
        ("gpt2_chinese/model/gpt2.py", "#\n" * 331, "331 lines, its budget is 330"),
        ("pstar/kernels/adam.cu", "//\n" * 501, "501 lines, its budget is 500"),
        ("scripts/slurm.sh", "#\n" * 501, "501 lines, its budget is 500"),
        ("tests/pstar/test_x.py", "#\n" * 601, "601 lines, its budget is 600"),
    ],
)
def test_a_bad_example_is_red(tmp_path, path, text, said):
    for module in ("comm/collectives", "schedule/schedule", "cli", "chunks/hooks", "chunks/step"):
        write(tmp_path, f"pstar/{module}.py")
    write(tmp_path, "pstar/__init__.py", "def initialize_engine(): ...")
    write(tmp_path, "pstar/engine.py", "from pstar import optim")
    write(tmp_path, "pstar/optim/chunked_adam.py")
    write(tmp_path, "pstar/comm/shared_memory.py", "from pstar.comm import collectives")
    write(tmp_path, "durable/folders.py", "import hashlib")
    write(tmp_path, "chapters/01_parameter_server/server.py")
    write(tmp_path, "chapters/01_parameter_server/books.py", "from server import Server")
    write(tmp_path, "chapters/06_zero/zero/__init__.py", "from zero.stage3 import x")
    write(tmp_path, "chapters/06_zero/zero/stage3.py", "from zero.comm import Comm")
    write(tmp_path, "chapters/06_zero/zero/comm.py", "import torch.distributed")
    write(tmp_path, "gpt2_chinese/run/run.py")
    write(tmp_path, "gpt2_chinese/checkpoint/find.py")
    write(tmp_path, "gpt2_chinese/checkpoint/load.py", "from gpt2_chinese.checkpoint import find")
    assert [problem for check in floor_plan.CHECKS for problem in check(tmp_path)] == []
    write(tmp_path, path, text)
    problems = [problem for check in floor_plan.CHECKS for problem in check(tmp_path)]
    assert len(problems) == 1 and said in problems[0], problems


def test_environments_and_generated_folders_are_not_read(tmp_path):
    for folder in (".venv/lib", "build/lib", "runs/x", "pstar/__pycache__"):
        write(tmp_path, f"{folder}/long.py", "#\n" * 1000)
    assert floor_plan.over_budget(tmp_path) == []
