"""constraints.txt, environment.yml and pyproject.toml agree, and pin every package that an installation needs."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
import tomllib
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """Returns {name: version} of lines `name==version`; any other line that is not a comment is an error."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    wrong = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[\w.]+", line)]
    assert not wrong, f"constraints.txt pins exact versions only, without build suffixes: {wrong}"
    return {normalised(name): version for name, version in (line.split("==") for line in lines)}


def needed(requirements: list[str], extras: set[str]) -> set[str]:
    """Returns the names of all packages that the requirements need here, directly or indirectly."""
    packaging = pytest.importorskip("packaging.requirements")
    found: dict[str, set[str]] = {}
    waiting = [(packaging.Requirement(text), extras) for text in requirements]
    while waiting:
        requirement, asked = waiting.pop()
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in (asked or {""})):
            continue
        name = normalised(requirement.name)
        if name in found and requirement.extras <= found[name]:
            continue
        found.setdefault(name, set()).update(requirement.extras)
        waiting += [(packaging.Requirement(text), found[name]) for text in importlib.metadata.requires(name) or []]
    return set(found)


def direct_requirements() -> list[str]:
    return PYPROJECT["dependencies"] + sum(PYPROJECT["optional-dependencies"].values(), [])


def unpinned(requirements: list[str], pinned: dict[str, str]) -> set[str]:
    return {name for name in needed(requirements, set()) - set(pinned) if not name.startswith(PINNED_BY_TORCH)}


# A CUDA build of torch needs libraries and pins them itself; the build in CI needs one of them, for a test.
PINNED_BY_TORCH = ("nvidia-", "cuda-", "triton")
PINNED = pins((REPO / "constraints.txt").read_text())
# Another environment may have other versions, and those may need other packages.
in_pinned_environment = pytest.mark.skipif(
    Path(sys.prefix).resolve() != (REPO / ".venv").resolve(), reason="an environment of the user's own"
)


@in_pinned_environment
def test_all_that_gets_installed_is_pinned():
    assert unpinned(direct_requirements(), PINNED) == set()


@in_pinned_environment
def test_a_forgotten_pin_is_found():
    assert unpinned(direct_requirements(), {name: PINNED[name] for name in PINNED if name != "jinja2"}) == {"jinja2"}


@in_pinned_environment
@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="others need less")
def test_nothing_is_pinned_that_nothing_needs():
    assert set(PINNED) - needed(direct_requirements(), set()) == set()


@in_pinned_environment
def test_the_installed_versions_are_the_pinned_ones():
    installed = {name: importlib.metadata.version(name).partition("+")[0] for name in PINNED}
    assert installed == PINNED


def test_pins_satisfy_pyproject():
    packaging = pytest.importorskip("packaging.requirements")
    for requirement in map(packaging.Requirement, direct_requirements()):
        if requirement.name.startswith(PINNED_BY_TORCH):
            continue
        assert requirement.specifier.contains(PINNED[normalised(requirement.name)]), str(requirement)


@pytest.mark.parametrize("line", ["torch>=2", "torch==2.13.0+cpu", "-r other.txt"])
def test_a_loose_pin_is_refused(line):
    with pytest.raises(AssertionError):
        pins(line)


def test_conda_users_get_the_same():
    """environment.yml takes the versions from constraints.txt and installs the same extras as tests/run.sh."""
    yaml = pytest.importorskip("yaml")
    dependencies = yaml.safe_load((REPO / "environment.yml").read_text())["dependencies"]
    python = next(item for item in dependencies if isinstance(item, str) and item.startswith("python"))
    extras = re.search(r"setup\.sh\" (\S+)", (REPO / "tests" / "run.sh").read_text()).group(1)
    assert dependencies == [python, "pip", {"pip": ["-c constraints.txt", f"-e .[{extras}]"]}]
    assert set(extras.split(",")) == set(PYPROJECT["optional-dependencies"])


def test_all_name_the_same_oldest_python():
    oldest = PYPROJECT["requires-python"].removeprefix(">=")
    assert f"python={oldest}" in (REPO / "environment.yml").read_text()
    setup = (REPO / "scripts" / "setup.sh").read_text()
    assert f"sys.version_info < ({oldest.replace('.', ', ')})" in setup and f"no Python {oldest} or newer" in setup
