"""Fixtures of the tests on two nodes: the nodes, the curve of chapter 00, and why a machine cannot run them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NoReturn

import pytest

from tests.chapters.law import curves
from tests.cluster.nodes import Node, reason_why_not, two_nodes
from tests.harness.pool import preload
from tests.tally import STRICT_VARIABLE

preload("tests.chapters.inside", "torch.utils.tensorboard", "torch.distributed.run")  # as tests/chapters/conftest.py does


def skip_or_fail(why: str, could_change: bool) -> NoReturn:
    """Skips a test. Where CI is set it fails, if whoever set the machine up could change that."""
    if could_change and os.environ.get(STRICT_VARIABLE):
        pytest.fail(why, pytrace=False)
    pytest.skip(why)


@pytest.fixture(scope="session")
def needs_nodes() -> None:
    """Skips without root, the tools or the kernel's permission. Where CI is set only the kernel's refusal is a skip."""
    why, could_change = reason_why_not()
    if why:
        skip_or_fail(why, could_change)


@pytest.fixture(scope="module")
def nodes(needs_nodes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """Two nodes for the tests of a file that neither kill nor cut anything."""
    with two_nodes(tmp_path_factory.mktemp("nodes")) as both:
        yield both


@pytest.fixture(scope="session")
def curve(ranks, tmp_path_factory: pytest.TempPathFactory):
    """curve(steps, grad_accum): the rows of chapter 00 in the run that tests/chapters/law.py describes."""
    return curves(ranks, tmp_path_factory.mktemp)
