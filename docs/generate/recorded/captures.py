"""A short real run of every chapter, on one corpus and with one set of flags; git tracks the results in docs/captured/.

    capture(names)      runs chapters and writes docs/captured/NN_name.json
    captured(name)      the content of that file: command, output, losses, date, versions

A build only reads these files; `python -m docs.generate --capture-chapters [NN ...]` runs the chapters.
tests/docs/test_captures.py checks that chapters still begin with the captured losses, and that all captured curves agree.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from docs.generate.recorded.measured import REPO, call, circumstances, write_whole

FOLDER = REPO / "docs" / "captured"

# Shorter sequences and smaller batches than the defaults, and a learning rate for them. A page needs the comparison, not a
# low loss. In unstable training, the rounding differences of two orders of summation would grow.
STEPS, WARMUP = 60, 10
FLAGS = (f"--max-steps {STEPS} --warmup-steps {WARMUP} --lr 0.0005 --seq-len 64 --batch-size 12 --eval-every {STEPS} "
         "--valid-data data/valid/webtext.json --device cpu")  # fmt: skip
# Extra flags of a chapter, so that it uses its technique and its curve equals chapter 00's in fp32.
OWN_FLAGS = {"04_apex": "--opt-level O0", "05_model_parallel": "--grad-accum 4",
             "08_param_efficient": "--method full --init-from random --kind all --recompute block"}  # fmt: skip
CHAPTERS = ("00_single", "01_parameter_server", "02_ddp", "03_horovod", "04_apex", "05_model_parallel", "06_zero",
            "07_patrickstar", "08_param_efficient")  # fmt: skip
BASE = CHAPTERS[0]


def flags_of(chapter: str) -> str:
    """The flags of a chapter's captured run."""
    return " ".join(filter(None, [OWN_FLAGS.get(chapter), FLAGS]))


def command_of(chapter: str) -> str:
    """The command of a chapter's captured run, as a reader would type it."""
    return f"bash chapters/{chapter}/train.sh {flags_of(chapter)}"


def run(chapter: str, flags: str) -> dict[str, Any]:
    """Runs a chapter; returns {losses, said}. `said` is its output without this machine's paths."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "runs" / chapter
        program = [sys.executable, f"chapters/{chapter}/train.py", *flags.split(), "--output-dir", str(output)]
        said = call(program, {"GPT2_CHINESE_CACHE": f"{folder}/tokens", "OMP_NUM_THREADS": "1"})
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    for path in (f"{folder}/", folder, f"{REPO}/", str(REPO)):
        said = said.replace(path, "")
    return {"losses": [row["loss"] for row in rows], "said": said}


def capture(wanted: Iterable[str] = ()) -> None:
    """Runs the chapters with the given numbers or names, by default all, and writes their results.

    Raises:
        SystemExit: a name is not a chapter's, or a run failed.
    """
    chosen = [name_of(one) for one in wanted] or list(CHAPTERS)
    for chapter in chosen:
        print(f"docs: {command_of(chapter)}", file=sys.stderr, flush=True)
        found = {"command": command_of(chapter), **circumstances(), **run(chapter, flags_of(chapter))}
        write_whole(FOLDER / f"{chapter}.json", json.dumps(found, ensure_ascii=False, indent=1) + "\n")
    captured.cache_clear()


def name_of(number: str) -> str:
    """'02' or '02_ddp' -> '02_ddp'."""
    for chapter in CHAPTERS:
        if number in (chapter, chapter[:2]):
            return chapter
    raise SystemExit(f"error: {number} is no chapter that is captured: {', '.join(CHAPTERS)}")


@cache
def captured(chapter: str) -> dict[str, Any]:
    """The captured run of a chapter.

    Raises:
        SystemExit: the chapter has no captured run.
    """
    path = FOLDER / f"{chapter}.json"
    if not path.exists():
        renew = f"python -m docs.generate --capture-chapters {chapter[:2]}"
        raise SystemExit(f"error: there is no {path.relative_to(REPO)}: {renew}")
    return json.loads(path.read_text(encoding="utf-8"))


# ---- what the pages use


def block(words: Callable[[str], str], chapter: str) -> str:
    """A collapsible block: the command, its output, and the circumstances of the run."""
    found = captured(chapter)
    line = words("Captured on {date}: Python {python}, torch {torch}, {cores} CPU cores.").format(**found)
    inside = f"```bash\n{found['command']}\n```\n\n```text\n{found['said'].strip()}\n```\n\n{line}\n"
    indented = "".join(f"    {text}\n" if text else "\n" for text in inside.splitlines())
    return f'??? example "{words("What a run printed")}"\n\n{indented}'


def largest_difference(chapter: str) -> float:
    """The largest relative difference of a chapter's losses from chapter 00's, over all steps."""
    pairs = zip(captured(BASE)["losses"], captured(chapter)["losses"], strict=True)
    return max(abs(a - b) / abs(a) for a, b in pairs)


def shown_steps() -> list[int]:
    """The steps whose losses a table lists."""
    return [1, *range(20, STEPS + 1, 20)]


def summary_rows(said: str) -> list[tuple[str, str]]:
    """(name, value) of each row of the table of chunk memory, which chapter 07 prints at its end."""
    _, _, end = said.partition("\nDone.\n")
    table = end.partition("\n\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^  (\S.*?)  +(\S.*)$", table, re.MULTILINE)
    if not rows:
        raise SystemExit("error: the summary of chapter 07 has no table of the chunk memory; see recorded/captures.py")
    return rows
