"""How long the commands of the chapters' first tabs take a reader without a GPU: run unchanged, kept by git.

    python -m docs.generate.recorded.timed [NN ...]
                                     runs those of all chapters, or of these, and writes docs/captured/timed.json
    commands(chapter)                the commands of the tab, which English and Chinese pages share
    line(words, chapter)             for a page: what they took

A page says `--8<-- "zh/timed/NN_name.md"`. Each command is held to LIMIT_S.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docs.generate.recorded.captures import CHAPTERS, name_of
from docs.generate.recorded.measured import REPO, circumstances, reader_in, write_whole

STORE = REPO / "docs" / "captured" / "timed.json"
TAB = re.compile(r'^=== "(?:One|Two) CPU process(?:es)?"\n(.*?)^=== ', re.MULTILINE | re.DOTALL)
LIMIT_S = 180


def commands(chapter: str) -> list[str]:
    """The commands of a chapter's first tab, without their comments."""
    page = (REPO / "docs" / "en" / "chapters" / f"{chapter}.md").read_text(encoding="utf-8")
    block = re.search(r"```bash\n(.*?)```", TAB.search(page)[1], re.DOTALL)[1]
    return [line.partition("  #")[0].strip() for line in block.splitlines() if line.strip()]


def here(command: str) -> str:
    """A command with its default folder as a flag: without it, the command would write to the repository, not below `.`."""
    found = re.match(r"bash chapters/(\w+)/(train|generate)\.sh", command)
    flag = {"train": "--output-dir", "generate": "--model"}[found[2]] if found else ""
    base = " --base-dir runs/08_base" if "chapters/08_param_efficient/train.sh" in command else ""
    return f"{command}{base}" if flag in command else f"{command} {flag} runs/{found[1]}{base}"


def run(chapters: list[str]) -> None:
    """Runs the commands of chapters and stores their seconds. The environment and the token cache exist before.

    Raises:
        SystemExit: a command fails or takes too long.
    """
    known = stored() if STORE.exists() else {}
    for chapter in chapters:
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder)
            environment = reader_in(base)
            seconds = {}
            for number, command in enumerate(commands(chapter)):
                if number == 0:  # fills the token cache, and makes chapter 08's base
                    once = f"{here(command)} --max-steps 1 --warmup-steps 0 --output-dir runs/first"
                    _call(once, base, environment, 5 * LIMIT_S)
                begin = time.perf_counter()
                _call(here(command), base, environment)
                seconds[command] = round(time.perf_counter() - begin, 1)
                print(f"timed: {seconds[command]:5.1f} s  {command}", file=sys.stderr, flush=True)
        known[chapter] = {**circumstances(), "seconds": seconds}
        kept = {name: known[name] for name in CHAPTERS if name in known}
        write_whole(STORE, json.dumps({"chapters": kept}, ensure_ascii=False, indent=1) + "\n")


def _call(command: str, base: Path, environment: dict[str, str], limit_s: int = LIMIT_S) -> None:
    try:
        done = subprocess.run(["bash", "-c", command], cwd=base, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=limit_s)  # fmt: skip
    except subprocess.TimeoutExpired:
        raise SystemExit(f"error: not done after {limit_s} s: {command}") from None
    if done.returncode:
        raise SystemExit(f"error: status {done.returncode}: {command}\n{done.stdout}")


def stored() -> dict[str, Any]:
    """Chapter -> circumstances of its run, and seconds of each command."""
    return json.loads(STORE.read_text(encoding="utf-8"))["chapters"]


def line(words: Callable[[str], str], chapter: str) -> str:
    """The seconds of a chapter's commands, in their order; raises SystemExit if the commands have changed since."""
    found = stored().get(chapter, {"seconds": {}})
    if list(found["seconds"]) != commands(chapter):
        renew = f"python -m docs.generate.recorded.timed {chapter[:2]}"
        raise SystemExit(f"error: commands of {chapter} have changed since they were timed: {renew}")
    took = words(", ").join(f"{seconds:.0f}" for seconds in found["seconds"].values())
    text = words("One after the other they took {took} seconds, on {cores} CPU cores without a GPU ({date}, torch {torch}).")
    return text.format(took=took, **found) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chapters", nargs="*", metavar="NN", help="their numbers or names; all without one")
    run([name_of(one) for one in parser.parse_args().chapters] or list(CHAPTERS))
