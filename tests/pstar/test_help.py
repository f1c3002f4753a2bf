"""pstar's --help says for each flag what it does, and its default."""

from __future__ import annotations

import pytest

from pstar.cli import main
from tests.help_text import help_of, without_default


@pytest.mark.parametrize("command", ["config", "plan", "trace"])
def test_each_flag_of_pstar_has_a_sentence_and_a_default(command: str, capsys) -> None:
    assert not without_default(help_of(main, [command], capsys))
