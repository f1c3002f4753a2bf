"""Dockerfile, apptainer.def and the READMEs say the same. tests/fresh takes the steps of Dockerfile in a new Debian."""

from __future__ import annotations

import re

import pytest

from tests.fresh.steps import REPO, of_apptainer, of_docker, package_names, recipe

DOCKER = (REPO / "Dockerfile").read_text()
APPTAINER = (REPO / "apptainer.def").read_text()
READMES = ("README.md", "README.zh.md")


def test_docker_and_apptainer_take_the_same_steps() -> None:
    assert of_docker(DOCKER) == of_apptainer(APPTAINER)


@pytest.mark.parametrize("name", READMES)
def test_they_install_what_the_readme_asks_for_and_run_its_first_command(name: str) -> None:
    text = (REPO / name).read_text()
    (asked,) = re.findall(r"^apt-get install .*?(?=  #|$)", text, flags=re.MULTILINE)
    assert package_names(asked) == recipe().package_names
    assert recipe().program == re.search(r"```bash\n(.*?)  #", text)[1].strip()


@pytest.mark.parametrize("before, after", [
    ("git python3-venv", "git python3-venv g++"),
    ("RUN apt-get update\n", ""),
    ("bookworm", "trixie"),
    ("07_patrickstar/train.sh", "02_ddp/train.sh"),
])
def test_a_difference_is_found(before: str, after: str) -> None:
    assert before in DOCKER and of_docker(DOCKER.replace(before, after)) != of_apptainer(APPTAINER)


def test_an_instruction_that_nobody_compares_is_refused() -> None:
    with pytest.raises(ValueError, match="ADD"):
        of_docker(DOCKER + "ADD more.tar /course\n")
    with pytest.raises(ValueError, match="files"):
        of_apptainer(APPTAINER + "\n%files\n    more /course\n")


def test_docker_leaves_out_what_git_leaves_out() -> None:
    """A `.venv` in the image would name the host's Python, and `runs` can be large."""

    def entries(name: str) -> list[str]:
        return [line for line in (REPO / name).read_text().splitlines() if line and not line.startswith("#")]

    # In .gitignore a name without a slash in it is meant at any depth; in .dockerignore only at the top.
    ignored = [entry.rstrip("/") for entry in entries(".gitignore")]
    assert entries(".dockerignore") == [".git", *(entry if "/" in entry else f"**/{entry}" for entry in ignored)]
