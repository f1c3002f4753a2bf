"""The report of a failure for a student: the check, the expected and the actual value, the line. No traceback."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path

from tests.exercises.exercise import HOLE, Wrong
from tests.harness import RankFailure

# A line of a Python traceback or of faulthandler's stack. The latter has no comma and begins with the latest call.
FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+),? in (?P<name>\S+)')
SECTION = re.compile(r"^---- rank (\d+) (raised|was here|printed)", re.MULTILINE)
HEADLINE = re.compile(r"^  rank (\d+) (.+)$", re.MULTILINE)


def short(error: BaseException, path: Path) -> str:
    """The failure of a check in a few lines; `path` is the student's file."""
    if isinstance(error, RankFailure):
        return _of_ranks(str(error), path)
    if isinstance(error, Wrong):
        return str(error)
    if isinstance(error, SyntaxError):
        return f"{path.name}, line {error.lineno}: {error.msg}"
    frames = [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    return _said(f"{type(error).__name__}: {error}", _place(frames, path))


def _said(line: str, place: str) -> str:
    line = re.sub(r"^(raised )?NotImplementedError: (?=.*" + HOLE + ")", "", line)
    return f"{line}\n  {place}" if place else line


def _place(frames: list[tuple[str, int, str]], path: Path) -> str:
    """The innermost line of the student's file; the innermost frame is the last one."""
    for file, line, name in reversed(frames):
        if Path(file) == path:
            text = linecache.getline(file, line).strip()
            where = f"{path.parent.name}/{path.name}, line {line}, in {name}"
            return where if text.startswith("raise NotImplementedError") else f"{where}:   {text}"
    return ""


def _of_ranks(text: str, path: Path) -> str:
    """The report of the harness (tests/harness/pool.py), shortened to a line or two for each distinct message of ranks."""
    _, *parts = SECTION.split(text)
    left = {(rank, kind): body for rank, kind, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}
    said: dict[str, list[str]] = {}
    for rank, line in HEADLINE.findall(SECTION.split(text)[0]):
        kind = "raised" if line.startswith("raised") else "was here"
        frames = [(m["path"], int(m["line"]), m["name"]) for m in FRAME.finditer(left.get((rank, kind), ""))]
        place = _place(frames if kind == "raised" else frames[::-1], path)
        if "Timed out" in line or "imed out waiting" in line:
            line = "waits for a message that does not come: who sends it, and is that rank not waiting itself?"
        elif "same collective calls" in line:
            line = "is done, but another rank is not, or sends and collectives did not all find a partner"
        elif line.startswith("had not finished"):
            line += ": it hangs"
        elif "Connection closed" in line or "onnection reset" in line:
            line = "has lost another rank"
        said.setdefault(_said(line.removeprefix("raised "), place), []).append(rank)
    lines = [f"rank {', '.join(whose)}: {line}" for line, whose in said.items()]
    printed = [f"rank {rank} printed{body}".rstrip() for (rank, kind), body in left.items() if kind == "printed"]
    return "\n".join([*lines, *printed])
