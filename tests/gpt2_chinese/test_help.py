"""Each --help has commands for a fresh shell, and a sentence and a default for each flag."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.help_text import PYTHON, help_of, without_default

COMMANDS = (
    "corpora.__main__ convert", "evaluate.__main__", "generate.__main__", "hangs", "tokens",
    "vocabulary.__main__", "vocabulary.__main__ check", "vocabulary.__main__ train", "weights", "weights export",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_names_a_command_that_runs_and_a_default_for_each_flag(command: str, capsys) -> None:
    name, *arguments = command.split()
    said = help_of(importlib.import_module(f"gpt2_chinese.{name}").main, arguments, capsys)
    module = name.removesuffix(".__main__")
    assert said.startswith(f"usage: bash scripts/python.sh -m gpt2_chinese.{module} ")
    assert not re.search(PYTHON, said, re.M)
    assert not without_default(said)


def test_a_flag_without_a_default_or_a_sentence_is_found() -> None:
    said = "usage: x [--a A] --b B [--c]\n\noptions:\n  --a A  two words\n  --b B  two words\n  --c    one\n"
    assert without_default(said) == ["--a", "--c"]
