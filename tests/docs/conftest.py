"""Fixtures that the tests of pages share: a shell with a user's environment, and the built site."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.limits import HANGS_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory):
    """shell(command, cwd=ROOT, **variables) runs a line of bash and returns its output; asserts its status.

    scripts/setup.sh finds and accepts this interpreter. If the checkout is only on PYTHONPATH and not installed, this
    fixture writes the metadata that an installation would have written.
    """
    path = [str(ROOT)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    try:
        importlib.metadata.version(project["name"])
    except importlib.metadata.PackageNotFoundError:
        folder = tmp_path_factory.mktemp("metadata")
        info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        extras = [f'Requires-Dist: {one} ; extra == "{extra}"'
                  for extra, wanted in project["optional-dependencies"].items() for one in wanted]  # fmt: skip
        lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}",
                 *(f"Requires-Dist: {one}" for one in project["dependencies"]), *extras]  # fmt: skip
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        path.append(str(folder))
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHON": sys.executable, "PYTHONIOENCODING": "utf-8",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]), "OMP_NUM_THREADS": "1",
        "GPT2_CHINESE_CACHE": str(tmp_path_factory.mktemp("tokens")), "NO_MKDOCS_2_WARNING": "1",
    }  # fmt: skip

    def run(command: str, cwd: Path = ROOT, status: int = 0, **variables: str) -> str:
        done = subprocess.run(["bash", "-ec", command], cwd=cwd, env=environment | variables, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, encoding="utf-8", timeout=HANGS_S)  # fmt: skip
        assert done.returncode == status, f"status {done.returncode}: {command}\n{done.stdout}"
        return done.stdout

    return run


@pytest.fixture(scope="session")
def site(shell, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with a user's command."""
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    shell(f"bash docs/build.sh --site-dir '{folder}'")
    return folder
