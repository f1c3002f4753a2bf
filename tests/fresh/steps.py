"""What Dockerfile and apptainer.def say: the base, the steps that prepare the machine, the program that it runs."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[2]


@dataclass(frozen=True)
class Recipe:
    """How a machine is made.

    Attributes:
        base: what it begins with, e.g. debian:bookworm-slim.
        steps: shell commands, run in order in the checkout.
        program: what it runs in the end, seen from the checkout.
    """

    base: str
    steps: tuple[str, ...]
    program: str

    @property
    def packages(self) -> tuple[str, ...]:
        """The steps that install Debian's packages, as root."""
        return tuple(step for step in self.steps if step.startswith("apt-get "))

    @property
    def package_names(self) -> set[str]:
        """The packages that these steps install."""
        return set().union(*(package_names(step) for step in self.packages))


def package_names(step: str) -> set[str]:
    """The packages that an apt-get command installs."""
    words = shlex.split(step)
    return {word for word in words[2:] if not word.startswith("-")} if words[1] == "install" else set()


def of_docker(text: str) -> Recipe:
    """Reads a Dockerfile. Raises ValueError for an instruction that could install something unseen."""
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    if unknown := {name for name, _ in lines} - {"FROM", "COPY", "WORKDIR", "ENV", "RUN", "CMD"}:
        raise ValueError(f"an instruction that is not compared: {', '.join(sorted(unknown))}")
    (base,), (program,) = ([rest for name, rest in lines if name == one] for one in ("FROM", "CMD"))
    return Recipe(base, tuple(rest for name, rest in lines if name == "RUN"), shlex.join(json.loads(program)))


def of_apptainer(text: str) -> Recipe:
    """Reads an Apptainer definition file. Raises ValueError for a section that could install something unseen."""
    header, *sections = re.split(r"^%(?=\w)", "\n".join(line for line in text.splitlines() if line[:1] != "#"), flags=re.M)
    lines = {}
    for section in sections:
        name, _, body = section.partition("\n")
        lines[name] = [line.strip() for line in body.splitlines() if line.strip()]
    if unknown := set(lines) - {"setup", "environment", "post", "runscript"}:
        raise ValueError(f"a section that is not compared: {', '.join(sorted(unknown))}")
    base = re.search(r"^From: (.*)$", header, flags=re.M)[1]
    first, *steps = lines["post"]
    (program,) = lines["runscript"]
    if first != "cd /course":
        raise ValueError("%post does not begin with cd /course")
    return Recipe(base, tuple(steps), program.removeprefix("exec ").removesuffix(' "$@"').replace("/course/", ""))


def recipe() -> Recipe:
    """The recipe of Dockerfile."""
    return of_docker((REPO / "Dockerfile").read_text())
