"""Wrong inputs to the real programs, one through train.sh: one line on stderr, status 2, in seconds, nothing written.

The table of all of them, in process, is tests/gpt2_chinese/test_error_table.py.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from tests.chapters.program import ROOT, Chapter, environment
from tests.limits import HANGS_S

WRONG = {
    "a pipe as corpus": ("02_ddp", ["--train-data", "{t}/pipe"], {}, r"cannot read corpus \S+/pipe: it is a pipe or"),
    "comments in the configuration": (
        "00_single", ["--model-config", "{t}/comments.json"], {}, r"\S+/comments\.json: not valid JSON: .*; JSON has no"),
    "WORLD_SIZE": ("07_patrickstar", [], {"WORLD_SIZE": "two"}, r"has WORLD_SIZE='two', .*: unset WORLD_SIZE"),
    "no place to meet": (
        "02_ddp", [], {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "none"},
        r"the environment has RANK, but .*MASTER_PORT='none' are no place to meet: unset RANK and WORLD_SIZE"),
    "a port in use": (
        "02_ddp", [], {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"},
        r"the ranks cannot meet at 127\.0\.0\.1 port \d+: .*in use.*"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_the_program_ends_with_one_line(case: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "comments.json").write_text('{"n_layer": 2, // few\n"n_head": 2}')
    name, flags, variables, line = WRONG[case]
    chapter = Chapter(name, tmp_path)
    command = chapter.command(*(flag.replace("{t}", str(tmp_path)) for flag in flags))
    if case == "comments in the configuration":
        command = ["bash", str(ROOT / "chapters" / name / "train.sh"), *command[2:]]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=HANGS_S,
            env=environment() | {key: value.replace("{port}", port) for key, value in variables.items()},
        )  # fmt: skip
    assert done.returncode == 2, done
    said = re.sub(r"^setup: .*\n", "", done.stderr)  # train.sh says once in a checkout which environment it uses
    assert done.stdout == "" and re.fullmatch(rf"error: .*{line}.*\n", said), done.stderr
    assert not chapter.output.exists()


def test_no_chapter_takes_an_engine_configuration_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text(json.dumps({"near_budget": "25%"}))
    said = Chapter("00_single", tmp_path).train("--model-config", tmp_path / "engine.json", status=2)
    assert re.fullmatch(r"error: \S+/engine\.json lacks n_layer, .*: give a GPT-2 config\.json\n", said), said
