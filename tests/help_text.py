"""The flags of a --help, as a reader sees them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

PYTHON = r"^\s*(usage: )?python3? "  # a fresh shell has no python with the course's packages


def help_of(main: Callable[[list[str]], Any], arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `main` prints for --help, which must end with status 0."""
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def without_default(said: str) -> list[str]:
    """The flags that take a value, need not be given, and do not say `(default: ...)`; and those without a sentence."""
    usage, _, options = said.partition("\noptions:\n")
    usage = " ".join(usage.split())
    wrong = []
    for entry in re.findall(r"^  (--.*(?:\n {4,}.*)*)", options, re.M):
        flag, words = entry.split()[0].rstrip(","), " ".join(entry.split())
        optional_value = re.search(rf"\[{flag} [^|]", usage)
        if not re.search(r"[a-z]{2,} [a-z]", words) or (optional_value and "(default: " not in words):
            wrong.append(flag)
    return wrong
