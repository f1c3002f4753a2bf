"""Writes escapes for characters that cannot be written: \\u4eca for a Chinese one in ISO-8859-1, \\n in one line."""

from __future__ import annotations

import io
import sys


def escape_what_stdout_lacks() -> None:
    """Lets print() write escapes to stdout for characters that its encoding lacks.

    Python raises UnicodeEncodeError for them, which would end a training run at the first Chinese word that it prints.
    stderr has escapes anyway. A stream that is no file of the system, as in a notebook, stays as it is.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def printable(text: object) -> str:
    """str(text) in one line, with escapes for line breaks, control characters and half characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def utf8(text: str) -> str:
    """The text with escapes for what UTF-8 lacks: half characters, as Python has for the bytes of a file name in GBK.

    JSON has the same escapes.
    """
    return text.encode(errors="backslashreplace").decode()
