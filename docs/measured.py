"""What the pages say about behaviour comes from here: chapters run for real, once, kept until their sources change.

    measure()            short runs of chapters 00 and 07, the same flags: losses, and what was printed
    draw_profile(folder) a run of chapter 07 with a profile, as `pstar trace` draws it; profile() is the file itself
    help_of(chapter)     what --help prints
    capture(command)     a whole run as a user starts it, for the READMEs
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
GENERATED = REPO / "docs" / "_generated"
STORE = GENERATED / "measured.json"

# Shorter sequences and batches than the defaults, and a learning rate that suits them: a page needs the comparison, not a
# low loss, and where training is unstable the roundings of two orders of summation grow apart.
STEPS = 30
FLAGS = (f"--max-steps {STEPS} --warmup-steps 10 --lr 0.001 --seq-len 64 --batch-size 12 --eval-every {STEPS} "
         "--valid-data data/valid/webtext.json --device cpu").split()  # fmt: skip
CHAPTERS = ("00_single", "07_patrickstar")
PROFILED = "07_patrickstar"
# Activations as large as half the chunks, and memory that both cannot have at once.
PROFILE_FLAGS = ("--nproc 1 --max-steps 4 --warmup-steps 2 --batch-size 4 --seq-len 64 --chunk-size 100000 "
                 "--near-budget 100% --near-memory 24MiB --device cpu")  # fmt: skip
PROFILE_STEPS = "1-2"
PROFILE = GENERATED / "profile.json"
PICTURES = ("near.png", "blocks.png")
SOURCES = ("gpt2_chinese/**/*.py", "pstar/**/*.py", "data/**/*.json", "cache/vocab.txt", "docs/measured.py",
           *(f"chapters/{name}/*.py" for name in CHAPTERS))  # fmt: skip


def command_of(chapter: str) -> str:
    """The short run of a chapter as a reader would type it."""
    return f"bash chapters/{chapter}/train.sh {' '.join(FLAGS)}"


def measure() -> dict[str, Any]:
    """{date, versions, cores, runs: {chapter: {losses, said}}}; runs the chapters when a source has changed."""
    key = _hash_of_sources()
    if STORE.exists():
        stored = json.loads(STORE.read_text(encoding="utf-8"))
        if stored.get("key") == key:
            return stored
    print(f"docs: running {' and '.join(CHAPTERS)} for {STEPS} steps each", file=sys.stderr, flush=True)
    measured = {"key": key, **circumstances(), "runs": {chapter: _run(chapter) for chapter in CHAPTERS}}
    write_whole(STORE, json.dumps(measured, ensure_ascii=False, indent=1))
    return measured


def circumstances() -> dict[str, Any]:
    """What a number from a run must be read with."""
    return {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "python": platform.python_version(),
            "torch": importlib.metadata.version("torch").partition("+")[0]}  # fmt: skip


def _hash_of_sources() -> str:
    digest = hashlib.sha256("\0".join([sys.version, importlib.metadata.version("torch")]).encode())
    for path in sorted(path for pattern in SOURCES for path in REPO.glob(pattern)):
        digest.update(f"\0{path.relative_to(REPO)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _run(chapter: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "runs" / chapter
        command = [sys.executable, f"chapters/{chapter}/train.py", *FLAGS, "--output-dir", str(output)]
        said = _call(command, {"GPT2_CHINESE_CACHE": f"{folder}/tokens", "OMP_NUM_THREADS": "1"})
        rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {"losses": [row["loss"] for row in rows], "said": said.replace(f"{folder}/", "").replace(folder, "")}


def profile_commands() -> list[str]:
    """A run with a profile and what draws it, as a reader would type them."""
    run = f"bash chapters/{PROFILED}/train.sh {PROFILE_FLAGS}"
    return ["mkdir -p runs", f"{run} --profile runs/profile.json --output-dir runs/profiled",
            f"pstar trace runs/profile.json --steps {PROFILE_STEPS} --out runs/trace"]  # fmt: skip


def profile() -> Path:
    """The profile that profile_commands write; they run again only when a source has changed."""
    draw_profile(GENERATED / "figures")
    return PROFILE


def draw_profile(target: Path) -> None:
    """Runs profile_commands, keeps the profile and puts the two pictures into the folder; unless no source changed."""
    key, key_file = _hash_of_sources(), GENERATED / "profile.key"
    kept = [PROFILE, *(target / name for name in PICTURES)]
    if key_file.exists() and key_file.read_text() == key and all(path.exists() for path in kept):
        return
    print(f"docs: running {PROFILED} with a profile", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        profile = f"{folder}/profile.json"
        _call([sys.executable, f"chapters/{PROFILED}/train.py", *PROFILE_FLAGS.split(), "--profile", profile, "--output-dir",
               f"{folder}/run"], {"GPT2_CHINESE_CACHE": f"{folder}/tokens", "OMP_NUM_THREADS": "1"})  # fmt: skip
        _call([sys.executable, "-m", "pstar.cli", "trace", profile, "--steps", PROFILE_STEPS, "--out", folder], {})
        target.mkdir(parents=True, exist_ok=True)
        for name in PICTURES:
            shutil.copyfile(f"{folder}/{name}", target / name)
        shutil.copyfile(profile, PROFILE)
    write_whole(key_file, key)


def help_of(chapter: str) -> str:
    """What a chapter's --help prints, 100 columns wide."""
    return _call([sys.executable, f"chapters/{chapter}/train.py", "--help"], {"COLUMNS": "100"})


def help_of_module(module: str) -> str:
    """What `python -m module --help` prints."""
    return _call([sys.executable, "-m", module, "--help"], {"COLUMNS": "100"})


def _call(command: list[str], variables: dict[str, str]) -> str:
    """Runs a command in the repository; returns its stdout, or raises with what it said."""
    path = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": programs, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8", **variables}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} ended with status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def largest_difference(measured: dict[str, Any]) -> float:
    """Of the losses of chapter 07 from those of chapter 00, relative, over all steps."""
    first, second = (measured["runs"][chapter]["losses"] for chapter in CHAPTERS)
    return max(abs(a - b) / abs(a) for a, b in zip(first, second, strict=True))


def summary_rows(said: str) -> list[tuple[str, str]]:
    """(name, value) of the table that chapter 07 prints at its end: the chunk memory."""
    _, _, end = said.partition("\nDone.\n")
    table = end.partition("\n\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^  (\S.*?)  +(\S.*)$", table, re.MULTILINE)
    if not rows:
        raise SystemExit("error: the summary of chapter 07 has no table of the chunk memory; see docs/measured.py")
    return rows


def draw_losses(measured: dict[str, Any], target: Path) -> None:
    """Both curves in one picture, English labels only so that no font is needed."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["font.size"] = 11
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    styles = ({"color": "#9fa8da", "linewidth": 6}, {"color": "#1a237e", "linewidth": 1.6, "linestyle": "--"})
    for chapter, style in zip(CHAPTERS, styles, strict=True):
        losses = measured["runs"][chapter]["losses"]
        axes.plot(range(1, len(losses) + 1), losses, label=chapter, **style)
    vocabulary = re.search(r"ln = ([\d.]+)", measured["runs"][CHAPTERS[0]]["said"]).group(1)
    axes.axhline(float(vocabulary), color="#bbbbbb", linewidth=1, linestyle=":")
    axes.annotate(f"ln(vocabulary) = {vocabulary}", (STEPS, float(vocabulary)), ha="right", va="top", color="#777777",
                  xytext=(0, -3), textcoords="offset points", fontsize=10)  # fmt: skip
    axes.set(xlabel="step", ylabel="training loss, nats per token", xlim=(0, STEPS + 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center right")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=160, metadata={"Software": None})
    pyplot.close(figure)


def shown_steps() -> list[int]:
    """The steps whose losses a table lists."""
    return [1, *range(10, STEPS + 1, 10)]


def write_whole(path: Path, text: str) -> None:
    """Writes a file whole or not at all, and leaves one that is equal untouched (mkdocs serve watches times)."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
