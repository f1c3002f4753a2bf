"""Fixtures that the tests of pages share: a shell with a user's environment, and the built site."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.browser import Browser, serve, shared
from tests.harness.handed_over import VARIABLE, handing_over
from tests.limits import HANGS_S

OF_AN_ENVIRONMENT = re.compile(r"(?:python|pip|pytest|tensorboard|pstar|torchrun|horovodrun|mkdocs|zensical)[\d.]*")
ROOT = Path(__file__).resolve().parents[2]


def programs(folder: Path) -> Path:
    """Fills a folder with links to the programs of the PATH, without those of an environment."""
    for place in os.environ["PATH"].split(os.pathsep):
        if Path(place).is_dir() and Path(place).resolve() != Path(sys.executable).parent.resolve():
            for program in Path(place).iterdir():
                if not OF_AN_ENVIRONMENT.fullmatch(program.name) and not (folder / program.name).is_symlink():
                    (folder / program.name).symlink_to(program)
    return folder


@pytest.fixture(autouse=True, scope="package")
def _programs_are_forked() -> Iterator[None]:
    """Programs that docs/generate starts, also while it builds the site, need not import torch. Closes the browser."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in handing_over(dict(os.environ)).items():
            if os.environ.get(name) != value:
                patch.setenv(name, value)
        yield
    if shared.cache_info().currsize:
        shared().close()
        shared.cache_clear()


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory):
    """shell(command, cwd=ROOT, **variables) runs a line of bash and returns its output; asserts its status.

    The Python programs that it starts are forked from a process that has torch loaded (tests/harness/handed_over.py), but
    not with from_nothing=True.

    The shell is a fresh one: no python, pytest, tensorboard, pstar or torchrun is on its PATH, and no environment is active.
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
        "PATH": str(programs(tmp_path_factory.mktemp("bin"))), "OMP_NUM_THREADS": "1",
        "GPT2_CHINESE_CACHE": str(tmp_path_factory.mktemp("tokens")), "NO_MKDOCS_2_WARNING": "1",
    }  # fmt: skip
    environment.pop("VIRTUAL_ENV", None)

    def run(command: str, cwd: Path = ROOT, status: int = 0, from_nothing: bool = False, **variables: str) -> str:
        given = handing_over(environment | variables)
        if from_nothing:
            del given[VARIABLE]
        done = subprocess.run(["bash", "-ec", command], cwd=cwd, env=given, stdout=subprocess.PIPE,
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


@pytest.fixture(scope="module")
def browser() -> Browser:
    """The headless browser, with a new tab for the tests of a file."""
    shared().renew()
    return shared()


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The address of the served site, without a slash at its end."""
    with serve(site) as base:
        yield base
