"""The generated parts of README.md and README.zh.md: between `<!-- generated: NAME -->` and `<!-- end -->`.

Readers see a README without a build, so the generated text is part of the file. tests/docs compare it with what would be
generated now. Only the captured run takes minutes: tests compare its unchanging lines with the short run of the pages.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from docs.generate.recorded.measured import REPO, write_whole
from docs.generate.tables import tables

READMES = {"en": REPO / "README.md", "zh": REPO / "README.zh.md"}
FIRST_COMMAND = "bash chapters/07_patrickstar/train.sh"
REGION = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def regions(text: str) -> dict[str, str]:
    """The generated parts: name -> text."""
    return {name: inside for _, name, inside, _ in REGION.findall(text)}


def generated(words: tables.Words, language: str) -> dict[str, str]:
    """The current text of every part except the captured run."""
    link = f"docs/{language}/chapters/{{}}.md"
    return {"tree": tables.tree(words), "chapters": tables.chapters(words, link)}


def filled(text: str, parts: dict[str, str]) -> str:
    """The text with these parts replaced; the other parts do not change."""
    return REGION.sub(lambda m: f"{m[1]}{parts.get(m[2], m[3])}{m[4]}", text)


def renew(words_in: Callable[[str], tables.Words], log: Path | None, capture: bool) -> None:
    """Writes the parts into both READMEs. With `log` or `capture` also the captured run, from the log or from a new run."""
    output = {}
    if capture or log:
        said, run = (log.read_text(encoding="utf-8"), log) if log else _run_first_command()
        config = json.loads((REPO / "runs/07_patrickstar/config.json").read_text(encoding="utf-8"))
        facts = {"date": time.strftime("%Y-%m-%d", time.localtime(run.stat().st_mtime)), "cores": os.cpu_count(),
                 "python": config["versions"]["python"], "torch": config["versions"]["torch"].partition("+")[0]}  # fmt: skip
        output = {"said": excerpt(said), "facts": facts}
    for language, path in READMES.items():
        words = words_in(language)
        parts = generated(words, language)
        if output:
            line = words("Captured on {date}: Python {python}, torch {torch}, {cores} CPU cores.").format(**output["facts"])
            parts["output"] = f"```text\n{output['said']}\n```\n\n{line}\n"
        write_whole(path, filled(path.read_text(encoding="utf-8"), parts))


def _run_first_command() -> tuple[str, Path]:
    """Runs the READMEs' first command unchanged; returns its output and the path of its metrics."""
    folder = REPO / "runs/07_patrickstar"
    if folder.exists():
        raise SystemExit(f"error: {folder} exists, so the command would not start a fresh run: move it away first")
    done = subprocess.run(FIRST_COMMAND.split(), cwd=REPO, stdout=subprocess.PIPE, text=True, encoding="utf-8", check=True)
    return done.stdout, folder / "metrics.jsonl"


def excerpt(said: str) -> str:
    """A run's output without the set-up's lines. Of the progress lines it keeps only the first and the last.

    Raises SystemExit if the run did not finish.
    """
    if "\nTo go on:\n" not in said:
        raise SystemExit("error: the captured run has not come to its end")
    lines = [line for line in said.strip().splitlines() if not line.startswith(("setup:", "pstar: CPU kernels"))]
    progress = [number for number, line in enumerate(lines) if re.match(r"step \d+/\d+: ", line)]
    left_out = set(range(progress[1], progress[-1]))
    shown = []
    for number, line in enumerate(lines):
        if number == progress[1]:
            shown.append("...")
        if number not in left_out:
            shown.append(line)
    return "\n".join(shown)
