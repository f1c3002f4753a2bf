"""Runs the commands of the production pages and chapter 08's first one, in one folder; git tracks their real output.

    bash scripts/python.sh -m docs.generate.recorded.seen [NAME ...]
                                      runs all, or these and what they need, and writes docs/captured/seen.json; two minutes
    block(name)                       for a page: the command and its output, with its status if that is not 0

A page includes `--8<-- "seen/NAME.md"`. Some commands need a fault, such as a stopped rank or an inverted byte. In SEEN
their `before` or `during` causes it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from docs.generate.recorded.measured import REPO, circumstances, reader_in, write_whole

STORE = REPO / "docs" / "captured" / "seen.json"
LONGEST = 40  # lines of a block


@dataclass(frozen=True)
class Seen:
    """One command, its expected status, and shell lines that run before it or at the same time."""

    command: str
    status: int = 0
    before: str = ""
    during: str = ""  # bash, with the process id in $P
    keep: str = ""  # a pattern: only lines that match are shown
    without: bool = False  # as if Horovod were not installed
    lines: int = LONGEST
    limit_s: int = 120


SHORT = "--max-steps 20 --warmup-steps 5 --batch-size 12 --seq-len 64 --device cpu"
MINE = "--train-data mine/text/train --valid-data mine/text/valid --vocab mine/vocab.txt"
ERROR = r"^error:|not finite|^interrupted"
LONG = "--max-steps 4000 --batch-size 12 --seq-len 64 --eval-every 4000 --device cpu"
# Python imports this file at its start, and then finds no Horovod.
HIDE = """import importlib.util as u
f = u.find_spec
u.find_spec = lambda name, *more: None if name.startswith("horovod") else f(name, *more)
"""
CHILD = 'until [ "$(wc -l < {run}/metrics.jsonl)" -ge 3 ]; do sleep 0.2; done; kill -{signal} "$(pgrep -P "$P" | tail -n 1)"'
RUN = "bash chapters/02_ddp/train.sh"
PYTHON = "bash scripts/python.sh"

SEEN = {
    # ---- corpus.md
    "convert": Seen(f"{PYTHON} -m gpt2_chinese.corpora convert mine/raw --output mine/text --min-length 10 --max-length 200 "
                    "--vocab cache/vocab.txt", before="python -m docs.generate.recorded.seen --raw mine/raw"),
    "vocabulary": Seen("bash cache/make_vocab.sh mine/text/train 2000 mine/vocab.txt mine/text/valid"),
    "check": Seen(f"{PYTHON} -m gpt2_chinese.vocabulary check --vocab mine/vocab.txt --corpus mine/text/valid"),
    "tokens": Seen(f"{PYTHON} -m gpt2_chinese.tokens --corpus mine/text/train --vocab mine/vocab.txt"),
    "train": Seen(f"{RUN} {MINE} --output-dir runs/mine {SHORT}"),
    "mix": Seen(f"{RUN} --documents pack --mix comments=0.5,news=0.3 --output-dir runs/mixed --max-steps 20 --device cpu",
                keep=r"^  (corpus|documents|sources|batch|steps) |^step (1|10|20)/|^step 20:"),
    "mix_unknown": Seen(f"{RUN} --mix news=0.5,songs=0.3", status=2, keep=ERROR),
    "generate": Seen("bash chapters/02_ddp/generate.sh --model runs/mine --prompt 今天天气 --num 2 --length 20"),
    "generate_json": Seen("bash chapters/02_ddp/generate.sh --model runs/mine --prompt 今天天气 --length 10 --json"),
    "evaluate": Seen(f"{PYTHON} -m gpt2_chinese.evaluate --model runs/mine --corpus mine/text/valid --by position"),
    "english_convert": Seen(f'{PYTHON} -m gpt2_chinese.corpora convert mine/books --output mine/english --format paragraphs '
                            '--join " " --min-length 40', before="python -m docs.generate.recorded.seen --books mine/books"),
    "english_vocabulary": Seen("bash cache/make_vocab.sh mine/english/train 2000 mine/english/tokenizer.json "
                               "mine/english/valid --kind bpe"),
    "english_train": Seen("bash chapters/00_single/train.sh --train-data mine/english/train --valid-data mine/english/valid "
                          f"--vocab mine/english/tokenizer.json --output-dir runs/english {SHORT}"),
    "export": Seen(f"{PYTHON} -m gpt2_chinese.weights export runs/mine --output mine/exported"),
    "init_from": Seen("bash chapters/00_single/train.sh --init-from mine/exported --train-data mine/text/train --valid-data "
                      f"mine/text/valid --output-dir runs/begun {SHORT}"),
    "evaluate_several": Seen(f"{PYTHON} -m gpt2_chinese.evaluate --model runs/mine runs/begun --corpus mine/text/valid "
                             "--choices --samples 4"),
    # ---- checkpoints.md
    "stopped": Seen(f"{RUN} --output-dir runs/told {LONG}",
                    during='until [ "$(wc -l < runs/told/metrics.jsonl)" -ge 3 ]; do sleep 0.2; done; kill -USR1 "$P"',
                    keep=r"SIG|goes on|checkpoint"),
    "across": Seen("bash chapters/00_single/train.sh --resume runs/told --output-dir runs/across --device cpu "
                   "--max-steps 10 --warmup-steps 5 --batch-size 12 --seq-len 64", keep=r"resum|^note|^step "),
    "resume_other": Seen(f"{RUN} {MINE} --vocab-profile uer --output-dir runs/mine {SHORT}", status=2, keep=ERROR),
    "damaged": Seen("bash chapters/00_single/train.sh --resume runs/mine/checkpoints/step_000020 --output-dir runs/damaged "
                    f"{MINE} {SHORT}", status=2, keep=ERROR, before="printf x | dd bs=1 seek=5000 conv=notrunc status=none "
                    "of=runs/mine/checkpoints/step_000020/model.safetensors"),
    "disk_full": Seen(f"{RUN} --output-dir small/run --save-every 4 {SHORT}", status=1,
                      before="mkdir small; mount -t tmpfs -o size=48m none small", keep=ERROR),
    # ---- troubleshooting.md
    "hang": Seen(f"{RUN} --timeout-s 5 --output-dir runs/hang {LONG}", status=1,
                 during=CHILD.format(run="runs/hang", signal="STOP"), keep=ERROR),
    "hang_report": Seen("bash chapters/01_parameter_server/train.sh --slow-worker-s 90 --hang-after 10 --output-dir "
                        f"runs/asleep {SHORT}", status=1, keep=ERROR),
    "hang_table": Seen(f"{PYTHON} -m gpt2_chinese.hangs runs/asleep"),
    "killed": Seen(f"{RUN} --output-dir runs/killed {LONG}", status=1,
                   during=CHILD.format(run="runs/killed", signal="KILL"), keep=ERROR),
    "not_finite": Seen(f"{RUN} --output-dir runs/nan --lr 1e30 --clip-grad-norm 0 {LONG}", status=1, keep=ERROR),
    "divisible": Seen(f"{RUN} --nproc 5", status=2, keep=ERROR),
    "near_too_small": Seen("bash chapters/07_patrickstar/train.sh --near-budget 100KiB", status=2, keep=ERROR),
    "port": Seen(f"RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29876 {RUN}", status=2, keep=ERROR,
                 before="python -m http.server 29876 --bind 127.0.0.1 >/dev/null 2>&1 & echo $! > server; sleep 1"),
    "no_launcher": Seen(f"RANK=0 {RUN}", status=2, keep=ERROR, before="kill $(cat server)"),
    "horovod": Seen(f"{PYTHON} chapters/03_horovod/train.py --nproc 2", status=2, without=True, keep=ERROR),
    "vocabulary_size": Seen("bash chapters/00_single/train.sh --model-config mine/exported/config.json", status=2,
                            keep=ERROR),
    "corpus_small": Seen("bash chapters/00_single/train.sh --train-data mine/one.json", status=2, keep=ERROR,
                         before="echo '[\"今天天气很好。\"]' > mine/one.json"),
    "unknown": Seen(f"{PYTHON} -m gpt2_chinese.vocabulary check --vocab mine/vocab.txt --corpus data/valid/wiki.json"),
    "cuda": Seen("bash chapters/02_ddp/train.sh --device cuda", status=2, keep=ERROR),
    # ---- chapters/08_param_efficient.md
    "adapt": Seen("bash chapters/08_param_efficient/train.sh --device cpu --output-dir runs/adapted --base-dir runs/base",
                  keep=r"^(?!step \d+/)", lines=120, limit_s=1200),
}  # fmt: skip


@cache
def seen(name: str) -> dict[str, Any]:
    """{command, status, said} of a name. Raises SystemExit if it never ran."""
    stored = json.loads(STORE.read_text(encoding="utf-8"))
    if name not in stored["commands"]:
        raise SystemExit(f"error: {name} was never run: python -m docs.generate.recorded.seen {name}")
    return stored["commands"][name]


def block(name: str) -> str:
    """The command as a user types it, followed by its output, as text."""
    found = seen(name)
    status = f"\n(status {found['status']})" if found["status"] else ""
    return f"$ {found['command']}\n{found['said']}{status}"


def where_and_when() -> dict[str, Any]:
    """The date, cores, python and torch of the runs."""
    return json.loads(STORE.read_text(encoding="utf-8"))["circumstances"]


# ---- running


def run(names: list[str]) -> None:
    """Runs the commands and stores their output."""
    stored = json.loads(STORE.read_text(encoding="utf-8"))["commands"] if STORE.exists() else {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        environment = reader_in(base)
        (base / "mine").mkdir()
        try:
            for name in names or SEEN:
                try:
                    stored[name] = _one(SEEN[name], base, environment)
                    _store(stored)
                    print(f"seen: {name}", file=sys.stderr, flush=True)
                except (SystemExit, subprocess.SubprocessError) as error:
                    wrong.append(f"{name}: {error}")
        finally:
            subprocess.run(["umount", base / "small"], capture_output=True)
    if wrong:
        raise SystemExit("\n".join(wrong))


def _store(stored: dict[str, Any]) -> None:
    kept = {name: stored[name] for name in SEEN if name in stored}
    write_whole(STORE, json.dumps({"circumstances": circumstances(), "commands": kept}, ensure_ascii=False, indent=1) + "\n")


def _one(one: Seen, base: Path, environment: dict[str, str]) -> dict[str, Any]:
    if one.without:
        (base / "without").mkdir()
        (base / "without" / "sitecustomize.py").write_text(HIDE)
        environment = environment | {"PYTHONPATH": f"{base / 'without'}{os.pathsep}{environment['PYTHONPATH']}"}
    subprocess.run(["bash", "-ec", one.before], cwd=base, env=environment, check=True, stdout=subprocess.DEVNULL)
    line = one.command if "=" in one.command.split()[0] else f"exec {one.command}"  # so that $P is the program's process id
    process = subprocess.Popen(["bash", "-c", line], cwd=base, env=environment, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)  # fmt: skip
    if one.during:
        subprocess.run(["bash", "-c", one.during], cwd=base, env={**environment, "P": str(process.pid)}, check=True,
                       stderr=subprocess.DEVNULL, timeout=60)  # fmt: skip
    said, _ = process.communicate(timeout=one.limit_s)
    if process.returncode != one.status:
        raise SystemExit(f"ended with status {process.returncode}: {one.command}\n{said}")
    return {"command": one.command, "status": one.status, "said": _clean(said, base, one.keep, one.lines)}


def _clean(said: str, base: Path, keep: str, most: int) -> str:
    """The output without this machine's paths and the set-up's line, at most `most` lines."""
    for path in (str(base.resolve()), str(base), str(REPO)):
        said = said.replace(f"{path}/", "")
    said = said.replace(f"{Path(sys.executable).parent}/", "")
    lines = [line.rstrip() for line in said.splitlines() if not line.startswith("setup: ")]
    if keep:
        lines = [line for line in lines if re.search(keep, line)]
    if len(lines) > most:
        lines = [*lines[: most // 2], "...", *lines[-most // 2 :]]
    return "\n".join(lines).strip("\n")


def write_raw(folder: Path) -> None:
    """Makes an untidy corpus from the shipped one: JSON lines with copies, a broken line, odd characters; a text file."""
    folder.mkdir(parents=True)
    texts = [text for part in ("train", "valid") for text in
             json.loads((REPO / "data" / part / "webtext.json").read_text(encoding="utf-8"))]  # fmt: skip
    lines = [json.dumps({"id": number, "text": text}, ensure_ascii=False) for number, text in enumerate(texts)]
    lines[3] = lines[3].replace("，", "，\u200b", 1)  # a zero-width blank
    lines += [*lines[:5], '{"id": 999, "text": "cut in the mid', json.dumps({"id": 1000, "text": "短"}, ensure_ascii=False)]
    (folder / "posts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_books(folder: Path) -> None:
    """Makes an English corpus of this site's own pages: plain text, a file a page, without tables, code and headings."""
    folder.mkdir(parents=True)
    for page in sorted((REPO / "docs" / "en").rglob("*.md")):
        text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text(encoding="utf-8"))
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", lambda match: match[1] or "", text)
        blocks = [block for block in re.split(r"\n\s*\n", text) if block[:1].isalpha()]
        (folder / f"{page.parent.name}_{page.stem}.txt").write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--raw"]:
        write_raw(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--books"]:
        write_books(Path(sys.argv[2]))
    else:
        run(sys.argv[1:])
