"""Runs README's two commands in a new Debian, by its ordinary user, and writes the log that is committed.

    bash scripts/python.sh -m tests.fresh bookworm                                # Python 3.11
    bash scripts/python.sh -m tests.fresh trixie --tests "tests/pstar/layout"     # Python 3.13; a part of the tests

It needs root and debootstrap, and up to 10 GiB below $TMPDIR, which are free again at the end.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from tests.fresh.root import CommandFailed, Root, give, new_root, reason_why_not
from tests.fresh.steps import recipe

LOGS = Path(__file__).parent / "logs"
TAIL = 40  # lines of a command's output in the log


def main() -> None:
    """Reads the command line, writes the log. A command that fails ends it with status 1, its last lines are printed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fresh", description=__doc__.splitlines()[0])
    parser.add_argument("suite", help="Debian's name of the release: bookworm, trixie")
    parser.add_argument("--train", default="", metavar="FLAGS", help="flags of the first command (default: none)")
    parser.add_argument("--tests", default="", metavar="FLAGS", help="arguments of tests/run.sh (default: none)")
    parser.add_argument("--log", type=Path, help=f"the file to write (default: {LOGS.name}/SUITE.md beside this file)")
    given = parser.parse_args()
    if why := reason_why_not():
        print(f"error: {why}", file=sys.stderr)
        sys.exit(2)
    with tempfile.NamedTemporaryFile(prefix="fresh_", suffix=".log", delete=False) as everything:
        print(f"the output of all commands: {everything.name}", flush=True)
    try:
        text = run(given.suite, Path(everything.name), given.train, given.tests)
    except CommandFailed as error:
        sys.exit(f"error: {error}")
    log = given.log or LOGS / f"{given.suite}.md"
    log.parent.mkdir(exist_ok=True)
    log.write_text(text)
    print(f"wrote {log}")


def run(suite: str, everything: Path, train: str, tests: str) -> str:
    """Makes the root, runs all commands, and returns the log.

    Args:
        suite: Debian's name of the release.
        everything: the file that gets all output.
        train, tests: flags of the first and of the second command.
    """
    rows, begin = [], time.monotonic()
    with new_root(suite, everything) as root:
        rows.append(("debootstrap", "root", time.monotonic() - begin))
        for step in recipe().packages:
            rows.append((step, "root", root.run(step, user="root")[0]))
        begin = time.monotonic()
        give(root)
        rows.append(("git clone", "student", time.monotonic() - begin))
        commands = [f"{recipe().program} {train}".strip(), f"bash tests/run.sh {tests}".strip()]
        said = []
        for command in commands:
            print(command, flush=True)
            seconds, output = root.run(command, folder="course")
            rows.append((command, "student", seconds))
            said.append(output)
        facts = about(root, suite)
    return log_text(suite, facts, rows, commands, said)


def about(root: Root, suite: str) -> dict[str, str]:
    """What the machine has, asked in the root after the commands."""
    python = "course/.venv/bin/python"
    asked = {
        "Debian": f"echo $(cat /etc/debian_version) {suite}",
        "Python": f"{python} -c 'import platform; print(platform.python_version())'",
        "torch": f"{python} -c 'import torch; print(torch.__version__)'",
        "`.venv`, with what the tests need": "du -sh --apparent-size course/.venv | cut -f1",
        "C++ compiler": "command -v c++ g++ clang++ || echo none",
        "`localhost`": "getent hosts localhost || echo unknown",
    }
    facts = {name: root.run(command)[1].strip().splitlines()[-1] for name, command in asked.items()}
    return {**facts, "CPU cores": str(len(os.sched_getaffinity(0))), "load average at the end": f"{os.getloadavg()[2]:.1f}"}


def log_text(
    suite: str, facts: dict[str, str], rows: list[tuple[str, str, float]], commands: list[str], said: list[str]
) -> str:
    """The log as Markdown.

    Args:
        facts: what the machine has.
        rows: (command, user, seconds) in the order in which they ran.
        commands, said: README's commands, and what each printed.
    """
    day = time.strftime("%Y-%m-%d")
    lines = [f"# README's two commands on a new Debian ({suite}), {day}", "",
             f"Written by `bash scripts/python.sh -m tests.fresh {suite}`. Seconds are wall-clock time; a load above the",
             "number of cores makes them longer.", "",
             "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), "",
             "| command | user | seconds |", "|---|---|---:|",
             *(f"| `{command}` | {user} | {seconds:.0f} |" for command, user, seconds in rows)]  # fmt: skip
    for command, output in zip(commands, said, strict=True):
        lines += ["", f"## {command}", "", "```text", *shortened(output), "```"]
    return "\n".join(lines) + "\n"


def shortened(output: str) -> list[str]:
    """What the set-up said, and the last lines; without addresses of package indexes."""
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", output).replace("\r", "\n").splitlines()]
    lines = [line for line in lines if "://" not in line]
    first = [number for number, line in enumerate(lines) if line.startswith(("setup:", "pstar:", "horovod:"))]
    kept = sorted({*first, *range(max(0, len(lines) - TAIL), len(lines))})
    gaps = [["..."] if number and kept[place - 1] != number - 1 else [] for place, number in enumerate(kept)]
    return [line for gap, number in zip(gaps, kept, strict=True) for line in [*gap, lines[number]]]


if __name__ == "__main__":
    main()
